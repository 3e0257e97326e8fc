"""Whether an object changed between two looks, told from a small sample of what it holds.

What does not move while the job trains is no training state: a teacher, the generator that split the data, the
optimizer of a phase that is over. Version counters would not do: `average.data.mul_()` leaves them as they are, and
moving a frozen model to another device does not.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unbroken.coverage.alive import GENERATOR, OPTIMIZER, SCALER, SCHEDULER
from unbroken.coverage.peek import attributes, is_a
from unbroken.state.arrays import reason_not_plain

_ELEMENTS = 16
_TENSORS = 128
_STATES = 32


@dataclass(frozen=True, slots=True)
class Mark:
    """What one object was like. Does not keep it alive."""

    cls: type
    reference: weakref.ref[Any] | None
    sample: str
    """Equal as long as it does not move; "" if there is nothing yet that could."""

    def is_of(self, value: object) -> bool:
        """Whether this is the object itself, and not another that lies where it lay."""
        return type(value) is self.cls and (self.reference is None or self.reference() is value)


def mark(value: object, sample: str) -> Mark:
    """A mark of an object, with the sample that was taken of it."""
    try:
        return Mark(type(value), weakref.ref(value), sample)
    except TypeError:
        return Mark(type(value), None, sample)


def sample(kind: str, value: object) -> str:
    """What shows that an optimizer, a scheduler, a scaler or a generator was used. Draws nothing."""
    own = attributes(value)
    if kind == GENERATOR:
        return _sample_generator(value)
    if kind == OPTIMIZER:
        states = list((own.get("state") or {}).values())[:_STATES]
        return _sample_values(held for state in states if is_a(state, dict) for held in list(state.values()))
    if kind == SCHEDULER:
        step = own.get("last_epoch")  # 0 once it is made
        return "" if type(step) is int and step <= 0 else repr(step)
    if kind == SCALER:
        return _sample_values([own.get("_scale"), own.get("_growth_tracker")])
    return ""


def sample_tensors(tensors: Sequence[Tensor]) -> str:
    """A few elements of a few of these tensors, evenly chosen."""
    return _sample_values(tensors[:: 1 + len(tensors) // _TENSORS])


def _sample_values(values: Iterable[Any]) -> str:
    return " ".join(
        _sample_tensor(value) if is_a(value, Tensor) else repr(value)
        for value in values
        if is_a(value, Tensor) or (type(value) is int or type(value) is float)
    )


@torch.no_grad()
def _sample_tensor(tensor: Tensor) -> str:
    """Some of the first and some of the last elements."""
    if reason_not_plain(tensor) is not None or tensor.numel() == 0:
        return ""
    plain = tensor.detach()
    if plain.dim() == 0:
        plain = plain.reshape(1)
    rows = plain.dim() - 1
    ends = torch.cat([plain[(0,) * rows][:_ELEMENTS], plain[(-1,) * rows][-_ELEMENTS:]])
    return ends.cpu().contiguous().view(torch.uint8).numpy().tobytes().hex()


def _sample_generator(generator: Any) -> str:
    if is_a(generator, torch.Generator):
        return str(generator.get_state().numpy().tobytes().hex())
    if is_a(generator, np.random.Generator):
        return repr(generator.bit_generator.state)
    if is_a(generator, np.random.RandomState):
        return repr(np.random.RandomState.get_state(generator, legacy=False))
    return repr(random.Random.getstate(generator))
