"""Boxes: which part of a tensor a piece holds.

A box is a half-open range per dimension, in the coordinates of the whole (global) tensor; a scalar's box has none.
Nothing here knows of ranks, files or bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec


class Box(msgspec.Struct, frozen=True):
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


def offset_in(box: Box, index: tuple[int, ...]) -> int:
    """Elements before the one at `index` in the row-major order of `box`."""
    offset = 0
    for at, first, length in zip(index, box.begin, box.shape, strict=True):
        offset = offset * length + at - first
    return offset


def boxes_of_range(shape: tuple[int, ...], first: int, last: int) -> Iterator[Box]:
    """The elements `first` to `last` of a flattened tensor as boxes, at most two a dimension and one more.

    One box after another, row-major, gives the elements in their order. Nothing for an empty range.
    """
    if first >= last:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    (top, left), (bottom, right) = divmod(first, row), divmod(last, row)
    if left or (top == bottom and right):  # begins inside a row
        end = right if top == bottom else row
        yield from _within_row(shape, top, left, end)
        top += 1
    if top < bottom:
        yield Box((top, *(0,) * (len(shape) - 1)), (bottom, *shape[1:]))
    if right and top <= bottom:
        yield from _within_row(shape, bottom, 0, right)


def _within_row(shape: tuple[int, ...], row: int, first: int, last: int) -> Iterator[Box]:
    for box in boxes_of_range(shape[1:], first, last):
        yield Box((row, *box.begin), (row + 1, *box.end))


def name_of_part(tensor: str, box: Box, shape: tuple[int, ...]) -> str:
    """The name of a piece inside a file: the tensor's own name if it is whole, with its box otherwise."""
    if box == whole(shape):
        return tensor
    ranges = ",".join(f"{begin}:{end}" for begin, end in zip(box.begin, box.end, strict=True))
    return f"{tensor}[{ranges}]"
