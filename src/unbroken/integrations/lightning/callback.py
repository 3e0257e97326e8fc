"""A callback that saves as Lightning's Trainer trains, and makes `fit` go on from the newest good checkpoint.

Restored is in `on_fit_start`: model, optimizers and schedulers exist, and no loop has begun. A save comes when a batch
is over, validation included (`_TrainingEpochLoop.on_advance_end`), so that nothing is left out or done twice.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback

from unbroken.checkpointer import Checkpointer
from unbroken.errors import UsageError
from unbroken.integrations.extras import needs
from unbroken.integrations.lightning.loaders import Loaders
from unbroken.integrations.lightning.names import AT_LEAST, check
from unbroken.integrations.lightning.progress import Progress

log = logging.getLogger(__name__)


class UnbrokenCheckpoint(Callback):
    """Saves everything that `trainer.fit(model)` needs to go on bit for bit, and lets it do so by itself.

        trainer = Trainer(callbacks=[UnbrokenCheckpoint("runs/x", every=unbroken.Every(steps=100))])
        trainer.fit(model)

    path     the run directory, shared by all nodes
    state    further objects to save, by name
    options  the Checkpointer's: `every`, `keep`, `on_error`, …

    Saved are model, optimizers, schedulers, precision (scaler), loops, callbacks' and data module's state, positions in
    the data, partial gradients, random numbers. Training loaders get an exact position (`unbroken.resumable`): the
    samples of a step follow from seed and epoch. Steps are batches after which an optimizer stepped. Do not give `fit`
    a `ckpt_path`. Lightning's own checkpoints stay as they are.

    Raises UsageError, in `fit`, for a setting with which no exact resume is possible, naming it.
    """

    def __init__(self, path: str | Path, *, state: Mapping[str, object] | None = None, **options: Any) -> None:
        needs("lightning", "lightning", AT_LEAST)
        self._path = path
        self._state = dict(state or {})
        self._options = options
        self._loaders: Loaders | None = None
        self._checkpointer: Checkpointer | None = None
        self._counted = 0
        self._loss: Any = None
        self._resumed_at: int | None = None
        """Batches that were trained when a checkpoint was restored, until another one is."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Before any loader is asked for."""
        if stage != "fit":
            return
        check(trainer)
        _refuse(trainer)
        self._loaders = Loaders(trainer, self._path)
        self._loaders.take_over()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Restore what a checkpoint has."""
        if getattr(trainer, "ckpt_path", None) is not None:
            raise UsageError("leave ckpt_path out of fit(): what is in the run directory is resumed by itself")
        trainer.fit_loop.setup_data()
        progress = Progress(trainer)
        assert self._loaders is not None
        self._checkpointer = Checkpointer(self._path, self._everything(trainer, progress), **self._options)
        restored = self._checkpointer.restore()
        if restored is not None:
            progress.apply()
            self._loaders.were_restored()
            iter(trainer.fit_loop._data_fetcher)
            self._resumed_at = trainer.fit_loop.epoch_loop.batch_progress.total.ready
            if trainer.is_global_zero:
                print(restored)  # noqa: T201  # what the loop of a script would do
        self._counted = trainer.global_step
        epoch_loop = trainer.fit_loop.epoch_loop
        end, begin = epoch_loop.on_advance_end, epoch_loop.on_run_start
        epoch_loop.on_advance_end = lambda data_fetcher: self._end_batch(trainer, end, data_fetcher)
        epoch_loop.on_run_start = lambda data_fetcher: self._begin_epoch(trainer, begin, data_fetcher)

    def _everything(self, trainer: Any, progress: Progress) -> dict[str, object]:
        assert self._loaders is not None
        state: dict[str, object] = {
            "model": trainer.strategy.model,
            **_named("optimizer", trainer.optimizers),
            **_named("scheduler", [config.scheduler for config in trainer.lr_scheduler_configs]),
            **self._loaders.by_name(),
            "trainer": progress,
        }
        twice = sorted(state.keys() & self._state.keys())
        if twice:
            raise UsageError(f"state={{{twice[0]!r}: …}}: the Trainer's own {twice[0]} is saved by that name")
        return {**state, **self._state}

    def _begin_epoch(self, trainer: Any, original: Any, data_fetcher: Any) -> None:
        """Stands for `on_run_start` of the loop over batches."""
        original(data_fetcher)
        # Else, at the end of an epoch that goes on, schedulers that wait for a metric would be left out.
        trainer.fit_loop._restarting = False

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        """Keep the loss, for the ledger."""
        self._loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs

    def _end_batch(self, trainer: Any, original: Any, data_fetcher: Any) -> None:
        """Stands for `on_advance_end` of the loop over batches."""
        loop = trainer.fit_loop.epoch_loop
        if self._resumed_at == loop.batch_progress.total.ready:
            # Lightning went back to a batch that was over, validated and saved: nothing is to be done again.
            loop._skip_next_val = False
            if loop._num_ready_batches_reached():
                assert self._loaders is not None
                self._loaders.leave_epoch()
            return
        self._resumed_at = None
        original(data_fetcher)
        assert self._checkpointer is not None
        stepped = trainer.global_step != self._counted
        self._counted = trainer.global_step
        self._checkpointer.step(loss=self._loss, accumulating=not stepped)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Wait until everything is durable."""
        self._leave(None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End without waiting for other ranks, unless all of them leave together (`unbroken.Preempted`)."""
        self._leave(exception)

    def _leave(self, error: BaseException | None) -> None:
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            checkpointer.__exit__(None if error is None else type(error), error, None)


def _named(kind: str, objects: list[Any]) -> dict[str, object]:
    return {kind if len(objects) == 1 else f"{kind}{at}": each for at, each in enumerate(objects)}


def _refuse(trainer: Any) -> None:
    """Raise UsageError for what makes an exact resume impossible."""
    problems = (
        (
            bool(trainer.reload_dataloaders_every_n_epochs),
            "reload_dataloaders_every_n_epochs: a new loader would begin anew; set it to 0",
        ),
        ("DeepSpeed" in type(trainer.strategy).__name__, "DeepSpeedStrategy: it is not supported here yet"),
        (trainer.fast_dev_run, "fast_dev_run: it is no training"),
    )
    for wrong, text in problems:
        if wrong:
            raise UsageError(f"this Trainer cannot be resumed exactly with {text}")
