"""Settings of a Trainer with which no exact resume is possible, or which do not do what they say."""

from __future__ import annotations

import logging
from typing import Any

from unbroken.errors import UsageError

log = logging.getLogger(__name__)


def refuse(trainer: Any) -> None:
    """Raise UsageError for the first such setting, with what to do instead."""
    args = trainer.args
    accelerator = args.accelerator_config
    problems = (
        (trainer.is_deepspeed_enabled, "deepspeed: the Trainer's DeepSpeed engine is not supported here yet"),
        (
            args.auto_find_batch_size,
            "auto_find_batch_size=True: the batch size may not change under way; set it to False",
        ),
        (
            bool(getattr(accelerator, "split_batches", False)),
            "accelerator_config split_batches=True: give per_device_train_batch_size per rank instead",
        ),
        (
            bool(getattr(accelerator, "dispatch_batches", False)),
            "accelerator_config dispatch_batches=True: batches are read by every rank for itself; leave it out",
        ),
        (
            bool(getattr(args, "enable_jit_checkpoint", False)),
            "enable_jit_checkpoint=True: it takes SIGTERM, at which unbroken saves too; leave it out",
        ),
        (
            getattr(args, "parallelism_config", None) is not None,
            "parallelism_config: only data parallel Trainers and FSDP are supported",
        ),
    )
    for wrong, text in problems:
        if wrong:
            raise UsageError(f"this Trainer cannot be resumed exactly with {text}")


def warn_of_another_strategy(trainer: Any) -> None:
    """Say so if FSDP was asked for and something else runs: Accelerate does so without a word on a CPU."""
    if not trainer.is_fsdp_enabled:
        return
    kinds = {type(module).__name__ for module in trainer.model_wrapped.modules()}
    if not any("FSDP" in kind or "FullySharded" in kind for kind in kinds):
        log.warning(
            "fsdp was asked for, and %s runs: Accelerate shards no model on %s",
            type(trainer.model_wrapped).__name__,
            trainer.args.device.type,
        )
