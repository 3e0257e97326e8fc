"""The state of a flat parameter, put together from what the checkpoint has of each of its parts.

Moments are laid out like the flat parameter: each part is read into its stretch, and padding is zero. Of a counter each
part has one by itself and the flat parameter one for all, so they must be equal. Where they are not (a parameter had no
gradient for a while), no state of the flat parameter would continue the run, and the restore is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unbroken.elements import as_bytes
from unbroken.errors import StateMismatch
from unbroken.state.captured import Json, SavedTensor
from unbroken.state.codec import references
from unbroken.state.draft import Draft, count_and_name
from unbroken.state.optimizer_state import Owner, Shared, target_of
from unbroken.state.sharding import beside

_HINT = "they are one flat parameter here, with one state: with FullyShardedDataParallel give use_orig_params=True"


@dataclass(frozen=True, slots=True)
class _Kept:
    """What the checkpoint has for one part."""

    owner: Owner
    path: str
    value: Json

    def stored_as(self, key: str) -> str:
        """The full name of one of its tensors."""
        return str(self.value["shared"].get(key, f"{self.path}/{key}"))


def join_parts(
    draft: Draft, root: str, owners: Sequence[Owner], live: Mapping[Any, Any], saved: Mapping[str, Json], shared: Shared
) -> JoinedRestore | None:
    """The state of one flat parameter on its way back; None if it had none, or (noted) if its parts do not agree.

    root    of the parts' states, `optimizer/state`
    owners  the parts that this rank holds anything of
    """
    # A part without elements has no gradient in some layouts, and so no state: it decides nothing beside others.
    decisive = [owner for owner in owners if owner.numel] or list(owners)
    for owner in owners:
        if not any(owner is other for other in decisive):
            draft.ignore(f"{root}/{owner.name}")
    kept = [_Kept(o, f"{root}/{o.name}", saved[o.name]) for o in decisive if saved.get(o.name) is not None]
    if not kept:
        return None
    problem = _lacking(kept, decisive) or _difference(draft, kept)
    if problem:
        draft.differing.append(f"{root.partition('/')[0]}'s state of {problem}; {_HINT}")
        for part in kept:
            draft.ignore(part.path)
        return None
    return JoinedRestore(draft, kept, live, shared)


def _lacking(kept: Sequence[_Kept], owners: Sequence[Owner]) -> str:
    """What is wrong where only some parts have state; empty if all have."""
    known = [part.owner.name for part in kept]
    lacking = [owner.name for owner in owners if owner.name not in known]
    return f"{count_and_name(known)} is there, that of {count_and_name(lacking)} is not" if lacking else ""


def _difference(draft: Draft, kept: Sequence[_Kept]) -> str:
    """Why states of several parts are not those of one, as far as it shows before they are read; empty if they fit."""
    names = count_and_name([part.owner.name for part in kept])
    first = kept[0].value
    if any(set(part.value["keys"]) != set(first["keys"]) or part.value["rest"] != first["rest"] for part in kept):
        return f"{names} is not of the same things"
    if any(True for _ in references(first["rest"])):
        return f"{names} has tensors inside lists or the like"
    for key in first["keys"]:
        tensors = [draft.tensors.get(part.stored_as(key)) for part in kept]
        found = [tensor for tensor in tensors if tensor is not None]
        if len({tensor.dtype for tensor in found}) > 1:
            return f"{names} has {key} of several dtypes"
        if not _are_moments(key, kept, found) and any(math.prod(tensor.shape) != 1 for tensor in found):
            return f"{names} has {key} that is not of their shapes"
    return ""


def _are_moments(key: str, kept: Sequence[_Kept], tensors: Sequence[SavedTensor]) -> bool:
    """True if a state tensor is of its parameter's shape for each of the parts."""
    return all(
        part.owner.spread is not None
        and tuple(tensor.shape) == part.owner.spread.shape
        and not tensor.own
        and key in part.value["tensors"]
        and not (key == "step" and tensor.shape == ())
        for part, tensor in zip(kept, tensors, strict=False)
    )


class JoinedRestore:
    """The state of one flat parameter on its way back."""

    def __init__(self, draft: Draft, kept: Sequence[_Kept], live: Mapping[Any, Any], shared: Shared) -> None:
        """Give each part's tensors a place to be read into; `live` itself is not changed."""
        self._kept = kept
        self._shared = shared
        self._rest = draft.decoder(kept[0].value["rest"])
        for key in kept[0].value["keys"]:
            saved = [tensor for part in kept if (tensor := draft.saved(part.stored_as(key))) is not None]
            if len(saved) < len(kept):  # noted as missing
                continue
            if _are_moments(key, kept, saved):
                self._fill_moments(draft, key, saved[0], live.get(key))
            else:
                self._fill_counters(draft, key, saved, live.get(key))

    @torch.no_grad()
    def _fill_moments(self, draft: Draft, key: str, saved: SavedTensor, live: object) -> None:
        first = self._kept[0]
        shape = tuple(first.owner.parameter.shape)
        target = target_of(key, saved, shape, first.value["tensors"][key], first.owner, live, self._shared)
        if target is not live:
            target.zero_()
        for part in self._kept:
            draft.fill(part.stored_as(key), part.owner.of(target), part.owner.spread)
            self._shared.claim(part.stored_as(key), target)

    def _fill_counters(self, draft: Draft, key: str, saved: Sequence[SavedTensor], live: object) -> None:
        for part, tensor in zip(self._kept, saved, strict=True):
            if key in part.value["tensors"]:
                shape, where = tuple(tensor.shape), part.value["tensors"][key]
                target = target_of(key, tensor, shape, where, part.owner, live, self._shared)
                draft.fill(part.stored_as(key), target, beside(part.owner.spread, shape))
                self._shared.claim(part.stored_as(key), target)

    def state(self) -> dict[Any, Any]:
        """The state, once the targets are filled.

        Raises StateMismatch if counters of the parts are not equal, which could not be known before.
        """
        own = {key: self._one(key) for key in self._kept[0].value["keys"]}
        rest: Any = self._rest()
        return {**own, **rest}

    def _one(self, key: str) -> Tensor:
        first, *others = self._kept
        one = self._shared.made[first.stored_as(key)]
        for part in others:
            other = self._shared.made[part.stored_as(key)]
            if other is not one and not _same_bytes(one, other):
                raise StateMismatch(
                    f"{first.path}/{key} is {one.item()} in the checkpoint, and {part.path}/{key} is {other.item()}; "
                    f"{_HINT}. The restore had begun: build the objects anew before you train on"
                )
        return one


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    return torch.equal(as_bytes(one.cpu()), as_bytes(other.cpu()))
