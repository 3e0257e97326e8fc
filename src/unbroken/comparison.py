"""What differs between two checkpoints, bit for bit: tensors, values, and what each rank has of its own.

Read only and streaming: tensors are compared in stretches of CHUNK_BYTES, whatever pieces and files they lie in on
either side, so checkpoints of different world sizes compare like any others. Every byte is verified on the way
(invariant 2). Memory stays bounded by CHUNK_BYTES and a few blocks of each side.

Generation, lineage, times and environment are not compared: they say how a checkpoint came about, not what it holds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch

from unbroken.blocks import read_verified
from unbroken.image.header import dtype_of
from unbroken.layout.boxes import Box, intersect, offset_in, whole
from unbroken.manifest import FileRecord, Manifest, PieceRecord, TensorRecord, box_of
from unbroken.pieces import Pieces
from unbroken.store.local import LocalStore

CHUNK_BYTES = 16 << 20
CACHE_BYTES = 64 << 20
"""Verified blocks that are kept per side: many small tensors lie in one block."""

Raw = np.ndarray[Any, np.dtype[np.uint8]]
"""Elements as rows of bytes."""
Progress = Callable[[int], None]
"""Called with the number of bytes compared since the last call, of one side."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that differs."""

    name: str
    """A tensor's full name, or the path of a value inside the typed JSON: `optimizer/groups/0/options/lr`."""
    ranks: tuple[int, ...] | None
    """Ranks that have it so; None if it is the same for all ranks."""
    a: str | None
    """What the first has, in words; None if it lacks it."""
    b: str | None
    elements: int = 0
    """Of a tensor of one dtype and shape: how many elements it has, …"""
    differing: int = 0
    """… how many of them differ in any bit, …"""
    largest: float | None = None
    """… and the largest absolute difference. None where every pair has a NaN, or the dtype has no numbers."""


@dataclass(slots=True)
class Comparison:
    """All differences of two checkpoints."""

    world_sizes: tuple[int, int]
    steps: tuple[tuple[int, int], tuple[int, int]]
    """(step, micro-step) of each."""
    tensors: list[Difference] = field(default_factory=list)
    values: list[Difference] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """True if nothing differs."""
        alike = self.world_sizes[0] == self.world_sizes[1] and self.steps[0] == self.steps[1]
        return alike and not self.tensors and not self.values


@dataclass(slots=True)
class Side:
    """One of the two checkpoints. Used by one thread."""

    store: LocalStore
    directory: str
    manifest: Manifest
    _blocks: OrderedDict[tuple[int, int], bytes] = field(default_factory=OrderedDict)
    _held: int = 0
    _pieces: Pieces | None = None

    def read(self, name: str, record: TensorRecord, box: Box) -> Raw:
        """The bytes of a part of a tensor, row-major. `box`: single indices, then one range, then whole dimensions.

        Raises DamagedCheckpoint.
        """
        shape = tuple(record.shape)
        itemsize = dtype_of(record.dtype).itemsize
        target = np.empty((*box.shape, itemsize), np.uint8)
        if self._pieces is None:
            self._pieces = Pieces(self.store, self.directory, self.manifest)
        for piece in self._pieces.overlapping(name, record, box):
            held = box_of(piece, shape)
            part = intersect(held, box)
            if part is not None:
                # Of such a box, what a piece holds is one stretch of the piece: all after the range is whole.
                begin = piece.begin + offset_in(held, part.begin) * itemsize
                data = self._bytes(piece, begin, begin + part.numel * itemsize)
                target[part.slices(box)] = data.reshape(*part.shape, itemsize)
        return target.reshape(-1, itemsize)

    def _bytes(self, piece: PieceRecord, begin: int, end: int) -> Raw:
        file = self.manifest.files[piece.file]
        data = bytearray()
        for number in range(begin // file.block_bytes, -(-end // file.block_bytes)):
            first = number * file.block_bytes
            block = self._block(piece.file, number, file)
            data += memoryview(block)[max(begin - first, 0) : end - first]
        return np.frombuffer(data, np.uint8)

    def _block(self, index: int, number: int, file: FileRecord) -> bytes:
        found = self._blocks.pop((index, number), None)
        if found is None:
            begin = number * file.block_bytes
            end = min(begin + file.block_bytes, file.size)
            found = bytes(read_verified(self.store, self.directory, file, begin, end))
            self._held += len(found)
        self._blocks[index, number] = found
        while self._held > CACHE_BYTES and len(self._blocks) > 1:
            _, oldest = self._blocks.popitem(last=False)
            self._held -= len(oldest)
        return found


def bytes_to_compare(manifest: Manifest) -> int:
    """How many bytes `compare` will report as progress, if the other side has the same tensors."""
    records = [record for tensors in (manifest.tensors, *manifest.rank_tensors) for record in tensors.values()]
    return sum(whole(tuple(record.shape)).numel * dtype_of(record.dtype).itemsize for record in records)


def compare(a: Side, b: Side, progress: Progress) -> Comparison:
    """All differences, of tensors in the order of their bytes in `a`. Raises DamagedCheckpoint."""
    one, other = a.manifest, b.manifest
    found = Comparison((one.world_size, other.world_size), ((one.step, one.micro_step), (other.step, other.micro_step)))
    ranks = range(min(one.world_size, other.world_size))
    for name, pair, holders in _pairs(one, other, ranks):
        difference = _compare_tensor(name, pair, holders, a, b, progress)
        if difference is not None:
            found.tensors.append(difference)
    found.values = list(_compare_values(one, other, ranks))
    return found


@dataclass(frozen=True, slots=True)
class _Pair:
    """The records of one tensor on both sides; None where it is missing."""

    a: TensorRecord | None
    b: TensorRecord | None


def _pairs(a: Manifest, b: Manifest, ranks: range) -> list[tuple[str, _Pair, tuple[int, ...] | None]]:
    """Each tensor once for all ranks that see the same two records, in the order of the bytes."""
    own = {name for tensors in (*a.rank_tensors, *b.rank_tensors) for name in tensors}
    found: list[tuple[str, _Pair, tuple[int, ...] | None]] = [
        (name, _Pair(a.tensors.get(name), b.tensors.get(name)), None)
        for name in {**a.tensors, **b.tensors}
        if name not in own
    ]
    for name in sorted(own):
        holders: dict[tuple[int, int], tuple[_Pair, list[int]]] = {}
        for rank in ranks:
            pair = _Pair(_record_of(a, rank, name), _record_of(b, rank, name))
            holders.setdefault((id(pair.a), id(pair.b)), (pair, []))[1].append(rank)
        found += [(name, pair, tuple(held)) for pair, held in holders.values() if pair.a or pair.b]
    return sorted(found, key=lambda item: _place(item[1].a or item[1].b))


def _record_of(manifest: Manifest, rank: int, name: str) -> TensorRecord | None:
    return manifest.rank_tensors[rank].get(name) or manifest.tensors.get(name)


def _place(record: TensorRecord | None) -> tuple[int, int]:
    pieces = record.pieces if record else []
    return (pieces[0].file, pieces[0].begin) if pieces else (0, 0)


def _compare_tensor(
    name: str, pair: _Pair, ranks: tuple[int, ...] | None, a: Side, b: Side, progress: Progress
) -> Difference | None:
    one, other = pair.a, pair.b
    if one is None or other is None or (one.dtype, one.shape) != (other.dtype, other.shape):
        return Difference(name, ranks, _describe(one), _describe(other))
    shape = tuple(one.shape)
    dtype = dtype_of(one.dtype)
    differing = 0
    largest: float | None = None
    for box in stretches(shape, max(CHUNK_BYTES // dtype.itemsize, 1)):
        here, there = a.read(name, one, box), b.read(name, other, box)
        progress(here.nbytes)
        unequal = _unequal(here, there)
        count = int(np.count_nonzero(unequal))
        differing += count
        if count < len(unequal):  # a mask costs more than what it spares if nearly all differ
            here, there = here[unequal], there[unequal]
        step = _largest(here, there, dtype) if count else None
        if step is not None:
            largest = max(step, largest or 0.0)
    if not differing:
        return None
    return Difference(name, ranks, _describe(one), _describe(other), whole(shape).numel, differing, largest)


def _describe(record: TensorRecord | None) -> str | None:
    return None if record is None else f"{record.dtype} {record.shape}"


def stretches(shape: tuple[int, ...], most: int) -> Iterator[Box]:
    """Boxes of at most `most` elements that cover a tensor in row-major order; none for an empty one.

    Each fixes the first indices, has a range of one dimension and all of those after it.
    """
    numel = whole(shape).numel
    if numel <= most:
        if numel:
            yield whole(shape)
        return
    dim, after = 0, numel // shape[0]
    while after > most:
        dim += 1
        after //= shape[dim]
    rows = most // after
    for first in np.ndindex(*shape[:dim]):
        for begin in range(0, shape[dim], rows):
            end = min(begin + rows, shape[dim])
            rest = shape[dim + 1 :]
            yield Box((*first, begin, *(0 for _ in rest)), (*(index + 1 for index in first), end, *rest))


def _unequal(here: Raw, there: Raw) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """For each row of bytes whether it differs: compared as whole words where there are any of that length."""
    length = here.shape[1]
    if length in (1, 2, 4, 8):
        word = np.dtype(f"u{length}")
        return np.asarray(here.view(word) != there.view(word)).reshape(-1)
    return np.asarray((here != there).any(axis=1))


def _largest(here: Raw, there: Raw, dtype: torch.dtype) -> float | None:
    """The largest absolute difference of elements given by their bytes; None if there is no number among them."""
    if dtype == torch.bool:
        return 1.0
    one, other = (torch.from_numpy(raw).view(dtype).flatten() for raw in (here, there))
    try:
        if not (dtype.is_floating_point or dtype.is_complex):
            return _largest_of_integers(one.numpy(), other.numpy())
        wide = torch.complex128 if dtype.is_complex else torch.float64
        apart = (one.to(wide) - other.to(wide)).abs()
    except (RuntimeError, TypeError):
        return None  # a dtype that torch can store and not compute with
    apart = apart[~apart.isnan()]
    return float(apart.max()) if len(apart) else None


def _largest_of_integers(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    """Exact for 64 bits too: the larger minus the smaller always fits the unsigned type."""
    unsigned = np.dtype(f"u{one.dtype.itemsize}")
    high, low = np.maximum(one, other).view(unsigned), np.minimum(one, other).view(unsigned)
    return float((high - low).max())


def _compare_values(a: Manifest, b: Manifest, ranks: range) -> Iterator[Difference]:
    groups: dict[tuple[str, int, int], tuple[Any, Any, list[int]]] = {}
    for rank in ranks:
        here, there = a.values_of(rank), b.values_of(rank)
        for name in {**here, **there}:
            one, other = here.get(name, _NOTHING), there.get(name, _NOTHING)
            groups.setdefault((name, id(one), id(other)), (one, other, []))[2].append(rank)
    for (name, _, _), (one, other, held) in groups.items():
        for path, left, right in _walk(name, one, other):
            yield Difference(path, None if len(held) == len(ranks) else tuple(held), _text(left), _text(right))


_NOTHING: Any = object()


def _walk(path: str, one: Any, other: Any) -> Iterator[tuple[str, Any, Any]]:
    """Where two typed JSON values differ. Numbers are equal if they are written alike: 1 is not 1.0, nor 0.0 -0.0."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in {**one, **other}:
            yield from _walk(f"{path}/{key}", one.get(key, _NOTHING), other.get(key, _NOTHING))
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, pair in enumerate(zip(one, other, strict=True)):
            yield from _walk(f"{path}/{index}", *pair)
    elif _text(one) != _text(other):
        yield path, one, other


def _text(value: Any) -> str | None:
    return None if value is _NOTHING else msgspec.json.encode(value).decode()
