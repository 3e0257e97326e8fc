"""Bytes of a checkpoint -> live tensors, every one verified on the way (invariant 2).

Only what is wanted is read, in whole blocks, since digests are per block. Nothing here decides which checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from unbroken import faultpoints
from unbroken.errors import DamagedCheckpoint
from unbroken.image.digest import HEX_CHARS, digest_block
from unbroken.image.header import dtype_of
from unbroken.layout.boxes import whole
from unbroken.manifest import FileRecord, Manifest, PieceRecord, TensorRecord, box_of
from unbroken.store.local import LocalStore

READ_BYTES = 64 << 20
"""Most bytes of one file that are held in memory at once while restoring, unless one tensor is larger."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One piece to be read into its place."""

    target: torch.Tensor
    record: TensorRecord
    piece: PieceRecord


@torch.no_grad()
def read_tensors(
    store: LocalStore,
    directory: str,
    manifest: Manifest,
    records: Mapping[str, TensorRecord],
    targets: Mapping[str, torch.Tensor],
) -> None:
    """Fill each target with its tensor's bytes, every one verified against the digest recorded at commit.

    directory  of the checkpoint inside the run directory, `step-40`
    records    of the tensors to read, by full name; targets  where each goes, of equal shape and dtype

    Raises DamagedCheckpoint at the first block that does not match; targets are then partly filled.
    """
    by_file: dict[int, list[_Wanted]] = {}
    for name, target in targets.items():
        for piece in records[name].pieces:
            by_file.setdefault(piece.file, []).append(_Wanted(target, records[name], piece))
    for index, wanted in sorted(by_file.items()):
        file = manifest.files[index]
        for group in _group(sorted(wanted, key=lambda item: item.piece.begin)):
            _read_group(store, directory, file, group)
            faultpoints.reach("reading")


def _group(wanted: list[_Wanted]) -> Iterator[list[_Wanted]]:
    """Runs of neighbouring pieces that are read together."""
    group: list[_Wanted] = []
    for item in wanted:
        if group and item.piece.end - group[0].piece.begin > READ_BYTES:
            yield group
            group = []
        group.append(item)
    if group:
        yield group


def _read_group(store: LocalStore, directory: str, file: FileRecord, group: list[_Wanted]) -> None:
    begin, end = group[0].piece.begin, max(item.piece.end for item in group)
    first = begin // file.block_bytes * file.block_bytes
    data = read_verified(store, directory, file, first, min(file.size, -(-end // file.block_bytes) * file.block_bytes))
    flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    for item in group:
        shape = tuple(item.record.shape)
        box = box_of(item.piece, shape)
        stored = flat[item.piece.begin - first : item.piece.end - first]
        dtype = dtype_of(item.record.dtype)
        if (item.piece.begin - first) % dtype.itemsize:
            stored = stored.clone()  # another writer may have aligned its tensors differently
        item.target[box.slices(whole(shape))].copy_(stored.view(dtype).view(box.shape))


def read_verified(store: LocalStore, directory: str, file: FileRecord, begin: int, end: int) -> bytearray:
    """Bytes `begin` to `end` of a file, which must begin on a block and end on one or with the file.

    Raises DamagedCheckpoint, naming file and bytes (invariant 2).
    """
    name = f"{directory}/{file.name}"
    data = bytearray(end - begin)
    try:
        store.read_into(name, begin, memoryview(data))
    except (OSError, ValueError, EOFError) as error:
        raise DamagedCheckpoint(f"{name} cannot be read: {error}") from error
    for offset in range(0, len(data), file.block_bytes):
        block = (begin + offset) // file.block_bytes
        expected = file.blocks[block * HEX_CHARS : (block + 1) * HEX_CHARS]
        content = memoryview(data)[offset : offset + file.block_bytes]
        if digest_block(content) != expected:
            last = begin + offset + len(content)
            raise DamagedCheckpoint(f"{name}, bytes {begin + offset}-{last}, do not match their digest")
    return data
