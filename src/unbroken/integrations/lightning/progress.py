"""What a Trainer knows of its run besides model, optimizers and data: counters, and the state of its callbacks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.callbacks import Checkpoint, Timer, WeightAveraging
from lightning.pytorch.utilities.model_helpers import is_overridden

from unbroken.integrations.lightning.loops import counters, set_counters
from unbroken.integrations.lightning.modes import Modes

log = logging.getLogger(__name__)


class Progress:
    """A Trainer's own state, equal on all ranks. Registered with the Checkpointer; `apply` puts back what it loaded."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._loaded: Mapping[str, Any] | None = None
        self._accumulate_grad_batches: int | None = None
        self._modes = Modes(trainer.lightning_module)
        self._changed: Mapping[str, Mapping[str, bool]] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Plain values, and what callbacks and modules save of their own."""
        if self._loaded is not None:  # the Trainer has not come to where it takes it over
            return dict(self._loaded)
        trainer = self._trainer
        return {
            "loops": counters(trainer),
            "should_stop": trainer.should_stop,
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "modes": self._modes.changed(),
            "callbacks": {one.state_key: one.state_dict() for one in _exact(trainer) if one.state_dict()},
            "datamodule": trainer.datamodule.state_dict() if trainer.datamodule is not None else {},
            "hooks": self._saved_by_hooks(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a state, until the Trainer is ready for it."""
        self._loaded = state

    def apply(self) -> None:
        """Put back what was loaded, before `on_train_start`."""
        assert self._loaded is not None
        loaded, self._loaded = self._loaded, None
        trainer = self._trainer
        set_counters(trainer, dict(loaded["loops"]))
        trainer.should_stop = loaded["should_stop"]
        self._accumulate_grad_batches = loaded["accumulate_grad_batches"]
        self._changed = loaded["modes"]
        _load(_exact(trainer), loaded["callbacks"])
        if trainer.datamodule is not None and loaded["datamodule"]:
            trainer.datamodule.load_state_dict(loaded["datamodule"])
        checkpoint = {**self._checkpoint("on_load_checkpoint"), **loaded["hooks"]}
        for hook in self._hooks("on_load_checkpoint"):
            hook(checkpoint)

    def go_on(self) -> None:
        """Put back what hooks of an epoch's beginning set, which do not run again in the middle of the epoch.

        After `on_train_start`, where `GradientAccumulationScheduler` wants to find its setting as it was at first.
        """
        if self._accumulate_grad_batches is not None:
            self._trainer.accumulate_grad_batches = self._accumulate_grad_batches
            self._accumulate_grad_batches = None
        if self._changed is not None:
            self._modes.put(self._changed)
            self._changed = None

    def _saved_by_hooks(self) -> dict[str, Any]:
        """What `on_save_checkpoint` of callbacks, module and data module added to a checkpoint of Lightning's."""
        hooks = self._hooks("on_save_checkpoint")
        if not hooks:
            return {}
        checkpoint = self._checkpoint("on_save_checkpoint")
        own = set(checkpoint)
        for hook in hooks:
            hook(checkpoint)
        return {key: value for key, value in checkpoint.items() if key not in own}

    def _checkpoint(self, hook: str) -> dict[str, Any]:
        """What hooks expect to find in a checkpoint."""
        if not self._hooks(hook):
            return {}
        trainer = self._trainer
        return {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "state_dict": dict(trainer.lightning_module.state_dict()),
            "callbacks": {},
            "loops": counters(trainer),
            "optimizer_states": [],
            "lr_schedulers": [],
        }

    def _hooks(self, name: str) -> list[Any]:
        trainer = self._trainer
        found = []
        for callback in _exact(trainer):
            if is_overridden(name, callback) and not isinstance(callback, WeightAveraging):
                found.append(_of_callback(callback, name, trainer))
        for part in (trainer.lightning_module, trainer.datamodule):
            if part is not None and is_overridden(name, part):
                found.append(getattr(part, name))
        return found


class Files:
    """The state of callbacks that says where files lie and how long things took: not equal in equal runs."""

    tells_time = True

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._loaded: Mapping[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """By callback."""
        if self._loaded is not None:
            return dict(self._loaded)
        return {one.state_key: one.state_dict() for one in self._callbacks() if one.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a state, until the Trainer is ready for it."""
        self._loaded = state

    def apply(self) -> None:
        """Put back what was loaded."""
        loaded, self._loaded = self._loaded, None
        _load(self._callbacks(), loaded or {})

    def _callbacks(self) -> list[Any]:
        return [one for one in self._trainer.callbacks if isinstance(one, Checkpoint | Timer)]


def averages(trainer: Any) -> dict[str, Any]:
    """Averaged models of callbacks, by a name to register them under."""
    found = [one for one in trainer.callbacks if isinstance(one, WeightAveraging)]
    models = [one._average_model for one in found if one._average_model is not None]
    return {"average" if len(models) == 1 else f"average{at}": model for at, model in enumerate(models)}


def _exact(trainer: Any) -> list[Any]:
    return [one for one in trainer.callbacks if not isinstance(one, Checkpoint | Timer)]


def _load(callbacks: list[Any], states: Mapping[str, Any]) -> None:
    left = dict(states)
    for callback in callbacks:
        if callback.state_key in left:
            callback.load_state_dict(left.pop(callback.state_key))
        elif callback.state_dict():
            log.warning("the checkpoint has no state of the callback %s: it begins anew", callback.state_key)
    for key in left:
        log.warning("the checkpoint has a state of the callback %s, and there is none", key)


def _of_callback(callback: Any, name: str, trainer: Any) -> Any:
    return lambda checkpoint: getattr(callback, name)(trainer, trainer.lightning_module, checkpoint)
