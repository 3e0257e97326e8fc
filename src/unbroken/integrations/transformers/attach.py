"""A Trainer that saves as it trains and resumes by itself.

The Trainer's loop stays the Trainer's. Where it begins, it finds what a checkpoint had: `_init_training_state` is where
it asks what was trained already, but the optimizer, without which nothing can be restored, is made after that; so both
are done there. An epoch that was under way is run as a shorter one. A save comes when a step is over, evaluation, logs
and the Trainer's own checkpoints included, so that none of these is left out or done twice.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback

from unbroken.checkpointer import Checkpointer
from unbroken.errors import SaveFailed, UsageError
from unbroken.integrations.transformers.loader import EpochLoader, training_loader
from unbroken.integrations.transformers.progress import Configuration, Log, Progress
from unbroken.integrations.transformers.settings import refuse, warn_of_another_strategy
from unbroken.integrations.transformers.trainer import check, check_begun, replace
from unbroken.integrations.workers import ending_with_each_pass
from unbroken.integrations.world import size_as_saved
from unbroken.state import rng

log = logging.getLogger(__name__)


def attach(trainer: Trainer, path: str | Path, *, state: Mapping[str, object] | None = None, **options: Any) -> None:
    """Let `trainer.train()` save into `path` as it goes, and go on from the newest good checkpoint in it.

        trainer = Trainer(model, args, train_dataset=…)
        attach(trainer, "runs/bert", every=unbroken.Every(steps=100))
        trainer.train()

    path     the run directory, shared by all nodes; not the Trainer's `output_dir`, whose checkpoints stay its own
    state    further objects to save, by name: what a callback keeps beside the model, say
    options  the Checkpointer's: `every`, `keep`, `on_error`, …

    Saved are model, optimizer, scheduler, scaler, the position in the data, random numbers, and what the Trainer and
    its callbacks count and log. The training loader is replaced by one with an exact position (`unbroken.resumable`):
    the samples of a step follow from seed and epoch. Do not give `train` a `resume_from_checkpoint`.

    Raises UsageError for a setting with which no exact resume is possible, naming it.
    """
    check(trainer)
    refuse(trainer)
    _Run(trainer, path, dict(state or {}), options).install()


@dataclass(slots=True)
class _Resumed:
    """An epoch that was under way."""

    epoch: int
    updates: int
    """Optimizer steps of it that are done."""
    stop: bool
    """Training was over, or told to be."""
    leave: bool
    """The epoch was told to be over."""


class _Run(TrainerCallback):
    """One Trainer and its run directory."""

    def __init__(self, trainer: Any, path: str | Path, state: dict[str, object], options: dict[str, Any]) -> None:
        self._trainer = trainer
        self._path = path
        self._state = state
        self._options = options
        self._progress = Progress(trainer)
        self._checkpointer: Checkpointer | None = None
        self._loader: EpochLoader | None = None
        self._prepared: tuple[Any, Any] | None = None
        self._resumed: _Resumed | None = None
        self._whole_epoch = 0
        """Batches in the epoch under way, if it is run as a shorter one; else 0."""
        self._loss_before: Any = 0.0
        self._counted = 0
        self._evaluates_on_start = False
        self._random: dict[str, Any] = {}
        """Random state as it was restored."""

    def install(self) -> None:
        """Take the Trainer's methods over."""
        for name, hook in (
            ("_inner_training_loop", self._train),
            ("get_train_dataloader", self._make_loader),
            ("get_eval_dataloader", self._make_evaluation_loader),
            ("_init_training_state", self._restore),
            ("_prepare_for_training", self._prepare),
            ("_run_epoch", self._run_epoch),
            ("_maybe_log_save_evaluate", self._end_step),
        ):
            replace(self._trainer, name, hook)
        # First, so that other callbacks see what it puts right.
        self._trainer.callback_handler.callbacks.insert(0, self)

    # The Trainer's methods. Each hook is given the original to call, and its arguments.

    def _train(self, original: Any, arguments: dict[str, Any]) -> Any:
        if arguments["resume_from_checkpoint"] is not None:
            raise UsageError(
                "leave resume_from_checkpoint out of trainer.train(): what is in the run directory is resumed by itself"
            )
        if arguments["trial"] is not None:
            raise UsageError("a hyperparameter search trains many models: attach a Trainer that trains one")
        with contextlib.ExitStack() as stack:
            self._stack = stack
            try:
                return original()
            finally:
                if self._loader is not None:
                    self._loader.close()
                self._checkpointer = self._prepared = self._loader = None

    def _make_loader(self, original: Any, arguments: dict[str, Any]) -> EpochLoader:
        loader = training_loader(self._trainer, original)
        size_as_saved(loader, self._path, self._trainer.args.world_size)
        self._loader = EpochLoader(loader)
        return self._loader

    def _make_evaluation_loader(self, original: Any, arguments: dict[str, Any]) -> Any:
        return ending_with_each_pass(original())

    def _restore(self, original: Any, arguments: dict[str, Any]) -> tuple[int, int]:
        trainer, given = self._trainer, arguments
        original()
        self._prepared = trainer._prepare_for_training(given["max_steps"], self._loader, None)
        warn_of_another_strategy(trainer)
        self._checkpointer = self._stack.enter_context(Checkpointer(self._path, self._everything(), **self._options))
        self._counted = 0
        restored = self._checkpointer.restore()
        if restored is None:
            return 0, 0
        self._random = rng.read_global()
        stopped, left = self._progress.apply()
        trainer.state.init_training_references(trainer, given["max_steps"], given["num_train_epochs"], given["trial"])
        self._counted = trainer.state.global_step
        stop = stopped or self._counted >= given["max_steps"]
        self._resumed = _Resumed(self._progress.epoch, self._progress.updates, stop, left)
        if trainer.is_world_process_zero():
            print(restored, flush=True)  # noqa: T201  # what the loop of a script would do
        return self._progress.epoch, 0

    def _everything(self) -> dict[str, object]:
        trainer, loader = self._trainer, self._loader
        assert loader is not None
        state: dict[str, object] = {
            "model": trainer.model_wrapped,
            "optimizer": getattr(trainer.optimizer, "optimizer", trainer.optimizer),
            "scheduler": trainer.lr_scheduler,
            "loader": loader.resumable,
            "trainer": self._progress,
            "log": Log(trainer),
            "config": Configuration(trainer),
        }
        if trainer.accelerator.scaler is not None:
            state["scaler"] = trainer.accelerator.scaler
        twice = sorted(state.keys() & self._state.keys())
        if twice:
            raise UsageError(f"state={{{twice[0]!r}: …}}: the Trainer's own {twice[0]} is saved by that name")
        return {**state, **self._state}

    def _prepare(self, original: Any, arguments: dict[str, Any]) -> Any:
        if self._prepared is None:
            return original()
        prepared, self._prepared = self._prepared, None
        return prepared

    def _run_epoch(self, original: Any, arguments: dict[str, Any]) -> None:
        resumed, self._resumed = self._resumed, None
        loader = self._loader
        assert loader is not None
        self._whole_epoch = 0
        if resumed is None:
            self._progress.epoch, self._progress.updates = arguments["epoch"], 0
        else:
            # What ran since the restore ran in the run before as well, but not here.
            self._progress.go_on()
            rng.write_global(self._random)
            if self._is_over(resumed, arguments):
                self._end_epoch(arguments)
                if not resumed.stop:
                    loader.leave_epoch()
                self._trainer.control.should_training_stop |= resumed.stop
                return
            self._whole_epoch = arguments["steps_in_epoch"]
            done = resumed.updates * self._trainer.args.gradient_accumulation_steps
            arguments["steps_in_epoch"] -= done
            arguments["num_update_steps_per_epoch"] -= resumed.updates
        original()
        if not (self._trainer.control.should_training_stop or self._trainer.control.should_epoch_stop):
            loader.end_pass()

    def _is_over(self, resumed: _Resumed, arguments: dict[str, Any]) -> bool:
        """Whether only the end of the epoch is left, where it is logged and evaluated."""
        if resumed.stop or resumed.leave:
            return True
        assert self._loader is not None
        return resumed.updates >= arguments["num_update_steps_per_epoch"] or not self._loader.has_more()

    def _end_epoch(self, arguments: dict[str, Any]) -> None:
        """What `_run_epoch` does when there are no batches left."""
        trainer = self._trainer
        trainer.control = trainer.callback_handler.on_epoch_end(trainer.args, trainer.state, trainer.control)
        trainer._maybe_log_save_evaluate(
            trainer._tr_loss,
            self._progress.grad_norm,
            arguments["model"],
            arguments["trial"],
            arguments["epoch"],
            arguments["ignore_keys_for_eval"],
            arguments["start_time"],
            learning_rate=self._progress.learning_rate,
        )

    def _end_step(self, original: Any, arguments: dict[str, Any]) -> None:
        trainer, progress = self._trainer, self._progress
        stepped = trainer.state.global_step > self._counted
        loss = arguments["tr_loss"].detach() - self._loss_before if stepped else None
        progress.grad_norm, progress.learning_rate = arguments["grad_norm"], arguments["learning_rate"]
        original()
        self._loss_before = trainer._tr_loss.detach().clone()
        if stepped:
            self._counted = trainer.state.global_step
            assert self._checkpointer is not None
            self._checkpointer.step(loss=loss)
            if trainer.control.should_training_stop:
                # The Trainer may put the best model's weights into place now, which are still being copied.
                with contextlib.suppress(SaveFailed):
                    self._checkpointer.wait()

    # The Trainer's events.

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Right after the Trainer set its sums to nothing."""
        check_begun(self._trainer)
        self._progress.begin()
        self._loss_before = self._trainer._tr_loss.detach().clone()
        if self._resumed is not None and args.eval_on_start:  # that was at the start
            args.eval_on_start, self._evaluates_on_start = False, True

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Right after the evaluation at the start, if there is one."""
        if self._evaluates_on_start:
            args.eval_on_start, self._evaluates_on_start = True, False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Right after the Trainer counted a step."""
        self._progress.updates += 1
        if self._whole_epoch:  # the Trainer thinks that this epoch is short
            batches = min(self._progress.updates * args.gradient_accumulation_steps, self._whole_epoch)
            state.epoch = self._progress.epoch + batches / self._whole_epoch
