"""Boxes: which part of a tensor a piece holds.

A box is a half-open range per dimension, in the coordinates of the whole (global) tensor; a scalar's box has none.
Nothing here knows of ranks, files or bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor."""

    begin: tuple[int, ...]
    """First index per dimension."""
    end: tuple[int, ...]
    """One past the last index per dimension."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths per dimension."""
        return tuple(end - begin for begin, end in zip(self.begin, self.end, strict=True))

    @property
    def numel(self) -> int:
        """How many elements lie in the box; 1 for a scalar."""
        return math.prod(self.shape)

    def slices(self, origin: Box) -> tuple[slice, ...]:
        """Index this box within a tensor that holds exactly `origin`."""
        return tuple(
            slice(begin - first, end - first)
            for begin, end, first in zip(self.begin, self.end, origin.begin, strict=True)
        )


def whole(shape: tuple[int, ...]) -> Box:
    """The box of a whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


def intersect(one: Box, other: Box) -> Box | None:
    """The part two boxes of one tensor share, or None if they share no element."""
    begin = tuple(max(a, b) for a, b in zip(one.begin, other.begin, strict=True))
    end = tuple(min(a, b) for a, b in zip(one.end, other.end, strict=True))
    if any(first >= last for first, last in zip(begin, end, strict=True)):
        return None
    return Box(begin, end)


def name_of_part(tensor: str, box: Box, shape: tuple[int, ...]) -> str:
    """The name of a piece inside a file: the tensor's own name if it is whole, with its box otherwise."""
    if box == whole(shape):
        return tensor
    ranges = ",".join(f"{begin}:{end}" for begin, end in zip(box.begin, box.end, strict=True))
    return f"{tensor}[{ranges}]"
