"""Anything else with `state_dict` and `load_state_dict`: schedulers, scalers, averages, loaders, metrics.

What they give goes through the codec, so what cannot be stored is refused by its path; what they took is theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from unbroken.state.captured import Captured, LiveTensor
from unbroken.state.codec import encode
from unbroken.state.draft import Draft, Phase

KIND = "object"


class Stateful(Protocol):
    """What any object may offer to be saved."""

    def state_dict(self) -> Any:
        """Its state as plain values and tensors; may be views of what it goes on using."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take a state; may keep what it is given."""


def is_stateful(value: object) -> TypeGuard[Stateful]:
    """True if the object has both methods. A class is no object of its own."""
    methods = (getattr(value, "state_dict", None), getattr(value, "load_state_dict", None))
    return not isinstance(value, type) and all(callable(method) for method in methods)


def capture_object(captured: Captured, name: str, value: Stateful) -> None:
    """The object's `state_dict()`."""
    tensors: dict[str, Tensor] = {}
    encoded = encode(value.state_dict(), name, tensors, text=f"{name}.state_dict()")
    captured.tensors.update({key: LiveTensor(tensor) for key, tensor in tensors.items()})
    captured.values[name] = {"kind": KIND, "state": encoded}


def prepare_object(draft: Draft, name: str, value: Stateful) -> None:
    """Hand the object its state back through `load_state_dict`."""
    saved = draft.value_of(name, KIND)
    if saved is None:
        return
    if isinstance(value, GradScaler) and value.is_enabled() != (saved["state"] != {}):
        now, then = ("enabled", "disabled") if value.is_enabled() else ("disabled", "enabled")
        draft.differing.append(f"{name}, a GradScaler, is {now}, and was {then}")
        draft.ignore(name)
        return
    draft.then(Phase.OBJECTS, _loading(value, draft.decoder(saved["state"])))


def _loading(value: Stateful, decoded: Callable[[], object]) -> Callable[[], None]:
    def load() -> None:
        value.load_state_dict(decoded())
        if isinstance(value, GradScaler):
            _make_scale_exist(value)

    return load


def _make_scale_exist(scaler: GradScaler) -> None:
    """A new scaler has no scale before its first `scale()`, and `unscale_` fails without one."""
    if scaler.is_enabled() and getattr(scaler, "_scale", None) is None:
        scaler.scale(torch.zeros((), device=getattr(scaler, "_device", "cuda")))
