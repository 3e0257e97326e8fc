"""What a Lightning Trainer knows of its run besides weights, optimizers and data: loops, callbacks, data module."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.trainer import call


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
        if trainer.datamodule is not None and loaded["data"]:
            trainer.datamodule.load_state_dict(loaded["data"])


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
