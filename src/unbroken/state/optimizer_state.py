"""What an optimizer keeps for one parameter: moments, counters, histories.

A state tensor is restored into the live one where that is the same kind of tensor, else into a new one laid out like a
fresh state's; its dtype is always the saved one (moments of a bfloat16 parameter may be float32). What is neither a
tensor nor under a string key goes through the codec.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor

from unbroken.errors import UnsupportedValue
from unbroken.layout.spread import Spread, Stretch
from unbroken.state.captured import Captured, Json, LiveTensor, SavedTensor
from unbroken.state.codec import encode
from unbroken.state.draft import Draft, device_of_kind
from unbroken.state.names import fresh_like, reason_not_storable
from unbroken.state.parts import Part
from unbroken.state.placements import empty_beside, placed_beside
from unbroken.state.sharding import beside, is_dtensor, local_of, spread_of

WITH_PARAMETER = "parameter"


class Owner(msgspec.Struct, frozen=True):
    """A parameter with state, as the optimizer has it; or one of several that it has as parts of a flat one."""

    parameter: Tensor
    name: str
    """Full name; at restore the one that the checkpoint knows it by."""
    group: Mapping[str, Any]
    spread: Spread | None
    """How the parameter lies on the ranks."""
    part: Part | None = None
    """Which part of `parameter` it is."""

    @property
    def numel(self) -> int:
        """Elements that this rank holds."""
        return self.parameter.numel() if self.part is None else self.part.end - self.part.begin

    def of(self, item: Tensor) -> Tensor:
        """What this rank holds of a state tensor; of one that is laid out like a flat parameter, the owner's part."""
        local = local_of(item).detach()  # which keeps what lies there if `item.data` becomes something else
        return self.part.of(local) if self.part is not None and item.shape == self.parameter.shape else local


@dataclass(slots=True)
class Shared:
    """Tensors of one optimizer that several parameters or groups refer to, one step counter for all, say.

    Without it a restore would make several of one, and a step that advances the one would leave the others behind.
    """

    names: dict[int, str] = field(default_factory=dict)
    """At capture: the name that a tensor was stored under, by id."""
    made: dict[str, Tensor] = field(default_factory=dict)
    """At restore: the tensor that stands for a stored name."""

    by_several: frozenset[int] = frozenset()
    """At capture: ids of tensors that are shared indeed, not only by the parts of one parameter."""
    _claimed: set[int] = field(default_factory=set)

    def claim(self, name: str, tensor: Tensor) -> None:
        """At restore: let the tensor stand for a stored name."""
        self.made[name] = tensor
        self._claimed.add(id(tensor))

    def is_claimed(self, tensor: Tensor) -> bool:
        """True if the tensor already stands for a stored name."""
        return id(tensor) in self._claimed


def capture_state(captured: Captured, path: str, owner: Owner, state: Mapping[Any, Any], shared: Shared) -> Json:
    """The values of one parameter's state; tensors go into `captured` as `<path>/<key>`."""
    value: dict[str, Any] = {"keys": [], "tensors": {}, "shared": {}}
    rest = {}
    for key, item in state.items():
        if not (isinstance(key, str) and isinstance(item, Tensor) and reason_not_storable(item) is None):
            rest[key] = item
            continue
        _refuse_unsplittable(key, item, owner)
        value["keys"].append(key)
        # Beside a flat parameter there is one counter for all parts; elsewhere each of them has its own.
        if id(item) in shared.names and (owner.part is None or id(item) in shared.by_several):
            value["shared"][key] = shared.names[id(item)]
            continue
        shared.names.setdefault(id(item), f"{path}/{key}")
        value["tensors"][key] = _where(key, item, owner)
        told = placed_beside(item, owner.parameter)
        if told is not None:
            value.setdefault("placements", {})[key] = told
        captured.tensors[f"{path}/{key}"] = LiveTensor(owner.of(item), _spread_of(item, owner))
    tensors: dict[str, Tensor] = {}
    value["rest"] = encode(rest, path, tensors, text=f"the state of {owner.name} in {path.partition('/')[0]}")
    if tensors and owner.part is not None:
        raise UnsupportedValue(f"{', '.join(sorted(tensors))}: {_UNSPLITTABLE}")
    capture_beside(captured, tensors, owner.spread)
    return value


_UNSPLITTABLE = (
    "what an optimizer keeps so beside a flat parameter of several cannot be told apart by parameter: "
    "with FullyShardedDataParallel give use_orig_params=True"
)


def _refuse_unsplittable(key: str, item: Tensor, owner: Owner) -> None:
    if owner.part is not None and item.shape != owner.parameter.shape and item.numel() != 1:
        raise UnsupportedValue(f"{key} of {owner.name}, of shape {list(item.shape)}: {_UNSPLITTABLE}")


def capture_beside(captured: Captured, tensors: Mapping[str, Tensor], spread: Spread | None) -> None:
    """Plain tensors that an optimizer keeps beside parameters that are spread so."""
    for name, tensor in tensors.items():
        captured.tensors[name] = LiveTensor(tensor, beside(spread, tuple(tensor.shape)))


def _spread_of(item: Tensor, owner: Owner) -> Spread | None:
    if isinstance(owner.spread, Stretch) and item.shape == owner.parameter.shape:
        return owner.spread
    return spread_of(item) or beside(owner.spread, tuple(item.shape))


def _where(key: str, item: Tensor, owner: Owner) -> str:
    """Where a state tensor belongs if the parameter lies on another device next time."""
    on_host = item.device.type == "cpu"
    stays_on_host = key == "step" and not (owner.group.get("capturable") or owner.group.get("fused"))
    if item.device == owner.parameter.device and not (on_host and stays_on_host):
        return WITH_PARAMETER
    return item.device.type


class StateRestore:
    """The state of one parameter on its way back."""

    def __init__(
        self, draft: Draft, path: str, owner: Owner, live: Mapping[Any, Any], value: Json, shared: Shared
    ) -> None:
        """Give each saved tensor `<path>/<key>` a place to be read into; `live` itself is not changed."""
        for key, where in value["tensors"].items():
            name = f"{path}/{key}"
            saved = draft.saved(name)
            if saved is not None:
                told = value.get("placements", {}).get(key)
                target = _target(key, saved, where, owner, live.get(key), shared, told)
                draft.fill(name, owner.of(target), _spread_of(target, owner))
                shared.claim(name, target)
        self._value = value
        self._shared = shared
        self._path = path
        self._rest = draft.decoder(value["rest"])

    def state(self) -> dict[Any, Any]:
        """The state, once the targets are filled."""
        own = {
            key: self._shared.made[self._value["shared"].get(key, f"{self._path}/{key}")] for key in self._value["keys"]
        }
        rest: Any = self._rest()
        return {**own, **rest}


def _target(
    key: str, saved: SavedTensor, where: str, owner: Owner, live: object, shared: Shared, told: Json | None
) -> Tensor:
    shape = tuple(saved.shape)
    if isinstance(owner.spread, Stretch) and shape == owner.spread.shape and not saved.own:
        shape = tuple(owner.parameter.shape)
    return target_of(key, saved, shape, where, owner, live, shared, told)


def target_of(
    key: str,
    saved: SavedTensor,
    shape: tuple[int, ...],
    where: str,
    owner: Owner,
    live: object,
    shared: Shared,
    told: Json | None = None,
) -> Tensor:
    """The live state tensor if it is of the saved dtype, of this shape and in its place; else one without values.

    shape  of what this rank has of it; told  how it was placed, if not like the parameter
    """
    parameter = owner.parameter
    device = parameter.device if where == WITH_PARAMETER else device_of_kind(where)
    if (
        isinstance(live, Tensor)
        and reason_not_storable(live) is None
        and not (saved.own and is_dtensor(live))
        and (live.dtype, tuple(live.shape), live.device.type) == (saved.dtype, shape, device.type)
        and not shared.is_claimed(live)
    ):
        return live
    placed = None if saved.own else empty_beside(told, parameter, shape, saved.dtype)
    if placed is not None:
        return placed
    # What was a rank's own was plain; a counter is, also beside a parameter that is a scalar itself.
    if is_dtensor(parameter) and (saved.own or (not shape and key == "step")):
        return torch.empty(shape, dtype=saved.dtype, device=device)
    return fresh_like(parameter, saved.dtype, shape, torch.device(device))
