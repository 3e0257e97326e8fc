"""What a capture found in modules and optimizers, kept as long as nothing of it is another object or lies elsewhere.

Finding names, ties and spreads takes Python some 50 us a tensor. Seeing that all still stands takes it none: lists of
what is there are made and compared in C. What has a value of its own at each save is not kept here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from types import NoneType
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from unbroken.state.captured import Json, LiveTensor
from unbroken.state.fsdp1 import is_fsdp1
from unbroken.state.names import ParameterNames, Place, Slot
from unbroken.state.optimizers import OptimizerLook
from unbroken.state.sharding import is_dtensor, shard_and_spec

MOST_REPLACED = 4
"""An optimizer makes its state late, a schedule unfreezes layers; who replaces tensors more often does it always."""


def _shows_changes(state: object) -> bool:
    """True if a parameter's state holds nothing but tensors, and values that are other objects when they change."""
    return type(state) is dict and all(
        isinstance(item, (Tensor, NoneType, bool, int, float)) for item in state.values()
    )


@dataclass(slots=True)
class Look:
    """What stands from one save to the next."""

    slots: dict[str, list[Slot]]
    """Parameters and buffers by registered name."""
    parameters: ParameterNames
    described: dict[str, Json] = field(default_factory=dict)
    """What the values of a module or tensor say, but for extra state."""
    with_extra: dict[str, list[Place]] = field(default_factory=dict)
    """Where each module has extra state."""
    optimizers: dict[str, OptimizerLook] = field(default_factory=dict)
    standing: dict[str, LiveTensor] = field(default_factory=dict)
    """As in `Captured`."""
    fenced: set[str] = field(default_factory=set)
    """As in `Captured`."""
    frozen: frozenset[str] = frozenset()
    """As in `Captured`."""
    _fingerprint: _Fingerprint | None = None

    def remember(self, modules: list[nn.Module], optimizers: list[Optimizer], lone: Iterable[Tensor]) -> None:
        """Note what the look depends on, if that can be told."""
        # FSDP1 moves its parameters about as it likes, and a list in a state may change inside.
        if not any(map(is_fsdp1, modules)) and all(map(_shows_changes, _states_of(optimizers))):
            self._fingerprint = _Fingerprint(modules, optimizers, list(lone))

    def stands(self) -> bool:
        """True if nothing was replaced, moved, added, taken away or renamed since."""
        return self._fingerprint is not None and self._fingerprint.holds()


@dataclass(slots=True)
class Keeper:
    """Keeps the newest look, which holds on to every tensor in it.

    Where tensors are replaced from save to save that would be a second model in memory: then it keeps none.
    """

    _kept: Look | None = None
    _replaced: int = 0
    """How often in a row it did not stand any more."""

    def current(self, look: Callable[[], Look]) -> Look:
        """The kept one if it stands, else a new one."""
        if self._kept is not None and self._kept.stands():
            self._replaced = 0
            return self._kept
        self._kept = None
        found = look()
        self._replaced += 1
        if self._replaced <= MOST_REPLACED:
            self._kept = found
        return found


class _Fingerprint:
    """What is compared, with references to what it was made of: an id means nothing when its object is gone."""

    def __init__(self, modules: list[nn.Module], optimizers: list[Optimizer], lone: list[Tensor]) -> None:
        self._modules, self._optimizers = modules, optimizers
        self._wrappers = [module for module in modules if isinstance(module, DistributedDataParallel)]
        self._structure, self._objects = self._look_at_structure()
        tensors = [*(item for item in self._objects if isinstance(item, Tensor)), *lone]
        self._plain = [tensor for tensor in tensors if not is_dtensor(tensor)]
        self._sharded = [tensor for tensor in tensors if is_dtensor(tensor)]
        self._places, self._shards = self._look_at_places()

    def holds(self) -> bool:
        """True if a look finds the same again."""
        try:
            return self._look_at_structure()[0] == self._structure and self._look_at_places()[0] == self._places
        except (AttributeError, TypeError):  # something is there that has no such attributes
            return False

    def _look_at_structure(self) -> tuple[list[Any], list[object]]:
        """Which objects there are, under which names."""
        trees = list(chain.from_iterable(map(_TABLES, self._modules)))
        states = list(_states_of(self._optimizers))
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        members = [group["params"] for group in groups]
        objects: list[object] = [
            *map(type, self._modules),
            *chain.from_iterable(map(dict.values, trees)),
            *chain.from_iterable(map(attrgetter("state"), self._optimizers)),
            *chain.from_iterable(map(dict.values, states)),
            *chain.from_iterable(members),
            *(item for group in groups for item in group.values() if isinstance(item, Tensor)),
            *map(attrgetter("process_group"), self._wrappers),
        ]
        names = [*chain.from_iterable(trees), *chain.from_iterable(states), *chain.from_iterable(groups)]
        options = [(group.get("capturable"), group.get("fused")) for group in groups]
        lengths = list(map(len, chain(trees, states, members)))
        transient = list(map(frozenset, map(attrgetter("_non_persistent_buffers_set"), self._modules)))
        wrapped = [
            (ddp.broadcast_buffers, frozenset(getattr(ddp, "parameters_to_ignore", ()))) for ddp in self._wrappers
        ]
        return [list(map(id, objects)), names, options, lengths, transient, wrapped], objects

    def _look_at_places(self) -> tuple[list[Any], list[object]]:
        """Where the tensors lie, and how. `tensor.data = other` leaves a tensor the same object."""
        shards = list(map(shard_and_spec, self._sharded))
        plain = [*self._plain, *(shard for shard, _ in shards)]
        places = [
            list(map(Tensor.data_ptr, plain)),
            list(map(Tensor.size, plain)),
            list(map(Tensor.stride, plain)),
            list(map(attrgetter("dtype", "requires_grad"), plain)),
            list(map(Tensor.is_conj, plain)),
            list(map(Tensor.is_neg, plain)),
            [
                (id(shard), id(spec), tensor.requires_grad)
                for tensor, (shard, spec) in zip(self._sharded, shards, strict=True)
            ],
        ]
        return places, [*shards]


_TABLES = attrgetter("_modules", "_parameters", "_buffers")


def _states_of(optimizers: Iterable[Optimizer]) -> Iterator[Any]:
    """What each optimizer keeps for each of its parameters."""
    return chain.from_iterable(optimizer.state.values() for optimizer in optimizers)
