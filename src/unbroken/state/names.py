"""Names of a model's tensors that do not depend on how it is wrapped.

A component that a wrapper added (`module.`, `_orig_mod.`, `_checkpoint_wrapped_module.`) is left out because the module
that holds it *is* that wrapper, never because of its text: a user's own submodule may be called `module`.
Eager or compiled, plain or under DistributedDataParallel, a parameter has one name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.nn.parallel import DistributedDataParallel

from unbroken.errors import UnsupportedValue, UsageError
from unbroken.layout.spread import Spread, replicated
from unbroken.state.arrays import reason_not_plain
from unbroken.state.fsdp1 import WRAPPED, Sharded, is_flat, is_fsdp1
from unbroken.state.parts import Elsewhere, Part, Placed
from unbroken.state.sharding import is_dtensor, local_of, reason_not_spread, spread_of

_WRAPPERS: tuple[tuple[type[nn.Module], str], ...] = (
    (DistributedDataParallel, "module"),
    (nn.DataParallel, "module"),
    (ActivationWrapper, "_checkpoint_wrapped_module"),
    (Elsewhere, "module"),
)


class Place(msgspec.Struct, frozen=True):
    """One module of a tree."""

    fqn: str
    """Without wrappers; "" for the root."""
    module: nn.Module
    ddp: DistributedDataParallel | None
    """The nearest DistributedDataParallel at or above it."""


class Slot(msgspec.Struct, frozen=True):
    """A parameter or buffer under one of its names."""

    root: str
    """Registered name of the tree, or of a tensor that is registered by itself."""
    fqn: str
    """Within the tree, without wrappers; "" for a tensor that is registered by itself."""
    tensor: Tensor
    """With `part`, the flat one that it is a part of."""
    is_parameter: bool
    """True for whatever may have a gradient."""
    persistent: bool
    """False for buffers that `state_dict()` leaves out."""
    spread: Spread | None
    """How it lies on the ranks by construction; None if it is this rank's own."""
    broadcast: bool = False
    """True for a buffer that DDP takes from rank 0 before each forward, whatever other ranks have."""
    part: Part | None = None
    """Where it lies in `tensor`, if that is a flat one of several parameters."""

    @property
    def local(self) -> Tensor:
        """What this rank holds of it."""
        return local_of(self.tensor) if self.part is None else self.part.of(self.tensor)

    @property
    def name(self) -> str:
        """The full name, `model/h.0.weight`."""
        return f"{self.root}/{self.fqn}" if self.fqn else self.root


def walk(root: nn.Module) -> Iterator[Place]:
    """Every module of a tree in the order of registration; one that is registered twice comes under both names."""
    yield from _walk(Place("", root, None), frozenset())


def _walk(place: Place, above: frozenset[int]) -> Iterator[Place]:
    module = place.module
    if id(module) in above:  # a child that holds its parent: named_modules() ends there, too
        return
    ddp = module if isinstance(module, DistributedDataParallel) else place.ddp
    yield Place(place.fqn, module, ddp)
    wrapped = _wrapped(module) if module._modules else None
    for child_name, child in module._modules.items():
        if child is not None:
            fqn = place.fqn if child_name == wrapped else join(place.fqn, child_name)
            yield from _walk(Place(fqn, child, ddp), above | {id(module)})


def _wrapped(module: nn.Module) -> str | None:
    """Under which name a wrapper has the module that it wraps; None for any other module."""
    # torch.compile lives in a part of torch that is slow to import, and is there if a module was compiled.
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    if compiler is not None and isinstance(module, compiler.OptimizedModule):
        return "_orig_mod"
    if is_fsdp1(module):
        return WRAPPED
    return next((attribute for wrapper, attribute in _WRAPPERS if isinstance(module, wrapper)), None)


def join(*parts: str) -> str:
    """A dotted name of the parts that are not empty."""
    return ".".join(part for part in parts if part)


def slots_of(name: str, root: nn.Module) -> list[Slot]:
    """Every parameter and buffer of a tree, tied ones under each of their names.

    Raises UsageError for a lazy module that has not seen a batch yet, UnsupportedValue for a tensor that is not plain.
    """
    slots: list[Slot] = []
    ignored: dict[int, frozenset[int]] = {}
    sharded = Sharded()
    elsewhere: Mapping[int, Mapping[str, Placed]] = root.places() if isinstance(root, Elsewhere) else {}
    for place in walk(root):
        if is_fsdp1(place.module):
            sharded.add(place.module, f"{name}/{place.fqn}" if place.fqn else name)
        placed = elsewhere.get(id(place.module)) or sharded.flattened.get(id(place.module), {})
        for own_name, found in placed.items():
            fqn = join(place.fqn, own_name)
            slots.append(Slot(name, fqn, found.tensor, True, True, found.spread, part=found.part))
        if place.ddp is not None and id(place.ddp) not in ignored:
            ignored[id(place.ddp)] = _ignored_by(place.ddp)
        for own_name, parameter in place.module._parameters.items():
            if parameter is not None and own_name not in placed and not sharded.has_parts(parameter):
                spread = spread_of(parameter) or sharded.spreads.get(id(parameter))
                if spread is None and place.ddp is not None and id(parameter) not in ignored[id(place.ddp)]:
                    spread = replicated_by(place.ddp, parameter)
                slots.append(Slot(name, join(place.fqn, own_name), parameter, True, True, spread))
        for own_name, buffer in place.module._buffers.items():
            if buffer is not None:
                persistent = own_name not in place.module._non_persistent_buffers_set
                broadcast = place.ddp is not None and bool(place.ddp.broadcast_buffers)
                fqn = join(place.fqn, own_name)
                slots.append(Slot(name, fqn, buffer, False, persistent, spread_of(buffer), broadcast))
    for slot in slots:
        check_plain(slot)
    return slots


def check_plain(slot: Slot) -> None:
    """Raise for a tensor without values of its own."""
    if nn.parameter.is_lazy(slot.tensor):
        raise UsageError(f"{slot.name} has no shape yet: run one batch through the model before it is registered")
    if slot.part is None and is_flat(slot.tensor):
        raise UsageError(
            f"{slot.name} is the flat parameter of a FullyShardedDataParallel: register that module, which knows names"
        )
    problem = reason_not_storable(slot.tensor)
    if problem is not None:
        hint = "" if is_dtensor(slot.tensor) else ": register plain dense tensors"
        raise UnsupportedValue(f"{slot.name} is {problem}, which cannot be stored{hint}")


def replicated_by(ddp: DistributedDataParallel, parameter: Tensor) -> Spread | None:
    """Each rank of DDP's process group holds the parameter whole; None if there is only one.

    Raises UsageError if the group was destroyed.
    """
    try:
        ranks = dist.get_process_group_ranks(ddp.process_group)
    except (KeyError, ValueError) as error:
        raise UsageError(
            "the process group of a DistributedDataParallel is gone: make the model anew after destroy_process_group()"
        ) from error
    return replicated(tuple(parameter.shape), tuple(ranks)) if len(ranks) > 1 else None


def _ignored_by(ddp: DistributedDataParallel) -> frozenset[int]:
    """Parameters that DDP neither broadcasts nor reduces, so that ranks may differ."""
    names: set[str] = getattr(ddp, "parameters_to_ignore", set())
    if not names:
        return frozenset()
    return frozenset(id(p) for name, p in ddp.module.named_parameters(remove_duplicate=False) if name in names)


def reason_not_storable(tensor: Tensor) -> str | None:
    """Why a tensor of a module or an optimizer cannot be stored (`a sparse tensor`), or None if it can."""
    if is_dtensor(tensor):
        return reason_not_spread(tensor) or reason_not_plain(local_of(tensor))
    return reason_not_plain(tensor)


StorageKey = tuple[object, ...]


def storage_key(tensor: Tensor) -> StorageKey:
    """Equal for tensors that are one block of memory seen in one way; an empty tensor is only itself."""
    owner, tensor = tensor, local_of(tensor)
    if tensor.numel() == 0:
        return (id(owner),)
    pointer = tensor.untyped_storage().data_ptr()
    place = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
    return (tensor.device, pointer, *place)


def _key_of(slot: Slot) -> StorageKey:
    if slot.part is None:
        return storage_key(slot.tensor)
    # Views are made anew each time, and are no keys; two parts never are one memory.
    return (id(slot.tensor), slot.part)


class Ties:
    """Which names stand for one tensor. The first name is the one that it is stored under."""

    def __init__(self, slots: list[Slot]) -> None:
        self.groups: dict[StorageKey, list[Slot]] = {}
        for slot in slots:
            self.groups.setdefault(_key_of(slot), []).append(slot)

    def first_names(self) -> dict[str, str]:
        """Each name that is not a first name -> the first name of its tensor."""
        return {slot.name: slots[0].name for slots in self.groups.values() for slot in slots[1:]}


class ParameterNames:
    """Finds the name of a parameter that an optimizer holds, or of its parts."""

    def __init__(self, slots: list[Slot]) -> None:
        self._slots: dict[int, dict[Part | None, list[Slot]]] = {}
        for slot in slots:
            self._slots.setdefault(id(slot.tensor), {}).setdefault(slot.part, []).append(slot)

    def slots_of(self, parameter: Tensor) -> list[Slot]:
        """The parameter's first slot, or that of each of its parts; empty if nothing that is registered holds it."""
        return [slots[0] for slots in self._slots.get(id(parameter), {}).values()]

    def names_of(self, parameter: Tensor, part: Part | None = None) -> list[str]:
        """All its full names; the checkpoint may know it by another than the first."""
        return [slot.name for slot in self._all(parameter, part)]

    def spread_of(self, parameter: Tensor, part: Part | None = None) -> Spread | None:
        """How it lies on the ranks: DDP may know it under only one of its names."""
        return next((slot.spread for slot in self._all(parameter, part) if slot.spread is not None), None)

    def _all(self, parameter: Tensor, part: Part | None) -> list[Slot]:
        return self._slots.get(id(parameter), {}).get(part, [])

    def are_sharded(self) -> bool:
        """True if any of them is a part of a tensor that other ranks have the rest of."""
        return any(
            is_dtensor(slot.tensor) or slot.spread is not None
            for parts in self._slots.values()
            for slots in parts.values()
            for slot in slots
        )

    def parameters(self) -> Iterator[list[Slot]]:
        """Each parameter once, under its first name; one of several parts as all of those."""
        for parts in self._slots.values():
            slots = [slots[0] for slots in parts.values()]
            if slots[0].is_parameter:
                yield slots


@torch.no_grad()
def fresh_like(parameter: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """An uninitialised tensor with the strides that a new state of this parameter would have."""
    if tuple(parameter.shape) == shape:
        return torch.empty_like(parameter, dtype=dtype, device=device, memory_format=torch.preserve_format)
    return torch.empty(shape, dtype=dtype, device=device)
