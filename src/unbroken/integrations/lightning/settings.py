"""Settings of a Trainer with which no exact resume is possible."""

from __future__ import annotations

import inspect
import logging
from typing import Any

from lightning.pytorch import callbacks
from lightning.pytorch.strategies import DeepSpeedStrategy

from unbroken.errors import UsageError

log = logging.getLogger(__name__)


def refuse(trainer: Any, module: Any) -> None:
    """Raise UsageError for the first such setting, with what to do instead."""
    kinds = [type(callback) for callback in trainer.callbacks]
    problems = (
        (
            trainer.reload_dataloaders_every_n_epochs > 0,
            "reload_dataloaders_every_n_epochs: a new loader has no position; set it to 0",
        ),
        (
            _has(kinds, callbacks.StochasticWeightAveraging),
            "StochasticWeightAveraging, which swaps schedulers under way; use WeightAveraging",
        ),
        (
            _has(kinds, callbacks.BaseFinetuning),
            "BaseFinetuning callbacks, which add parameter groups under way: give all parameters to the optimizer and "
            "set learning rates with a scheduler",
        ),
        (
            _has(kinds, callbacks.LearningRateFinder, callbacks.BatchSizeFinder),
            "LearningRateFinder and BatchSizeFinder, which train inside fit: run Tuner(trainer) beforehand",
        ),
        (
            isinstance(trainer.strategy, DeepSpeedStrategy),
            'strategy="deepspeed": it keeps its own copies of weights; use "ddp" or ModelParallelStrategy',
        ),
        (
            "dataloader_iter" in inspect.signature(module.training_step).parameters,
            "training_step(dataloader_iter): what was fetched ahead is not known; take (batch, batch_idx)",
        ),
    )
    for wrong, text in problems:
        if wrong:
            raise UsageError(f"this Trainer cannot be resumed exactly with {text}")
    if trainer._val_check_time_interval is not None:
        log.warning(
            "val_check_interval is a time: when validation runs differs from run to run, and what depends on it; give "
            "a number of batches"
        )


def refuse_ckpt_path(trainer: Any) -> None:
    """Raise UsageError if Lightning has restored a checkpoint of its own. It is known only then."""
    if trainer.ckpt_path is not None:
        raise UsageError(
            "fit(ckpt_path=…): leave it out, what is in the run directory is resumed by itself; to begin with the "
            "weights of another run, load them into the model"
        )


def _has(kinds: list[type], *unwanted: type) -> bool:
    return any(issubclass(kind, unwanted) for kind in kinds)
