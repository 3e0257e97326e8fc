"""What a Trainer knows of its run besides model, optimizer and data: counters, logs, metrics, its callbacks' state."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_callback import ExportableState

from unbroken.integrations.transformers.trainer import LOSS, SUMS

log = logging.getLogger(__name__)

_OF_THIS_START = frozenset(
    {
        "is_local_process_zero",
        "is_world_process_zero",
        "max_steps",
        "num_train_epochs",
        "logging_steps",
        "eval_steps",
        "save_steps",
        "train_batch_size",
        "trial_name",
        "trial_params",
        "is_hyper_param_search",
        "stateful_callbacks",
        "log_history",
        "best_model_checkpoint",
    }
)
"""Fields of TrainerState that follow from the arguments, or from who runs; and those that `Log` saves."""


class Log:
    """What differs in equal runs: what the Trainer has logged, times included, and where the best model lies."""

    tells_time = True

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """All lines, and a path."""
        state = self._trainer.state
        return {"lines": state.log_history, "best": state.best_model_checkpoint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after these lines."""
        self._trainer.state.log_history = list(state["lines"])
        best = state["best"]
        if best is not None and not Path(best).is_dir():
            log.warning("the best model's checkpoint %s is not there any more", best)
            best = None
        self._trainer.state.best_model_checkpoint = best


class Configuration:
    """The model's configuration, for `unbroken export --to transformers`. What is loaded is left alone."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """The text of `config.json`, if the model has one."""
        config: Any = getattr(self._trainer.model, "config", None)
        text = config.to_json_string() if hasattr(config, "to_json_string") else None
        return {"config.json": text}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The model was made from the configuration of this start."""


class Progress:
    """The Trainer's own state. Registered with the Checkpointer; `apply` and `begin` put back what was loaded."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.epoch = 0
        """The epoch under way; counted from 0."""
        self.updates = 0
        """Optimizer steps done in it."""
        self.grad_norm: Any = None
        """Of the newest step, as the Trainer logs it at the end of an epoch."""
        self.learning_rate: Any = None
        self._loaded: Mapping[str, Any] | None = None
        self._pairs: tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]] = ([], [])
        """Callbacks and what the checkpoint has of them: of Transformers' form, of torch's."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values, and the running sum of losses."""
        if self._loaded is not None:  # the Trainer has not come to where it takes it all over
            return dict(self._loaded)
        trainer = self._trainer
        fields = {field.name for field in dataclasses.fields(trainer.state)} - _OF_THIS_START
        return {
            "epoch": self.epoch,
            "updates": self.updates,
            "stopped": self.stopped,
            "epoch_stopped": bool(trainer.control.should_epoch_stop),
            "grad_norm": _number(self.grad_norm),
            "learning_rate": _number(self.learning_rate),
            "state": {name: getattr(trainer.state, name) for name in sorted(fields)},
            "sums": {name: getattr(trainer, name) for name in SUMS},
            "loss": getattr(trainer, LOSS).detach().clone(),
            "callbacks": [(type(one).__name__, one.state()["attributes"]) for one in _exportable(trainer)],
            "objects": [(type(one).__name__, one.state_dict()) for one in _stateful(trainer)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a state. The Trainer gets it in two parts, as it sets up its own."""
        self._loaded = state

    def apply(self) -> tuple[bool, bool]:
        """Put back what the Trainer has before training begins: counters, metrics, callbacks.

        Gives whether something other than the number of steps had ended the training, and whether the epoch.
        """
        assert self._loaded is not None
        loaded, trainer = self._loaded, self._trainer
        self.epoch, self.updates = loaded["epoch"], loaded["updates"]
        self.grad_norm, self.learning_rate = loaded["grad_norm"], loaded["learning_rate"]
        for name, value in loaded["state"].items():
            setattr(trainer.state, name, value)
        self._pairs = (
            _paired(_exportable(trainer), loaded["callbacks"]),
            _paired(_stateful(trainer), loaded["objects"]),
        )
        self._load_callbacks()
        return loaded["stopped"], loaded["epoch_stopped"]

    def begin(self) -> None:
        """Put back what the Trainer sets to nothing as training begins: the sums that its log lines are made of."""
        if self._loaded is None:
            return
        for name, value in self._loaded["sums"].items():
            setattr(self._trainer, name, value)
        setattr(self._trainer, LOSS, torch.as_tensor(self._loaded["loss"], device=self._trainer.args.device))
        self._loaded = None

    def go_on(self) -> None:
        """Put callbacks back again, whatever they did as training began: the run before began once."""
        self._load_callbacks()
        self._pairs = ([], [])

    def _load_callbacks(self) -> None:
        exportable, stateful = self._pairs
        for one, attributes in exportable:
            for name, value in attributes.items():
                setattr(one, name, value)
        for one, state in stateful:
            one.load_state_dict(copy.deepcopy(state))

    @property
    def stopped(self) -> bool:
        """Something other than the number of steps ended the training: early stopping, say."""
        state, control = self._trainer.state, self._trainer.control
        return bool(control.should_training_stop) and state.global_step < state.max_steps


def _exportable(trainer: Any) -> list[Any]:
    """Callbacks with a state in Transformers' own form."""
    return [one for one in trainer.callback_handler.callbacks if isinstance(one, ExportableState)]


def _stateful(trainer: Any) -> list[Any]:
    """Callbacks with a state in torch's form."""
    return [
        one
        for one in trainer.callback_handler.callbacks
        if callable(getattr(one, "state_dict", None)) and callable(getattr(one, "load_state_dict", None))
    ]


def _paired(live: list[Any], saved: list[tuple[str, Any]]) -> list[tuple[Any, Any]]:
    """Those of one class, in their order; what has no counterpart is told and left alone."""
    left, pairs = list(saved), []
    for one in live:
        found = next((entry for entry in left if entry[0] == type(one).__name__), None)
        if found is None:
            log.warning("the checkpoint has no state of the callback %s: it begins anew", type(one).__name__)
        else:
            left.remove(found)
            pairs.append((one, found[1]))
    for name, _ in left:
        log.warning("the checkpoint has a state of a callback %s, and there is none", name)
    return pairs


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value
