"""Optimizers, matched by the names of parameters, never by position.

`torch.optim.Optimizer.load_state_dict` matches by position, casts moments to the parameter's dtype and gives every
state new storage; none of that may happen here. So state and options are read from and written to the optimizer
directly. Its `step` is never called. An optimizer with a `state_dict` of its own is left to `foreign_optimizers`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from torch import Tensor
from torch.optim import Optimizer

from unbroken.errors import UsageError
from unbroken.layout.spread import Spread, Stretch, replicated
from unbroken.state.captured import Captured, Json
from unbroken.state.codec import TAG, encode
from unbroken.state.draft import Draft, Phase, count_and_name
from unbroken.state.joined_state import JoinedRestore, join_parts
from unbroken.state.names import ParameterNames
from unbroken.state.optimizer_state import Owner, Shared, StateRestore, capture_beside, capture_state

KIND = "optimizer"
_NOT_OPTIONS = ("params", "param_names")
"""`param_names` is the user's own list, in the order of `params`."""


@dataclass(slots=True)
class OptimizerLook:
    """What stands of an optimizer from one save to the next: all but its options."""

    owners: list[list[Owner]]
    """The parameters of each group."""
    by_several: frozenset[int]
    """See `Shared`."""
    state: dict[str, Json]
    """Values of each parameter's state."""


def look_at_optimizer(captured: Captured, name: str, optimizer: Optimizer, parameters: ParameterNames) -> OptimizerLook:
    """State by parameter; its tensors go into `captured`.

    Raises UsageError for a parameter that nothing registered holds, UnsupportedValue for state that cannot be stored.
    """
    owners = owners_in(name, optimizer, parameters)
    _refuse_strange_keys(name, optimizer, owners)
    shared = Shared(by_several=_shared_by_several(optimizer, owners))
    _capture_groups(Captured(), name, optimizer, owners, shared)  # a state may refer to a tensor among the options
    state = {
        owner.name: capture_state(
            captured, f"{name}/state/{owner.name}", owner, optimizer.state[owner.parameter], shared
        )
        for members in owners
        for owner in members
        # Some make their state at once (Adagrad): beside nothing, it counts nothing, and is of no rank's part.
        if owner.parameter in optimizer.state and holds_any(owner)
    }
    if getattr(type(optimizer).step, "hooked", False):  # torch calls hooks before it, whatever the subclass
        captured.fenced.update(_fenced(name, owners, state))
    return OptimizerLook(owners, shared.by_several, state)


def capture_optimizer(captured: Captured, name: str, optimizer: Optimizer, look: OptimizerLook) -> None:
    """Options by group, and the state that was looked at.

    Raises UnsupportedValue for an option that cannot be stored.
    """
    groups = _capture_groups(captured, name, optimizer, look.owners, Shared(by_several=look.by_several))
    cls = type(optimizer).__qualname__
    captured.values[name] = {"kind": KIND, "class": cls, "groups": groups, "state": look.state}


def _capture_groups(
    captured: Captured, name: str, optimizer: Optimizer, owners: Sequence[Sequence[Owner]], shared: Shared
) -> list[Json]:
    return [_capture_group(captured, name, index, optimizer, owners, shared) for index in range(len(owners))]


def _fenced(name: str, owners: Sequence[Sequence[Owner]], state: Json) -> Iterator[str]:
    """Tensors that only this optimizer's step changes. FSDP1 moves its parameters about in forward."""
    for owner in (owner for members in owners for owner in members):
        if owner.parameter.requires_grad and not isinstance(owner.spread, Stretch):
            yield owner.name
            yield from (f"{name}/state/{owner.name}/{key}" for key in state.get(owner.name, {}).get("tensors", ()))


def owners_in(name: str, optimizer: Optimizer, parameters: ParameterNames) -> list[list[Owner]]:
    """The parameters of each group. Raises UsageError for one that nothing registered holds."""
    owners: list[list[Owner]] = []
    for index, group in enumerate(optimizer.param_groups):
        members: list[Owner] = []
        for position, parameter in enumerate(group["params"]):
            slots = parameters.slots_of(parameter)
            if not slots:
                hint = "register its module, or the parameter itself under a name of its own"
                if parameters.are_sharded():
                    hint = f"make the optimizer after the model was sharded; {hint}"
                raise UsageError(
                    f"{name}: parameter {position} of group {index}, of shape {list(parameter.shape)}, belongs to "
                    f"nothing that is registered; {hint}"
                )
            members += [
                Owner(parameter, slot.name, group, parameters.spread_of(parameter, slot.part), slot.part)
                for slot in slots
            ]
        owners.append(members)
    return owners


def _shared_by_several(optimizer: Optimizer, owners: Sequence[Sequence[Owner]]) -> frozenset[int]:
    """Ids of tensors in the states of several parameters, or in a state and an option; needed for parts only."""
    if all(owner.part is None for members in owners for owner in members):
        return frozenset()
    holders = [*optimizer.state.values(), *optimizer.param_groups]
    counts = Counter(id(item) for held in holders for item in held.values() if isinstance(item, Tensor))
    return frozenset(key for key, count in counts.items() if count > 1)


def _refuse_strange_keys(name: str, optimizer: Optimizer, owners: Sequence[Sequence[Owner]]) -> None:
    held = {id(owner.parameter) for members in owners for owner in members}
    for key in optimizer.state:
        if id(key) not in held:
            what = f"a tensor of shape {list(key.shape)}" if isinstance(key, Tensor) else repr(key)
            raise UsageError(f"{name} keeps state for {what}, which is in none of its groups; keep it per parameter")


def _capture_group(
    captured: Captured, name: str, index: int, optimizer: Optimizer, owners: Sequence[Sequence[Owner]], shared: Shared
) -> Json:
    """The options of one group. A tensor among them (a learning rate) is named after the group's first parameter."""
    members = [owner.name for owner in owners[index]]
    spread = _spread_of_options(owners[index])
    value: dict[str, Any] = {"params": members, "options": {}, "shared": {}}
    for key, item in optimizer.param_groups[index].items():
        if key in _NOT_OPTIONS:
            continue
        if id(item) in shared.names:
            value["shared"][key] = shared.names[id(item)]
            continue
        tensors: dict[str, Tensor] = {}
        path = f"{name}/group/{min(members, default=f'empty-{index}')}/{key}"
        value["options"][key] = encode(item, path, tensors, text=f"{name}.param_groups[{index}][{key!r}]")
        if isinstance(item, Tensor):
            shared.names[id(item)] = path
        capture_beside(captured, tensors, spread)
    return value


def _spread_of_options(owners: Sequence[Owner]) -> Spread | None:
    """How an option that is a tensor lies on the ranks: like its parameters, if all of those lie on the same ranks."""
    spreads = [owner.spread for owner in owners]
    first = spreads[0] if spreads else None
    if first is None or any(spread is None or spread.mesh != first.mesh for spread in spreads):
        return None
    # Ranks that hold nothing of the first parameter have its options too.
    return replicated((), first.mesh.ranks) if isinstance(first, Stretch) else first


def prepare_optimizer(draft: Draft, name: str, optimizer: Optimizer, parameters: ParameterNames) -> None:
    """Find for every group and parameter what the checkpoint has under its name, wherever it stood there."""
    value = draft.value_of(name, KIND)
    if value is None or _is_another_class(draft, name, optimizer, value.get("class")):
        return
    matched = match_groups(draft, name, optimizer, parameters, [group["params"] for group in value["groups"]])
    shared = Shared()
    for group in matched:
        if group.saved_index is not None:
            _prepare_group(draft, name, group, value["groups"][group.saved_index], shared)
    restores = [
        (owners[0].parameter, _restore_of(draft, name, owners, optimizer, value["state"], shared))
        for group in matched
        for owners in _by_parameter(group.owners)
    ]

    def put_state() -> None:
        for parameter, restore in restores:
            if restore is None:
                # What never had a gradient must find no state either: a counter of 0 is not the same as none.
                optimizer.state.pop(parameter, None)
            else:
                state = optimizer.state[parameter]
                state.clear()
                state.update(restore.state())

    draft.then(Phase.OPTIMIZERS, put_state)


def _by_parameter(owners: Sequence[Owner]) -> list[list[Owner]]:
    """The parts of each parameter together."""
    found: dict[int, list[Owner]] = {}
    for owner in owners:
        found.setdefault(id(owner.parameter), []).append(owner)
    return list(found.values())


def _restore_of(
    draft: Draft, name: str, owners: list[Owner], optimizer: Optimizer, saved: Json, shared: Shared
) -> StateRestore | JoinedRestore | None:
    """What one parameter gets back; None if this rank had, or holds, nothing of it.

    owners  its parts, or itself
    """
    live = optimizer.state.get(owners[0].parameter, {})
    if owners[0].part is not None:
        return join_parts(draft, f"{name}/state", [owner for owner in owners if holds_any(owner)], live, saved, shared)
    (owner,) = owners
    state = saved.get(owner.name) if holds_any(owner) else None
    return None if state is None else StateRestore(draft, f"{name}/state/{owner.name}", owner, live, state, shared)


def _is_another_class(draft: Draft, name: str, optimizer: Optimizer, saved: str | None) -> bool:
    """True (and noted) if another class of optimizer was saved: its state means nothing to this one."""
    live = type(optimizer).__qualname__
    if saved in (live, None):
        return False
    draft.missing.append(f"{name} as {live} (it was {saved})")
    draft.ignore(name)
    return True


def holds_any(owner: Owner) -> bool:
    """False for a parameter whose flat stretch lies on other ranks: FSDP1 gives it no gradient here, and no state."""
    return not isinstance(owner.spread, Stretch) or owner.numel > 0 or math.prod(owner.spread.shape) == 0


@dataclass(frozen=True, slots=True)
class MatchedGroup:
    """A live group and its counterpart in the checkpoint."""

    live: dict[str, Any]
    owners: list[Owner]
    """Its parameters that the checkpoint knows, by the checkpoint's names."""
    saved_index: int | None
    """None if the checkpoint has no group of exactly these parameters (noted)."""


def match_groups(
    draft: Draft, name: str, optimizer: Optimizer, parameters: ParameterNames, saved: Sequence[Sequence[str]]
) -> list[MatchedGroup]:
    """Pair live with saved groups by the set of their parameters; notes what has no counterpart.

    saved  the names in each saved group
    """
    known = {parameter for members in saved for parameter in members}
    live = [[_as_saved(owner, parameters, known) for owner in m] for m in owners_in(name, optimizer, parameters)]
    here = {owner.name for members in live for owner in members}
    # Of a saved group, other ranks may have the rest: pipeline stages train different layers.
    free = {at: frozenset(group) & here for at, group in enumerate(saved) if here & set(group) or not group}
    matched: list[MatchedGroup] = []
    found: set[str] = set()
    for index, renamed in enumerate(live):
        draft.missing += [f"{name}'s parameter {owner.name}" for owner in renamed if owner.name not in known]
        owners = [owner for owner in renamed if owner.name in known]
        draft.differing += _partly_known(name, renamed, known)
        wanted = frozenset(owner.name for owner in renamed)
        saved_index = next((at for at, group in free.items() if group == wanted), None)
        if saved_index is not None:
            del free[saved_index]
        elif wanted <= known:
            draft.missing.append(f"{name}'s group {index} of {count_and_name(sorted(wanted))}")
        matched.append(MatchedGroup(optimizer.param_groups[index], owners, saved_index))
        found |= wanted
    draft.unexpected += [f"{name}'s parameter {parameter}" for parameter in sorted(known - found)]
    draft.unexpected += [
        f"{name}'s group of {count_and_name(sorted(group))}" for group in free.values() if group <= found
    ]
    for parameter in known - found:
        draft.ignore(f"{name}/state/{parameter}")
    if free:
        draft.ignore(f"{name}/group")
    return matched


def _partly_known(name: str, owners: Sequence[Owner], known: set[str]) -> list[str]:
    """Sentences about flat parameters of which the checkpoint knows some parts only: those cannot have state alone."""
    return [
        f"{name} has {count_and_name([part.name for part in parts])} as one flat parameter, of which the checkpoint "
        f"lacks {count_and_name(lacking)}"
        for parts in _by_parameter(owners)
        if 0 < len(lacking := [part.name for part in parts if part.name not in known]) < len(parts)
    ]


def _as_saved(owner: Owner, parameters: ParameterNames, known: set[str]) -> Owner:
    """The owner by the name that the checkpoint has for it: a tied parameter may stand there under another."""
    names = parameters.names_of(owner.parameter, owner.part)
    name = next((name for name in names if name in known), owner.name)
    return owner if name == owner.name else msgspec.structs.replace(owner, name=name)


def _prepare_group(draft: Draft, name: str, group: MatchedGroup, saved: Json, shared: Shared) -> None:
    live = group.live
    unknown = sorted(set(live) - set(saved["options"]) - set(saved["shared"]) - set(_NOT_OPTIONS))
    if unknown:
        draft.warnings.append(
            f"{name}: options that the checkpoint does not have stay as they are: {', '.join(unknown)}"
        )
    for key, encoded in saved["options"].items():
        _prepare_option(draft, live, key, encoded, shared)
    for key, stored_as in saved["shared"].items():
        draft.then(
            Phase.OPTIMIZERS,
            lambda key=key, stored_as=stored_as: live.update({key: shared.made[stored_as]}),  # type: ignore[misc]
        )


def _prepare_option(draft: Draft, live: dict[str, Any], key: str, encoded: Json, shared: Shared) -> None:
    """A tensor stays the same object: a scheduler or a captured graph may hold it."""
    current = live.get(key)
    is_tensor = isinstance(encoded, dict) and encoded.get(TAG) == "tensor"
    saved = draft.tensors.get(encoded["name"]) if is_tensor else None
    if (
        saved is not None
        and isinstance(current, Tensor)
        and (current.dtype, tuple(current.shape)) == (saved.dtype, tuple(saved.shape))
        and not shared.is_claimed(current)
    ):
        draft.fill(encoded["name"], current)
        shared.claim(encoded["name"], current)
        return
    decoded = draft.decoder(encoded)

    def put() -> None:
        live[key] = decoded()

    draft.then(Phase.OPTIMIZERS, put)
    if is_tensor and saved is not None:
        shared.claim(encoded["name"], draft.targets[encoded["name"]])
