"""Modules: parameters, buffers of every sort, ties between them, extra state, and what is frozen.

Tensors are restored into the storage they live in, so that alignment, strides and every reference to them stay.
Tied tensors are stored once. `State` knows them across all registered modules, since two may share weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from unbroken.elements import as_bytes
from unbroken.state.captured import Captured, Json, LiveTensor
from unbroken.state.codec import encode
from unbroken.state.draft import Draft, Phase, count_and_name
from unbroken.state.fsdp1 import drop_gathered, is_fsdp1, is_gathered
from unbroken.state.names import Place, Slot, Ties, join, walk

KIND = "module"


def capture_extra(captured: Captured, name: str, places: Sequence[Place]) -> dict[str, Json]:
    """The extra state of a module's parts, which only they can tell; new at each save."""
    tensors: dict[str, Tensor] = {}
    extra = {
        place.fqn: encode(
            place.module.get_extra_state(),
            f"{name}/{join(place.fqn, '_extra_state')}",
            tensors,
            text=_text(name, place.fqn),
        )
        for place in places
    }
    captured.tensors.update({key: LiveTensor(tensor) for key, tensor in tensors.items()})
    return extra


def places_with_extra(places: Sequence[Place]) -> list[Place]:
    """The parts of a module that have extra state."""
    return [place for place in places if _has_extra_state(place.module)]


def describe_module(slots: Sequence[Slot]) -> Json:
    """What a module's values say of its tensors, but for names that are tied."""
    return {
        "kind": KIND,
        "parameters": [slot.fqn for slot in slots if slot.is_parameter],
        "frozen": [slot.fqn for slot in slots if slot.is_parameter and not slot.tensor.requires_grad],
        "buffers": [slot.fqn for slot in slots if not slot.is_parameter and slot.persistent],
        "transient_buffers": [slot.fqn for slot in slots if not slot.persistent],
        "broadcast": [slot.fqn for slot in slots if slot.broadcast],
    }


def tensors_of(ties: Ties) -> Iterator[tuple[str, LiveTensor]]:
    """The tensors of all modules, each once, by its first name."""
    for slots in ties.groups.values():
        spread = next((slot.spread for slot in slots if slot.spread is not None), None)
        yield slots[0].name, LiveTensor(slots[0].local.detach(), spread)


def frozen_in(ties: Ties) -> frozenset[str]:
    """First names of parameters that do not want a gradient."""
    groups = ties.groups.values()
    return frozenset(
        slots[0].name
        for slots in groups
        if not any(slot.tensor.requires_grad or not slot.is_parameter for slot in slots)
    )


def aliases_in(ties: Ties) -> dict[str, dict[str, str]]:
    """By registered name: under which other names the tensors are known."""
    aliases: dict[str, dict[str, str]] = {}
    for slots in ties.groups.values():
        for slot in slots[1:]:
            aliases.setdefault(slot.root, {})[slot.fqn] = slots[0].name
    return aliases


def prepare_module(draft: Draft, name: str, module: nn.Module, slots: list[Slot]) -> None:
    """Check the module's values and get its extra state ready."""
    value = draft.value_of(name, KIND)
    if value is None:
        return
    live_names = {slot.fqn for slot in slots}
    aliases = value.get("aliases", {})
    gone = [fqn for fqn in value["transient_buffers"] if fqn not in live_names]
    if gone and not value.get("merged"):  # else other ranks may have them
        draft.warnings.append(f"{name}: buffers that are not persistent are there no more: {count_and_name(gone)}")
        draft.skip(f"{name}/{fqn}" for fqn in gone)
    draft.unexpected += [f"{name}/{fqn}" for fqn in sorted(set(aliases) - live_names - set(gone))]
    _compare_frozen(draft, name, slots, set(value["parameters"]), set(value["frozen"]))
    _prepare_extra_state(draft, name, module, value["extra"])
    for place in walk(module):
        if is_fsdp1(place.module):
            if is_gathered(place.module):
                draft.differing.append(f"{name} is gathered for a backward that has not come: restore before a forward")
            draft.then(Phase.MODULES, partial(drop_gathered, place.module))


def _compare_frozen(draft: Draft, name: str, slots: list[Slot], parameters: set[str], frozen: set[str]) -> None:
    known = [slot for slot in slots if slot.is_parameter and slot.fqn in parameters]
    newly = [slot.fqn for slot in known if not slot.tensor.requires_grad and slot.fqn not in frozen]
    no_more = [slot.fqn for slot in known if slot.tensor.requires_grad and slot.fqn in frozen]
    if newly:
        draft.warnings.append(f"{name}: parameters that were trained are frozen now: {count_and_name(newly)}")
    if no_more:
        draft.warnings.append(f"{name}: parameters that were frozen are trained now: {count_and_name(no_more)}")


def _prepare_extra_state(draft: Draft, name: str, module: nn.Module, extra: dict[str, Json]) -> None:
    live = {place.fqn: place.module for place in walk(module) if _has_extra_state(place.module)}
    draft.missing += [f"{_text(name, fqn)}" for fqn in live if fqn not in extra]
    draft.unexpected += [f"{_text(name, fqn)}" for fqn in extra if fqn not in live]
    for fqn, encoded in extra.items():
        if fqn in live:
            decoded = draft.decoder(encoded)
            draft.then(Phase.MODULES, _calling(live[fqn].set_extra_state, decoded))


def _calling(function: Callable[[object], object], argument: Callable[[], object]) -> Callable[[], None]:
    def call() -> None:
        function(argument())

    return call


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _text(name: str, fqn: str) -> str:
    return f"{name}{'.' if fqn else ''}{fqn}.get_extra_state()"


def prepare_slots(draft: Draft, ties: Ties) -> None:
    """Where the tensors of all modules go.

    A tensor that was saved under several names fills each live tensor of these names. Names that are one tensor now
    and were several then cannot all be restored, and are refused.
    """
    sources = _Sources(draft)
    first_target: dict[str, Tensor] = {}
    for slots in ties.groups.values():
        found = {source: slot for slot in slots if (source := sources.of(slot)) is not None}
        if not found:
            _note_missing(draft, sources, slots[0])
            continue
        if len(found) > 1:
            names = " and ".join(slot.name for slot in found.values())
            draft.differing.append(f"{names} are one tensor, and were stored as separate ones")
        source = next(iter(found))
        local, spread = slots[0].local, slots[0].spread
        if not draft.fits(source, local, spread):
            continue
        if source in first_target:
            draft.then(Phase.MODULES, _copying(first_target[source], local))
        else:
            first_target[source] = _target_of(draft, local)
            draft.fill(source, first_target[source], spread)
            if not any(slot.persistent for slot in slots):
                draft.transient.add(source)


def prepare_guard(draft: Draft, ties: Ties) -> None:
    """Warn, at the end of the restore, if an object's `load_state_dict` wrote into tensors that were already filled."""
    slots = [slots[0] for slots in ties.groups.values()]
    versions: list[int] = []

    def note() -> None:
        versions.extend(slot.local._version for slot in slots)

    def compare() -> None:
        written = [slot.name for slot, version in zip(slots, versions, strict=True) if slot.local._version != version]
        if written:
            draft.warnings.append(f"loading another object's state wrote over tensors: {count_and_name(written)}")

    draft.then(Phase.BEFORE_LOADING, note)
    draft.then(Phase.AFTER_LOADING, compare)


class _Sources:
    """Under which name the checkpoint has what a live slot needs."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft

    def knows(self, root: str) -> bool:
        """False if something was said already about the registered name as a whole."""
        value = self._draft.values.get(root)
        return value is not None and value.get("kind") in (KIND, "tensor")

    def of(self, slot: Slot) -> str | None:
        if not self.knows(slot.root):
            return None
        alias = self._draft.values[slot.root].get("aliases", {}).get(slot.fqn)
        source = slot.name if alias is None else str(alias)
        return source if source in self._draft.tensors else None


def _note_missing(draft: Draft, sources: _Sources, slot: Slot) -> None:
    if not sources.knows(slot.root):
        return
    if slot.persistent:
        draft.missing.append(slot.name)
    else:
        draft.warnings.append(
            f"{slot.name}, a buffer that is not persistent, is not in the checkpoint and stays as it is"
        )


def _target_of(draft: Draft, live: Tensor) -> Tensor:
    """The live tensor itself, or, if its elements share memory (an expanded buffer), one that is copied into it."""
    if live.is_contiguous() or not any(
        stride == 0 and size > 1 for stride, size in zip(live.stride(), live.shape, strict=True)
    ):
        return live.detach()
    target = torch.empty(live.shape, dtype=live.dtype, device=live.device)
    draft.then(Phase.MODULES, _copying(target, live))
    return target


def _copying(source: Tensor, target: Tensor) -> Callable[[], None]:
    @torch.no_grad()
    def copy() -> None:
        within = [slice(0, 1) if stride == 0 else slice(None) for stride in target.stride()]
        target.detach()[tuple(within)].copy_(source[tuple(within)])
        if not _same_bytes(target, source):
            # Elements that share memory now had values of their own then: only new memory can hold them.
            target.data = source.clone()

    return copy


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    return torch.equal(as_bytes(one), as_bytes(other.to(one.device)))
