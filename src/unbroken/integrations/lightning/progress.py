"""What a Lightning Trainer knows of its run besides weights, optimizers and data: loops, callbacks, data module."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.trainer import call

log = logging.getLogger(__name__)

_LOGGED = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
"""What callbacks and schedulers look at between two validations."""


class Progress:
    """The Trainer's own state. Registered with the Checkpointer; `apply` puts back what was loaded."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._loaded: Mapping[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors."""
        if self._loaded is not None:  # the Trainer has not come to where it takes it over
            return dict(self._loaded)
        trainer = self._trainer
        loops = copy.deepcopy(trainer.fit_loop.state_dict())
        loops["state_dict"].pop("combined_loader", None)  # loaders are saved by themselves, and each rank's
        module, data = trainer.lightning_module, trainer.datamodule
        return {
            "loops": loops,
            "should_stop": bool(trainer.should_stop),
            "callbacks": call._call_callbacks_state_dict(trainer),
            "precision": trainer.precision_plugin.state_dict(),
            "data": {} if data is None else data.state_dict(),
            "hooks": self._ask_hooks(module),
            "logged": {name: dict(getattr(trainer._logger_connector, name)) for name in _LOGGED},
            "means": sorted(key for key, one in (trainer.fit_loop._results or {}).items() if one.meta.on_epoch),
            "metrics": {name: (one.metric_state, one._update_count) for name, one in _metrics(module)},
        }

    def _ask_hooks(self, module: Any) -> dict[str, Any]:
        """What modules and callbacks add to a checkpoint by their hooks."""
        checkpoint = _outline(self._trainer)
        known = set(checkpoint)
        call._call_callbacks_on_save_checkpoint(self._trainer, checkpoint)
        module.on_save_checkpoint(checkpoint)
        return {key: value for key, value in checkpoint.items() if key not in known}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a state. The Trainer gets it by `apply`."""
        self._loaded = state

    def apply(self) -> None:
        """Put back what was loaded."""
        assert self._loaded is not None
        loaded, trainer, self._loaded = self._loaded, self._trainer, None
        trainer.fit_loop.load_state_dict(copy.deepcopy(loaded["loops"]))
        trainer.should_stop = loaded["should_stop"]
        checkpoint = {**_outline(trainer), "callbacks": loaded["callbacks"], **loaded["hooks"]}
        call._call_callbacks_on_load_checkpoint(trainer, checkpoint)
        call._call_callbacks_load_state_dict(trainer, checkpoint)
        trainer.lightning_module.on_load_checkpoint(checkpoint)
        trainer.precision_plugin.load_state_dict(loaded["precision"])
        for name in _LOGGED:
            getattr(trainer._logger_connector, name).update(loaded["logged"][name])
        self._put_metrics(loaded["metrics"])
        if loaded["means"] and trainer.is_global_zero:
            log.warning(
                "means over the training epoch under way cover only the batches from here on: Lightning keeps no sums "
                "of %s; use a torchmetrics metric in the module, which is restored",
                ", ".join(key.removeprefix("training_step.") for key in loaded["means"]),
            )
        if trainer.datamodule is not None and loaded["data"]:
            trainer.datamodule.load_state_dict(loaded["data"])

    def _put_metrics(self, saved: Mapping[str, Any]) -> None:
        for name, one in _metrics(self._trainer.lightning_module):
            if name in saved:
                state, one._update_count = saved[name]
                for key, value in state.items():
                    setattr(one, key, value)
                one._computed = None


def _metrics(module: Any) -> list[tuple[str, Any]]:
    """Metrics of torchmetrics in a module: what they have summed up is in no state_dict."""
    return [(name, one) for name, one in module.named_modules() if hasattr(one, "metric_state")]


def _outline(trainer: Any) -> dict[str, Any]:
    """The keys of a Lightning checkpoint that hooks may expect. Weights are not in it."""
    return {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": {},
        "callbacks": {},
        "optimizer_states": [],
        "lr_schedulers": [],
        "loops": {},
    }
