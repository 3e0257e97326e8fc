"""Bytes of a checkpoint -> live tensors, every one verified on the way (invariant 2).

Only what is wanted is read, in whole blocks, since digests are per block; and it is read straight into the tensors'
own memory, by several threads, since one does not keep a disk busy. What goes to a CUDA device is read into pinned
memory, verified there, and copied from it, by each thread for itself. Nothing here decides which checkpoint.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import torch

from unbroken import cuda, faultpoints
from unbroken.blocks import DataFile, Landing
from unbroken.image.header import dtype_of
from unbroken.layout.boxes import Box, intersect, offset_in, whole
from unbroken.layout.spread import Spread
from unbroken.manifest import FileRecord, Manifest, PieceRecord, TensorRecord, box_of
from unbroken.pieces import Pieces
from unbroken.snapshot import held_boxes
from unbroken.store.local import LocalStore

RUN_BYTES = 8 << 20
"""What one call reads, about: long enough for any disk, short enough that its digests are taken from the cache."""
READ_BYTES = 64 << 20
"""Most bytes of one file that are held in memory at once while restoring, a block more or less, by one thread."""
GAP_BYTES = 1 << 20
"""What lies between two wanted parts is read along with them up to this length."""
READERS = max(2, min(8, os.cpu_count() or 1))
"""Threads that read."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a part of a tensor goes."""

    tensor: torch.Tensor
    """Of the box's shape."""
    box: Box
    """In the coordinates of the whole tensor."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A part of one piece, to be read into its place."""

    begin: int
    """First byte of the part in the file. Between its first and last byte others may lie."""
    end: int
    """One past its last byte."""
    memory: memoryview | None
    """The bytes of its place, if they lie there as in the file."""
    place: torch.Tensor
    """The part of the target where it goes."""
    strides: tuple[int, ...]
    """Of the part, in the file; in elements."""
    on_device: torch.Tensor | None = None
    """The bytes of its place, flat, if they lie on a CUDA device as in the file."""


@dataclass(frozen=True, slots=True)
class _Crossing:
    """What goes to a CUDA device."""

    begin: int
    """First byte in the file."""
    place: torch.Tensor
    """Flat bytes."""


@dataclass(slots=True)
class _Run:
    """What is read of a file at once."""

    landings: list[Landing] = field(default_factory=list)
    crossings: list[_Crossing] = field(default_factory=list)
    scattered: list[tuple[_Wanted, memoryview]] = field(default_factory=list)
    """Parts that lie otherwise in the tensor than in the file, and the memory that they are copied from."""
    begin: int = 0
    end: int = 0

    @property
    def is_empty(self) -> bool:
        """True if nothing is to be read yet."""
        return not self.landings and not self.crossings

    def add(self, begin: int, place: memoryview | torch.Tensor) -> None:
        """Read the bytes from `begin` on into memory, or to a device."""
        if isinstance(place, memoryview):
            self.landings.append(Landing(begin, place))
        else:
            self.crossings.append(_Crossing(begin, place))


def targets_of(tensor: torch.Tensor, spread: Spread | None, rank: int) -> list[Target]:
    """Where a tensor goes, of which `rank` holds what its `spread` says, or all."""
    if spread is None:
        return [Target(tensor, whole(tuple(tensor.shape)))]
    return [Target(view, box) for box, view in held_boxes(tensor, spread, rank)]


@torch.no_grad()
def read_tensors(
    store: LocalStore,
    directory: str,
    manifest: Manifest,
    records: Mapping[str, TensorRecord],
    targets: Mapping[str, Sequence[Target]],
) -> None:
    """Fill each target with its tensor's bytes, every one verified against the digest recorded at commit.

    directory  of the checkpoint inside the run directory, `step-40`
    records    of the tensors to read, by full name; targets  where they go, of equal dtype: all of a tensor or parts

    Raises DamagedCheckpoint for the first block, in the order of files and bytes, that does not match; targets are then
    partly filled. When this returns, or raises, no thread writes to a target any more.
    """
    by_file: dict[int, list[_Wanted]] = {}
    pieces = Pieces(store, directory, manifest)
    for name, parts in targets.items():
        for target in parts:
            for piece in pieces.overlapping(name, records[name], target.box):
                by_file.setdefault(piece.file, []).extend(_wanted(records[name], piece, target))
    # Kernels that still write to targets, their initialisation say, would come after what is read.
    cuda.wait_for_devices(target.tensor for parts in targets.values() for target in parts)
    with ThreadPoolExecutor(READERS, thread_name_prefix="unbroken-reader") as pool:
        for index, wanted in sorted(by_file.items()):
            file = manifest.files[index]
            source = DataFile(store, directory, file)
            try:
                _read_file(pool, source, _runs(sorted(wanted, key=lambda item: item.begin), file))
            finally:
                source.close()


def _read_file(pool: ThreadPoolExecutor, source: DataFile, runs: Iterator[_Run]) -> None:
    """Read runs by all threads of a pool. When this returns, or raises, none of them reads any more."""
    pending: deque[Future[None]] = deque()
    try:
        for run in runs:
            pending.append(pool.submit(_read, source, run))
            if len(pending) == 2 * READERS:
                pending.popleft().result()
                faultpoints.reach("reading")
        while pending:
            pending.popleft().result()
            faultpoints.reach("reading")
    finally:
        for future in pending:
            future.cancel()
        wait(pending)


def _read(source: DataFile, run: _Run) -> None:
    if run.crossings:
        _read_to_devices(source, run)
    else:
        source.read(run.landings)
    for item, memory in run.scattered:
        flat = torch.frombuffer(memory, dtype=torch.uint8).view(item.place.dtype)
        item.place.copy_(flat.as_strided(item.place.shape, item.strides))


def _read_to_devices(source: DataFile, run: _Run) -> None:
    """The same with parts that go to devices, which they reach when they are verified."""
    lengths = [crossing.place.numel() for crossing in run.crossings]
    bounces = torch.split(cuda.pinned_bytes(sum(lengths)), lengths)
    pairs = zip(run.crossings, bounces, strict=True)
    arriving = [Landing(crossing.begin, bounce.numpy().data) for crossing, bounce in pairs]
    source.read(sorted([*run.landings, *arriving], key=lambda landing: landing.begin))
    cuda.fill([crossing.place for crossing in run.crossings], bounces)


def _wanted(record: TensorRecord, piece: PieceRecord, target: Target) -> Iterator[_Wanted]:
    """What of a piece is wanted, cut into parts that are not too large to be held in memory."""
    if piece.box is None and list(target.tensor.shape) == record.shape:
        memory = _memory_of(target.tensor, piece.end - piece.begin)
        if memory is not None:  # nearly all of a small model's tensors: nothing to work out
            if memory:
                yield _Wanted(piece.begin, piece.end, memory, target.tensor, ())
            return
        on_device = _bytes_on_device(target.tensor, piece.end - piece.begin)
        if on_device is not None:
            if on_device.numel():
                yield _Wanted(piece.begin, piece.end, None, target.tensor, (), on_device)
            return
    held = box_of(piece, tuple(record.shape))
    dtype = dtype_of(record.dtype)
    shared = intersect(held, target.box)
    for part in _cut(shared, held, READ_BYTES // dtype.itemsize) if shared is not None else ():
        first, last = offset_in(held, part.begin), offset_in(held, tuple(end - 1 for end in part.end))
        begin, end = (piece.begin + dtype.itemsize * offset for offset in (first, last + 1))
        place = target.tensor if part == target.box else target.tensor[part.slices(target.box)]
        strides = tuple(math.prod(held.shape[at + 1 :]) for at in range(len(held.shape)))
        memory, on_device = _memory_of(place, end - begin), _bytes_on_device(place, end - begin)
        yield _Wanted(begin, end, memory, place, strides, on_device)


def _cut(part: Box, held: Box, most: int) -> Iterator[Box]:
    """`part` cut along its first long dimension until no cut spans more than `most` elements of `held`."""
    span = offset_in(held, tuple(end - 1 for end in part.end)) - offset_in(held, part.begin) + 1
    dimension = next((at for at, length in enumerate(part.shape) if length > 1), None)
    if span <= most or dimension is None:
        yield part
        return
    middle = part.begin[dimension] + part.shape[dimension] // 2
    end, begin = list(part.end), list(part.begin)
    end[dimension] = begin[dimension] = middle
    yield from _cut(Box(part.begin, tuple(end)), held, most)
    yield from _cut(Box(tuple(begin), part.end), held, most)


def _runs(wanted: Sequence[_Wanted], file: FileRecord) -> Iterator[_Run]:
    """What to read together, in the order of the bytes: parts that lie near each other, up to about RUN_BYTES.

    wanted  sorted by their first byte
    """
    length = max(RUN_BYTES, file.block_bytes)
    run = _Run()
    for item in wanted:
        begin, scattered = item.begin, item.memory is None and item.on_device is None
        place = item.on_device if item.memory is None else item.memory
        place = memoryview(bytearray(item.end - item.begin)) if place is None else place
        while begin < item.end:
            window = (run.begin // length + 1) * length
            if not run.is_empty and (begin >= window or not run.end <= begin <= run.end + GAP_BYTES):
                yield run
                run = _Run()
            if run.is_empty:
                run.begin, window = begin, (begin // length + 1) * length
            # Runs end where blocks do, so that no block is read twice. What is copied afterwards stays in one run.
            end = item.end if scattered else min(item.end, window)
            run.add(begin, place[begin - item.begin : end - item.begin])
            run.end = begin = end
        if isinstance(place, memoryview) and scattered:
            run.scattered.append((item, place))
    if not run.is_empty:
        yield run


def _memory_of(place: torch.Tensor, nbytes: int) -> memoryview | None:
    """The bytes of a tensor, if they lie there as in a file that has `nbytes` of it; None if not.

    Valid while the tensor is. By its address: the way through a NumPy array costs five times as much, which shows if
    there are thousands.
    """
    if place.device.type != "cpu" or not place.is_contiguous() or place.is_conj() or place.is_neg():
        return None
    if nbytes != place.numel() * place.element_size():
        return None
    return memoryview((ctypes.c_ubyte * nbytes).from_address(place.data_ptr())).cast("B")


def _bytes_on_device(place: torch.Tensor, nbytes: int) -> torch.Tensor | None:
    """The same of a tensor on a CUDA device, flat."""
    if not cuda.can_cross(place) or nbytes != place.numel() * place.element_size():
        return None
    return place.detach().view(-1).view(torch.uint8)
