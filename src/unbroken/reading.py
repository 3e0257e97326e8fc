"""Bytes of a checkpoint -> live tensors, every one verified on the way (invariant 2).

Only what is wanted is read, in whole blocks, since digests are per block; and it is read straight into the tensors'
own memory, by several threads, since one does not keep a disk busy. What goes to a CUDA device is read into pinned
memory, verified there, and copied from it, by each thread for itself. Nothing here decides which checkpoint.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec
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

RUN_BYTES = 2 << 20
"""What one call reads, about: its digest is then taken from the processor's own cache. With more, loads from the disk
are slower, with less those from the page cache (604 MB: 93 ms with 1 MB, 82 with 2)."""
READ_BYTES = 4 << 20
"""Most bytes that one thread holds in memory at once while restoring, a block more or less."""
GAP_BYTES = 1 << 20
"""What lies between two wanted parts is read along with them up to this length."""
READERS = 12
"""Threads that read, also on few cores: it is the disk that is kept busy. Where eight equal stretches of a file lay, it
could be slower by a third (0.46 s for 0.33, 604 MB, cold), with twelve or sixteen it never was."""


class Target(msgspec.Struct, frozen=True):
    """Where a part of a tensor goes."""

    tensor: torch.Tensor
    """Of the box's shape."""
    box: Box
    """In the coordinates of the whole tensor."""


class _Wanted(msgspec.Struct, frozen=True):
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


@dataclass(slots=True)
class _Run:
    """What one thread reads of a file at once."""

    file: int
    """Its number in the manifest."""
    begin: int
    end: int = 0
    parts: list[tuple[_Wanted, int, int]] = field(default_factory=list)
    """What goes where, and which of its bytes in the file: from the first to one past the last."""


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
    runs = [run for file, wanted in sorted(by_file.items()) for run in _runs(file, wanted, manifest.files[file])]
    # Kernels that still write to targets, their initialisation say, would come after what is read.
    cuda.wait_for_devices(target.tensor for parts in targets.values() for target in parts)
    stop = threading.Event()
    with ThreadPoolExecutor(READERS, thread_name_prefix="unbroken-reader") as pool:
        reading = [pool.submit(_read_stretch, store, directory, manifest, part, stop) for part in _dealt(runs)]
        try:
            for stretch in reading:  # in order: of several damaged blocks the first is told
                stretch.result()
        finally:
            stop.set()


def _dealt(runs: Sequence[_Run]) -> list[list[_Run]]:
    """Neighbouring runs of about as many bytes for each thread, which are then one sequential read for the system."""
    total = sum(run.end - run.begin for run in runs)
    stretches: list[list[_Run]] = [[] for _ in range(READERS)]
    before = 0
    for run in runs:
        stretches[before * READERS // total].append(run)
        before += run.end - run.begin
    return [stretch for stretch in stretches if stretch]


def _read_stretch(
    store: LocalStore, directory: str, manifest: Manifest, runs: Sequence[_Run], stop: threading.Event
) -> None:
    """Read one after another until `stop` is set. Each thread opens files for itself: reading ahead goes by opening."""
    for file, same_file in itertools.groupby(runs, key=lambda run: run.file):
        source = DataFile(store, directory, manifest.files[file])
        try:
            for run in same_file:
                if stop.is_set():
                    return
                _read(source, run)
                faultpoints.reach("reading")
        finally:
            source.close()


def _read(source: DataFile, run: _Run) -> None:
    landings: list[Landing] = []
    crossing: list[tuple[torch.Tensor, int]] = []
    scattered: list[tuple[_Wanted, bytearray]] = []
    for item, begin, end in run.parts:
        if item.memory is not None:
            landings.append(Landing(begin, item.memory[begin - item.begin : end - item.begin]))
        elif item.on_device is not None:
            crossing.append((item.on_device[begin - item.begin : end - item.begin], begin))
        else:
            scattered.append((item, bytearray(end - begin)))
            landings.append(Landing(begin, memoryview(scattered[-1][1])))
    bounces = _bounces([place.numel() for place, _ in crossing])
    if crossing:
        landings += [Landing(at, bounce.numpy().data) for (_, at), bounce in zip(crossing, bounces, strict=True)]
        landings.sort(key=lambda landing: landing.begin)
    source.read(landings)
    if crossing:
        cuda.fill([place for place, _ in crossing], bounces)
    for item, memory in scattered:
        flat = torch.frombuffer(memory, dtype=torch.uint8).view(item.place.dtype)
        item.place.copy_(flat.as_strided(item.place.shape, item.strides))


def _bounces(lengths: list[int]) -> tuple[torch.Tensor, ...]:
    """Pinned memory that bytes for a device are read into and verified in."""
    return torch.split(cuda.pinned_bytes(sum(lengths)), lengths) if lengths else ()


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


def _runs(file: int, wanted: Sequence[_Wanted], record: FileRecord) -> Iterator[_Run]:
    """What to read together, in the order of the bytes: parts that lie near each other, up to about RUN_BYTES."""
    length = max(RUN_BYTES, record.block_bytes)
    run: _Run | None = None
    for item in sorted(wanted, key=lambda item: item.begin):
        begin, scattered = item.begin, item.memory is None and item.on_device is None
        while begin < item.end:
            if run is not None and not (
                run.end <= begin <= run.end + GAP_BYTES and begin < (run.begin // length + 1) * length
            ):
                yield run
                run = None
            if run is None:
                run = _Run(file, begin)
            # Runs end where blocks do, so that no block is read twice. What is copied afterwards stays in one run.
            run.end = item.end if scattered else min(item.end, (run.begin // length + 1) * length)
            run.parts.append((item, begin, run.end))
            begin = run.end
    if run is not None:
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
