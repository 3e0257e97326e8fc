"""How a tensor is spread over ranks: which boxes each rank holds, and who else holds the same.

A pure function of a mesh and of how its dimensions cut the tensor, so every rank works out alone what any other rank
holds, without a collective. The cutting follows `torch.chunk`, as `torch.distributed.tensor.Shard` does: pieces of
ceil(n / parts) rows, the last ones shorter or empty.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeAlias

import xxhash

from unbroken.layout.boxes import Box, boxes_of_range, intersect, whole


class Group(tuple[int, ...]):
    """Ranks that hold the same. Its hash is computed once: thousands of tensors ask for that of thousands of ranks."""

    def __hash__(self) -> int:
        found: int | None = self.__dict__.get("hash")
        if found is None:
            found = self.__dict__["hash"] = super().__hash__()
        return found


@dataclass(frozen=True)
class Mesh:
    """Ranks in an n-dimensional order."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    """Row-major; as many as the product of `shape`."""

    @cached_property
    def _places(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.ranks)}

    @cached_property
    def key(self) -> str:
        """A short name, the same in every process: `2x2:9f86d081…`."""
        digest = xxhash.xxh3_64_hexdigest(",".join(map(str, self.ranks)).encode())
        return f"{'x'.join(map(str, self.shape))}:{digest}"

    def __contains__(self, rank: int) -> bool:
        return rank in self._places

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Where a rank stands. Raises KeyError for one that is not in the mesh."""
        place = self._places[rank]
        coordinate = []
        for length in reversed(self.shape):
            place, index = divmod(place, length)
            coordinate.append(index)
        return tuple(reversed(coordinate))

    def rank_at(self, coordinate: tuple[int, ...]) -> int:
        """The rank that stands there."""
        place = 0
        for index, length in zip(coordinate, self.shape, strict=True):
            place = place * length + index
        return self.ranks[place]

    @cached_property
    def ascends(self) -> bool:
        """True if the ranks ascend along each dimension."""
        strides = [math.prod(self.shape[at + 1 :]) for at in range(len(self.shape))]
        return all(
            rank < self.ranks[place + stride]
            for stride, length in zip(strides, self.shape, strict=True)
            for place, rank in enumerate(self.ranks)
            if place // stride % length < length - 1
        )

    @cached_property
    def _slices(self) -> dict[tuple[object, ...], Mesh]:
        return {}

    def slice(self, kept: tuple[int, ...], index: int) -> Mesh:
        """One of the meshes that have the dimensions `kept` only: the `index`-th in the order of the others."""
        if (kept, index) not in self._slices:
            fixed: dict[int, int] = {}
            rest = index
            for at in reversed([at for at in range(len(self.shape)) if at not in kept]):
                rest, fixed[at] = divmod(rest, self.shape[at])
            choices = [(fixed[at],) if at in fixed else range(length) for at, length in enumerate(self.shape)]
            ranks = tuple(self.rank_at(coordinate) for coordinate in itertools.product(*choices))
            self._slices[kept, index] = Mesh(tuple(self.shape[at] for at in kept), ranks)
        return self._slices[kept, index]

    @cached_property
    def _groups(self) -> dict[tuple[object, ...], Group]:
        return {}

    def across(self, rank: int, dimensions: frozenset[int]) -> Group:
        """The ranks that differ from `rank` in these dimensions only, itself included, in the order of the mesh."""
        own = self.coordinate(rank)
        fixed = tuple(-1 if at in dimensions else index for at, index in enumerate(own))
        if fixed not in self._groups:
            choices = [range(length) if at in dimensions else (own[at],) for at, length in enumerate(self.shape)]
            self._groups[fixed] = Group(self.rank_at(coordinate) for coordinate in itertools.product(*choices))
        return self._groups[fixed]


@lru_cache(maxsize=64)
def line(ranks: tuple[int, ...]) -> Mesh:
    """A mesh of one dimension."""
    return Mesh((len(ranks),), ranks)


@dataclass(frozen=True)
class Cuts:
    """A tensor that mesh dimensions cut one after another; those that do not cut it hold replicas."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    mesh: Mesh
    order: tuple[tuple[int, int], ...] = ()
    """(mesh dimension, tensor dimension), in the order in which the cuts are made."""

    @property
    def replicas(self) -> int:
        """How many ranks hold each part."""
        cutting = {mesh_dimension for mesh_dimension, _ in self.order}
        return math.prod(length for at, length in enumerate(self.mesh.shape) if at not in cutting)

    def of_replica(self, index: int) -> Cuts:
        """The same tensor on the ranks of one of its replicas alone, which hold each part once."""
        cutting = tuple(sorted({mesh_dimension for mesh_dimension, _ in self.order}))
        order = tuple((cutting.index(mesh_dimension), dimension) for mesh_dimension, dimension in self.order)
        return Cuts(self.shape, self.mesh.slice(cutting, index), order)

    def boxes_of(self, rank: int) -> tuple[Box, ...]:
        """The one box that a rank holds, which may be empty."""
        coordinate = self.mesh.coordinate(rank)
        box = whole(self.shape)
        for mesh_dimension, dimension in self.order:
            box = _chunk(box, dimension, self.mesh.shape[mesh_dimension], coordinate[mesh_dimension])
        return (box,)

    def holders_of(self, rank: int) -> Group:
        """All ranks that hold the same as `rank` by construction, itself included."""
        cutting = {mesh_dimension for mesh_dimension, _ in self.order}
        return self.mesh.across(rank, frozenset(range(len(self.mesh.shape))) - cutting)

    def describe(self) -> str:
        """The same for every rank of the mesh, and different for another spread."""
        return f"{self.shape} {self.mesh.key} {self.order}"


@dataclass(frozen=True)
class Stretch:
    """A tensor that lies flat on a line of several ones, which is cut into equal lengths: FSDP1's flat parameter."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    mesh: Mesh
    cutting: int | None
    """The mesh dimension that cuts the line; the others hold replicas. None: the line is not cut."""
    begin: int
    """Where the tensor begins on the line, in elements."""
    length: int
    """Elements of the line that each rank holds."""

    def range_of(self, rank: int) -> tuple[int, int]:
        """Elements of the flattened tensor that a rank holds: (first, one past the last)."""
        numel = whole(self.shape).numel
        if self.cutting is None:
            return 0, numel
        first = self.mesh.coordinate(rank)[self.cutting] * self.length - self.begin
        return min(max(first, 0), numel), min(max(first + self.length, 0), numel)

    def boxes_of(self, rank: int) -> tuple[Box, ...]:
        """The boxes whose elements, one box after another, are those that a rank holds; none if it holds nothing."""
        if whole(self.shape).numel == 0:
            return (whole(self.shape),)
        return tuple(boxes_of_range(self.shape, *self.range_of(rank)))

    def holders_of(self, rank: int) -> Group:
        """All ranks that hold the same as `rank` by construction, itself included."""
        return self.mesh.across(rank, frozenset(range(len(self.mesh.shape))) - {self.cutting})

    def describe(self) -> str:
        """The same for every rank of the mesh, and different for another spread."""
        return f"{self.shape} {self.mesh.key} {self.cutting} {self.begin}+{self.length}"


Spread: TypeAlias = Cuts | Stretch


def holding(spread: Spread) -> Mesh:
    """The ranks that hold a part of a tensor; of a stretch, those that it does not reach are left out."""
    if isinstance(spread, Cuts):
        return spread.mesh
    return line(tuple(rank for rank in spread.mesh.ranks if spread.boxes_of(rank)))


def replicated(shape: tuple[int, ...], ranks: tuple[int, ...]) -> Cuts:
    """A tensor that each of these ranks holds whole."""
    return Cuts(shape, line(ranks))


def _chunk(box: Box, dimension: int, parts: int, index: int) -> Box:
    begin, end = box.begin[dimension], box.end[dimension]
    length = -(-(end - begin) // parts)
    first = min(begin + index * length, end)
    last = min(first + length, end)
    return Box(
        (*box.begin[:dimension], first, *box.begin[dimension + 1 :]),
        (*box.end[:dimension], last, *box.end[dimension + 1 :]),
    )


def overlapping(cuts: Cuts, box: Box) -> Iterator[tuple[Box, int]]:
    """The boxes that share elements with `box`, each with the first rank that holds it.

    Walks only what overlaps: its cost grows with the number of boxes found, not with that of ranks.
    """
    first = [0] * len(cuts.mesh.shape)
    yield from _descend(cuts, box, whole(cuts.shape), 0, first)


def _descend(cuts: Cuts, wanted: Box, box: Box, level: int, coordinate: list[int]) -> Iterator[tuple[Box, int]]:
    if level == len(cuts.order):
        if intersect(box, wanted) is not None:
            yield box, cuts.mesh.rank_at(tuple(coordinate))
        return
    mesh_dimension, dimension = cuts.order[level]
    parts = cuts.mesh.shape[mesh_dimension]
    begin = box.begin[dimension]
    length = -(-(box.end[dimension] - begin) // parts)
    if length == 0:
        return
    low = max(0, (wanted.begin[dimension] - begin) // length)
    high = min(parts, -(-(wanted.end[dimension] - begin) // length))
    for index in range(low, high):
        coordinate[mesh_dimension] = index
        yield from _descend(cuts, wanted, _chunk(box, dimension, parts, index), level + 1, coordinate)
    coordinate[mesh_dimension] = 0
