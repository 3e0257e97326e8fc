"""Gradients between two steps: partial sums inside an accumulation window, and which of them are None.

Outside a window only the latter counts: a parameter whose gradient is None is skipped by optimizers, and -0.0 added to
a gradient of zeros gives 0.0, but stays -0.0 where there was none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unbroken.errors import UnsupportedValue
from unbroken.layout.spread import Cuts, Spread, Stretch
from unbroken.state.captured import Captured, Json, LiveTensor, SavedTensor
from unbroken.state.draft import Draft, Phase, count_and_name
from unbroken.state.names import ParameterNames, Slot, fresh_like, reason_not_storable
from unbroken.state.placements import empty_beside, is_partial, placed_beside
from unbroken.state.sharding import local_of, spread_of

ROOT = "gradients"
KIND = "gradients"


def capture_gradients(captured: Captured, parameters: ParameterNames, *, accumulating: bool) -> None:
    """Each rank's own gradients while accumulating; else only where there are any.

    Raises UnsupportedValue for a sparse gradient while accumulating.
    """
    present = [slot for slots in parameters.parameters() for slot in slots if slot.tensor.grad is not None]
    value: dict[str, Any] = {"kind": KIND, "accumulating": accumulating, "present": [slot.name for slot in present]}
    captured.values[ROOT] = value
    if not accumulating:
        return
    for slot in present:
        gradient = slot.tensor.grad
        assert gradient is not None
        told = placed_beside(gradient, slot.tensor)
        if told is not None:
            value.setdefault("placements", {})[slot.name] = told
        # Partial sums are each rank's own.
        problem = reason_not_storable(local_of(gradient) if is_partial(told) else gradient)
        if isinstance(slot.spread, Stretch) and gradient.shape != slot.tensor.shape:
            problem = "not reduced yet (no_sync), and unsharded"
        if problem is not None:
            raise UnsupportedValue(
                f"the gradient of {slot.name} is {problem}: save between two optimizer steps instead"
            )
        captured.tensors[f"{ROOT}/{slot.name}"] = LiveTensor(_local_of(gradient, slot), _spread_of(gradient, slot))


def prepare_gradients(draft: Draft, parameters: ParameterNames) -> None:
    """Restore partial gradients, or zeros where there were some, or None where there were none."""
    value = draft.values.get(ROOT)
    if value is None:
        draft.ignore(ROOT)
        draft.warnings.append("gradients are not restored: the checkpoint has none for this rank")
        return
    present = set(value["present"])
    for slots in parameters.parameters():
        parameter = slots[0].tensor
        found: list[tuple[str, Slot]] = []
        for slot in slots:
            saved_as = [name for name in parameters.names_of(parameter, slot.part) if name in present]
            present.difference_update(saved_as)
            found += [(f"{ROOT}/{saved_as[0]}", slot)] if saved_as else []
        if not found:
            draft.then(Phase.GRADIENTS, lambda parameter=parameter: _set(parameter, None))  # type: ignore[misc]
        elif not value["accumulating"]:
            draft.then(Phase.GRADIENTS, lambda parameter=parameter: _set_zeros(parameter))  # type: ignore[misc]
        elif slots[0].part is None:
            name, slot = found[0]
            told = value.get("placements", {}).get(name.removeprefix(f"{ROOT}/"))
            _prepare_one(draft, name, slot, told)
        else:
            _prepare_parts(draft, found)


def _spread_of(gradient: Tensor, slot: Slot) -> Spread | None:
    """A gradient beside a shard is summed over ranks and cut like it; any other is this rank's own."""
    if isinstance(slot.spread, Stretch) and slot.spread.cutting is not None and gradient.shape == slot.tensor.shape:
        return slot.spread
    return spread_of(gradient)


def _local_of(gradient: Tensor, slot: Slot) -> Tensor:
    """What is stored of it; of a part that is this rank's own, in the shape that it has in other layouts."""
    if slot.part is None:
        return local_of(gradient).detach()
    spread = _spread_of(gradient, slot)
    part = slot.part.of(gradient)
    return part if spread is not None or slot.spread is None else part.view(slot.spread.shape)


def _prepare_one(draft: Draft, name: str, slot: Slot, told: Json | None) -> None:
    saved = draft.saved(name)
    if saved is None:
        return
    parameter, shape = slot.tensor, tuple(saved.shape)
    if isinstance(slot.spread, Stretch) and shape == slot.spread.shape:
        shape = tuple(parameter.shape)
    # Never the live gradient: it may be a view into a bucket, which the replay of `buckets` writes over.
    whole = tuple(parameter.shape) if is_partial(told) else shape
    target = empty_beside(told, parameter, whole, saved.dtype)
    if target is None:
        spread = _spread_of(parameter, slot)
        if _is_unreduced(draft, name, saved, is_partial(told) or _is_part(spread)):
            return
        target = fresh_like(parameter, saved.dtype, shape, parameter.device)
    draft.fill(name, local_of(target), _spread_of(target, slot))
    draft.then(Phase.GRADIENTS, lambda: _set(parameter, target))


def _is_unreduced(draft: Draft, name: str, saved: SavedTensor, is_part: bool) -> bool:
    """True (and noted) if each rank had sums of its own, and only a part of the reduced ones, or none, belongs here."""
    if saved.own and is_part:
        draft.differing.append(f"{name} is what this rank had summed alone, and cannot be had in another layout")
        return True
    return False


def _is_part(spread: Spread | None) -> bool:
    return bool(spread.order) if isinstance(spread, Cuts) else spread is not None and spread.cutting is not None


@torch.no_grad()
def _prepare_parts(draft: Draft, found: list[tuple[str, Slot]]) -> None:
    """The gradient of a flat parameter; zero is added to where a part had none, as FSDP does for one that is unused."""
    parameter = found[0][1].tensor
    dtypes = {saved.dtype for name, _ in found if (saved := draft.saved(name)) is not None}
    if len(dtypes) != 1:
        if dtypes:
            draft.differing.append(f"gradients of {count_and_name([name for name, _ in found])} are of several dtypes")
        return
    target = torch.zeros_like(parameter, dtype=dtypes.pop())
    for name, slot in found:
        saved = draft.saved(name)
        if saved is None or _is_unreduced(draft, name, saved, _is_part(_spread_of(target, slot))):
            continue
        draft.fill(name, _local_of(target, slot), _spread_of(target, slot))
    draft.then(Phase.GRADIENTS, lambda: _set(parameter, target))


def _set(parameter: Tensor, gradient: Tensor | None) -> None:
    parameter.grad = gradient


def _set_zeros(parameter: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    else:
        parameter.grad.detach().zero_()
