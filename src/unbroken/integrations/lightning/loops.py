"""Lightning's fit loop and epoch loop, with a save at the end of each batch and a beginning in mid-epoch.

A loop of Lightning's that loads its own state guesses from counters where in an epoch it was, and runs hooks and
schedulers twice or not at all. A save here comes when all that belongs to a batch is done, validation included; so a
restored loop has only to go on: counters as they were, no hook of the epoch's beginning, the rest of its batches, and
its end.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from lightning.pytorch.loops.fit_loop import RestartStage, _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.loops.utilities import _is_max_limit_reached

from unbroken.errors import UsageError


class Keeper(Protocol):
    """Who saves and restores, as the loops see it."""

    resumed: bool
    """An epoch was restored and has not gone on yet."""

    def training(self) -> AbstractContextManager[None]:
        """Restores as it is entered, when data and model are set up; ends the saves as it is left."""

    def going_on(self) -> None:
        """The restored epoch goes on now: nothing comes before its next batch."""

    def batch_over(self) -> None:
        """All that belongs to a batch is done."""

    def epoch_over(self) -> None:
        """The batches of an epoch are over, whether all were taken or not."""


class FitLoop(_FitLoop):
    """What runs the epochs."""

    keeper: Keeper

    def run(self) -> None:
        """Restore, and train to the end."""
        self.setup_data()
        with self.keeper.training():
            super().run()

    @property
    def done(self) -> bool:
        """Not before the end of a restored epoch, whose hooks are yet to run: not even if no batch is left."""
        return False if self.keeper.resumed else super().done

    def reset(self) -> None:
        """Begin in the middle of an epoch, if one was restored."""
        super().reset()
        if self.keeper.resumed:
            self._restart_stage = RestartStage.RESTARTED_MID_EPOCH

    def on_advance_end(self) -> None:
        """The end of an epoch."""
        self.keeper.epoch_over()
        super().on_advance_end()


class EpochLoop(_TrainingEpochLoop):
    """What runs the batches of an epoch."""

    keeper: Keeper

    def reset(self) -> None:
        """Begin with the counters at nothing, but for a restored epoch."""
        if self.keeper.resumed:
            self._restarting = True  # until `on_run_start` is over, which else makes another iterator
        else:
            super().reset()

    def on_run_start(self, data_fetcher: Any) -> None:
        """Right before the first batch of an epoch, or of what is left of it."""
        super().on_run_start(data_fetcher)
        if self.keeper.resumed:
            self._restarting = False
            self.keeper.going_on()

    def on_advance_end(self, data_fetcher: Any) -> None:
        """After each batch: validation, if it is due."""
        super().on_advance_end(data_fetcher)
        self.keeper.batch_over()


def install(trainer: Any, keeper: Keeper) -> None:
    """Let the loops of a Trainer be ours. Raises UsageError for loops of the user's own."""
    fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
    for loop, theirs in ((fit, _FitLoop), (epoch, _TrainingEpochLoop)):
        if type(loop) is not theirs:
            raise UsageError(f"fit_loop: a Trainer with a {type(loop).__name__} of its own cannot be resumed exactly")
    # The objects stay: others hold them already.
    fit.__class__, epoch.__class__ = FitLoop, EpochLoop
    fit.keeper = epoch.keeper = keeper


def uninstall(trainer: Any) -> None:
    """Give the loops back to Lightning. Does nothing if they are."""
    fit: Any = trainer.fit_loop
    epoch: Any = fit.epoch_loop
    if type(fit) is FitLoop:
        for loop, theirs in ((fit, _FitLoop), (epoch, _TrainingEpochLoop)):
            loop.__class__ = theirs
        del fit.keeper, epoch.keeper


def counters(trainer: Any) -> dict[str, Any]:
    """The progress of all loops."""
    state: dict[str, Any] = trainer.fit_loop.state_dict()
    state["state_dict"].pop("combined_loader", None)  # loaders are saved by name
    return state


def set_counters(trainer: Any, state: dict[str, Any]) -> None:
    """Put the progress back, and leave nothing for Lightning to guess from."""
    fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
    fit.load_state_dict(state)
    for loop in (epoch.automatic_optimization, epoch.manual_optimization, epoch.val_loop, epoch, fit):
        loop.on_iteration_done()
    iter(fit._data_fetcher)


def is_over(trainer: Any) -> bool:
    """Whether the batch that ended was the last of the training, as far as can be told before the epoch's end."""
    fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
    if trainer.should_stop and fit._can_stop_early:
        return True
    if _is_max_limit_reached(epoch.global_step, fit.max_steps):
        return True
    return bool(
        epoch._num_ready_batches_reached()
        and _is_max_limit_reached(fit.epoch_progress.current.processed + 1, fit.max_epochs)
    )
