"""Who writes what: replicated tensors are shared out evenly, so that N ranks each write one N-th.

A pure function of names, shapes and sizes: every rank that knows the same tensors comes to the same answer alone,
without a collective (DESIGN section 6).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unbroken.layout.boxes import Box

SPLIT_BYTES = 1 << 20
"""A tensor larger than this may be cut along its first dimension; a smaller one has one writer."""


@dataclass(frozen=True, slots=True)
class Extent:
    """One tensor to be shared out, or a part of one."""

    name: str
    box: Box
    """What all the writers hold of it."""
    itemsize: int
    """Bytes per element."""

    @property
    def nbytes(self) -> int:
        """Bytes of the box."""
        return self.box.numel * self.itemsize


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a tensor that one rank writes."""

    name: str
    box: Box
    held: Box
    """The extent's box, which it lies in."""


def share_out(extents: Sequence[Extent], writers: int) -> list[list[Share]]:
    """For each of `writers` ranks, the parts it writes; together they cover every extent exactly once.

    The tensors are laid end to end in the given order and the line is cut into `writers` equal lengths. A cut that
    falls into a large tensor divides it between two rows of its first dimension; a small tensor goes whole to the rank
    that has its middle. So a rank's share differs from the mean by at most SPLIT_BYTES or one row.
    """
    shares: list[list[Share]] = [[] for _ in range(writers)]
    total = sum(extent.nbytes for extent in extents)
    offset = 0
    for extent in extents:
        for writer, box in _divide(extent, offset, total, writers):
            shares[writer].append(Share(extent.name, box, extent.box))
        offset += extent.nbytes
    return shares


def spread_evenly(sizes: Sequence[int], writers: int) -> list[int]:
    """Which of `writers` writes each of the tensors of these sizes (bytes), none of them divided."""
    total = sum(sizes)
    found, offset = [], 0
    for size in sizes:
        found.append(_writer_at(offset + size // 2, total, writers))
        offset += size
    return found


def _divide(extent: Extent, offset: int, total: int, writers: int) -> list[tuple[int, Box]]:
    """The writers of one tensor that lies at `offset` on the line of `total` bytes."""
    shape = extent.box.shape
    rows = shape[0] if shape else 1
    row_bytes = extent.nbytes // rows if rows else 0
    if extent.nbytes <= SPLIT_BYTES or rows < 2:
        return [(_writer_at(offset + extent.nbytes // 2, total, writers), extent.box)]
    parts: list[tuple[int, Box]] = []
    origin, first = extent.box.begin[0], 0
    for writer in range(_writer_at(offset, total, writers), writers):
        cut = (writer + 1) * total // writers - offset
        last = rows if writer == writers - 1 else min(rows, max(first, round(cut / row_bytes)))
        if last > first:
            begin, end = extent.box.begin[1:], extent.box.end[1:]
            parts.append((writer, Box((origin + first, *begin), (origin + last, *end))))
        first = last
        if first == rows:
            break
    return parts


def _writer_at(byte: int, total: int, writers: int) -> int:
    """The rank whose stretch of the line holds `byte`."""
    return min(writers - 1, byte * writers // total) if total else 0
