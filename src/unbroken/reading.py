"""Bytes of a checkpoint -> live tensors, every one verified on the way (invariant 2).

Only what is wanted is read, in whole blocks, since digests are per block. Nothing here decides which checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from unbroken import faultpoints
from unbroken.image.header import dtype_of
from unbroken.layout.boxes import Box, intersect, offset_in, whole
from unbroken.layout.spread import Spread
from unbroken.manifest import FileRecord, Manifest, PieceRecord, TensorRecord, box_of
from unbroken.pieces import Pieces, read_verified
from unbroken.snapshot import held_boxes
from unbroken.store.local import LocalStore

READ_BYTES = 64 << 20
"""Most bytes of one file that are held in memory at once while restoring, a block more or less."""
GAP_BYTES = 1 << 20
"""What lies between two wanted parts is read along with them up to this length."""


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

    target: Target
    part: Box
    """What piece and target share."""
    held: Box
    """The piece's box."""
    begin: int
    """First byte of `part` in the file. Between its first and last byte others may lie."""
    end: int
    """One past its last byte."""
    dtype: torch.dtype


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

    Raises DamagedCheckpoint at the first block that does not match; targets are then partly filled.
    """
    by_file: dict[int, list[_Wanted]] = {}
    pieces = Pieces(store, directory, manifest)
    for name, parts in targets.items():
        for target in parts:
            for piece in pieces.overlapping(name, records[name], target.box):
                by_file.setdefault(piece.file, []).extend(_wanted(records[name], piece, target))
    for index, wanted in sorted(by_file.items()):
        file = manifest.files[index]
        for group in _group(sorted(wanted, key=lambda item: item.begin)):
            _read_group(store, directory, file, group)
            faultpoints.reach("reading")


def _wanted(record: TensorRecord, piece: PieceRecord, target: Target) -> Iterator[_Wanted]:
    """What of a piece is wanted, cut into parts that are not too large to be held in memory."""
    held = box_of(piece, tuple(record.shape))
    dtype = dtype_of(record.dtype)
    shared = intersect(held, target.box)
    for part in _cut(shared, held, READ_BYTES // dtype.itemsize) if shared is not None else ():
        first, last = offset_in(held, part.begin), offset_in(held, tuple(end - 1 for end in part.end))
        begin, end = (piece.begin + dtype.itemsize * offset for offset in (first, last + 1))
        yield _Wanted(target, part, held, begin, end, dtype)


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


def _group(wanted: list[_Wanted]) -> Iterator[list[_Wanted]]:
    """Runs of parts that lie near each other and are read together."""
    group: list[_Wanted] = []
    for item in wanted:
        if group and (item.end - group[0].begin > READ_BYTES or item.begin - group[-1].end > GAP_BYTES):
            yield group
            group = []
        group.append(item)
    if group:
        yield group


def _read_group(store: LocalStore, directory: str, file: FileRecord, group: list[_Wanted]) -> None:
    begin, end = group[0].begin, max(item.end for item in group)
    first = begin // file.block_bytes * file.block_bytes
    data = read_verified(store, directory, file, first, min(file.size, -(-end // file.block_bytes) * file.block_bytes))
    flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    for item in group:
        stored = flat[item.begin - first : item.end - first]
        if (item.begin - first) % item.dtype.itemsize:
            stored = stored.clone()  # another writer may have aligned its tensors differently
        strides = [math.prod(item.held.shape[at + 1 :]) for at in range(len(item.held.shape))]
        part = stored.view(item.dtype).as_strided(item.part.shape, strides)
        item.target.tensor[item.part.slices(item.target.box)].copy_(part)
