"""What an engine counts, and the scale of its losses. DeepSpeed's own checkpoints leave `micro_steps` out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_COUNTED = ("global_steps", "global_samples", "skipped_steps", "micro_steps")


class Counters:
    """Those of one engine. Registered with the Checkpointer."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, Any]:
        """Numbers."""
        engine = self._engine
        norm = engine._global_grad_norm
        return {
            "counted": {name: getattr(engine, name) for name in _COUNTED},
            "global_grad_norm": norm.item() if hasattr(norm, "item") else norm,
            "loss_scaler": _numbers_of(getattr(engine.optimizer, "loss_scaler", None)),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting from there."""
        engine = self._engine
        for name, value in state["counted"].items():
            setattr(engine, name, value)
        engine._global_grad_norm = state["global_grad_norm"]
        scaler = getattr(engine.optimizer, "loss_scaler", None)
        for name in _numbers_of(scaler).keys() & state["loss_scaler"].keys():
            setattr(scaler, name, state["loss_scaler"][name])


def _numbers_of(scaler: Any) -> dict[str, Any]:
    """How a loss scaler stands."""
    found = vars(scaler) if scaler is not None else {}
    return {name: value for name, value in found.items() if isinstance(value, bool | int | float)}
