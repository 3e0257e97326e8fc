"""A save and a restore in memory, without files: what `state` captures, as a checkpoint would hold it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from unbroken.state.captured import Restoration, SavedTensor
from unbroken.state.draft import only_saved
from unbroken.state.registry import State


@dataclass
class Kept:
    """What a checkpoint holds of one rank."""

    tensors: dict[str, torch.Tensor]
    values: dict[str, Any]

    def described(self) -> dict[str, SavedTensor]:
        return {name: SavedTensor(tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()}


def keep(objects: Mapping[str, object], *, accumulating: bool = False) -> Kept:
    """Capture and copy, values through JSON bytes."""
    return keep_state(State(objects), accumulating=accumulating)


def keep_state(state: State, *, accumulating: bool = False) -> Kept:
    captured = state.capture(accumulating=accumulating)
    values = {name: msgspec.json.decode(msgspec.json.encode(value)) for name, value in captured.values.items()}
    return Kept({name: live.tensor.clone().contiguous() for name, live in captured.tensors.items()}, values)


def put(kept: Kept, objects: Mapping[str, object], *, strict: bool = True) -> Restoration:
    """Restore into live objects."""
    return put_state(kept, State(objects), strict=strict)


def put_state(kept: Kept, state: State, *, strict: bool = True) -> Restoration:
    restoration = state.prepare(kept.described(), kept.values, strict=strict)
    with torch.no_grad():
        only_saved(restoration, restoration.unexpected, strict=strict)
        for name, target in restoration.targets.items():
            assert target.dtype == kept.tensors[name].dtype and target.shape == kept.tensors[name].shape, name
            target.copy_(kept.tensors[name])
    restoration.finish()
    return restoration


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal in dtype, shape and every bit."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return raw(one) == raw(other)


def raw(tensor: torch.Tensor) -> bytes:
    """The elements' bytes in row-major order."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def weights(module: torch.nn.Module) -> dict[str, bytes]:
    """The bytes of every parameter and buffer."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name: raw(tensor) for name, tensor in named}
