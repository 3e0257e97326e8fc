"""The manifest: what a checkpoint holds and where, and the proof that it is whole.

A checkpoint exists if and only if its manifest exists and is whole (invariant 1). On disk it is one JSON object
`{"format": "unbroken", "version": 1, "digest": "…", "body": {…}}`; the digest covers the bytes of `body`, so that a
flipped bit in a learning rate is found like one in a tensor. `docs/format.md` describes every field.

A manifest comes from a directory that anyone may have written: `decode` checks every number and name that is used
later to read or to allocate. No code runs and no path outside the run directory is touched (invariant 10).
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from unbroken.errors import DamagedCheckpoint, NewerFormat
from unbroken.image.digest import HEX_CHARS, digest_text
from unbroken.image.header import dtype_of
from unbroken.layout.boxes import Box, intersect, whole

FORMAT = "unbroken"
VERSION = 1
MANIFEST = "manifest.json"
MOST_BYTES = 1 << 30
"""A manifest larger than this is refused before it is read."""

_FILE_NAME = re.compile(r"g\d{4,}-rank-\d{5,}(?:-\d+)?\.safetensors")
_STEP_DIRECTORY = re.compile(r"step-(\d+)(?:\.(\d+))?")


class PieceRecord(msgspec.Struct, frozen=True):
    """Where one part of a tensor lies."""

    file: int
    """Index into `Manifest.files`."""
    begin: int
    """First byte, counted from the start of the file."""
    end: int
    """One past the last byte."""
    box: list[tuple[int, int]] | None = None
    """Which part, as (begin, end) per dimension; null for the whole tensor. Row-major, no padding."""


class TensorRecord(msgspec.Struct, frozen=True):
    """One tensor."""

    dtype: str
    """torch's name, e.g. `float32`."""
    shape: list[int]
    """Of the whole tensor."""
    pieces: list[PieceRecord]
    """Together they cover the tensor exactly once."""


class FileRecord(msgspec.Struct, frozen=True):
    """One file of the checkpoint, beside the manifest."""

    name: str
    size: int
    """Bytes."""
    block_bytes: int
    """Length of the blocks that `blocks` has digests of; the last one may be shorter."""
    blocks: str
    """xxh3-64 of each block, 16 hex digits each, one after another."""


class ValueRecord(msgspec.Struct, frozen=True):
    """Values of one registered name that some ranks share."""

    ranks: list[tuple[int, int]]
    """Ranges (first, last) of ranks that have exactly this value, both ends included."""
    value: Any
    """Typed JSON (state/codec.py)."""


class Origin(msgspec.Struct, frozen=True):
    """A point on the lineage: a step of a generation."""

    generation: int
    step: int
    micro_step: int = 0


class Manifest(msgspec.Struct, frozen=True):
    """The commit record of one checkpoint."""

    step: int
    """Optimizer steps done."""
    micro_step: int
    """Micro-steps done inside the accumulation window that follows; 0 right after an optimizer step."""
    generation: int
    """The start of the job that wrote it."""
    lineage: list[Origin]
    """Where that generation came from, nearest first: it restored lineage[0], that one restored lineage[1], …"""
    world_size: int
    saved_at: str
    """UTC, ISO 8601. For people; nothing is ordered by it."""
    files: list[FileRecord]
    tensors: dict[str, TensorRecord]
    """What all ranks share, by full name."""
    rank_tensors: list[dict[str, TensorRecord]]
    """What each rank has of its own, by rank and full name."""
    values: dict[str, list[ValueRecord]]
    """Everything that is no tensor, by registered name."""
    environment: dict[str, Any] = {}
    """Versions and settings that can change bits."""
    timings: dict[str, float] = {}
    """Seconds, by phase; for people."""

    @property
    def where(self) -> Origin:
        """The point on the lineage that this checkpoint is."""
        return Origin(self.generation, self.step, self.micro_step)

    def values_of(self, rank: int) -> dict[str, Any]:
        """The values that `rank` saved, by registered name."""
        return {
            name: record.value
            for name, records in self.values.items()
            for record in records
            if any(first <= rank <= last for first, last in record.ranks)
        }

    def tensors_of(self, rank: int) -> dict[str, TensorRecord]:
        """The tensors that make up the state of `rank`: the shared ones and its own."""
        return {**self.tensors, **self.rank_tensors[rank]}


class _Envelope(msgspec.Struct):
    format: str
    version: int
    digest: str
    body: msgspec.Raw


def step_directory(step: int, micro_step: int) -> str:
    """`step-40`, or `step-40.1` one micro-step into the accumulation window after it."""
    return f"step-{step}.{micro_step}" if micro_step else f"step-{step}"


def parse_step_directory(name: str) -> tuple[int, int] | None:
    """(step, micro-step) of a directory name, or None if it is none of ours (`step-040` and `best` are not)."""
    match = _STEP_DIRECTORY.fullmatch(name)
    if match is None:
        return None
    step, micro_step = int(match[1]), int(match[2] or 0)
    return (step, micro_step) if step_directory(step, micro_step) == name else None


def seal(body: bytes) -> bytes:
    """A record's bytes on disk: its body in an envelope with format, version and digest."""
    return msgspec.json.encode(_Envelope(FORMAT, VERSION, digest_text(body), msgspec.Raw(body)))


def unseal(data: bytes, what: str) -> bytes:
    """The body of a record. Raises DamagedCheckpoint or NewerFormat; `what` names the record in their text."""
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{what} is cut or damaged: {error}") from error
    if envelope.format != FORMAT:
        raise DamagedCheckpoint(f"{what} is no record of unbroken")
    if envelope.version > VERSION:
        raise NewerFormat(
            f"{what} has format version {envelope.version}, written by a newer unbroken; "
            f"this one reads up to {VERSION}: upgrade it (pip install -U unbroken)"
        )
    body = bytes(envelope.body)
    if digest_text(body) != envelope.digest:
        raise DamagedCheckpoint(f"{what} does not match its digest")
    return body


def encode(manifest: Manifest) -> bytes:
    """The bytes of a manifest.json."""
    return seal(msgspec.json.encode(manifest))


def decode(data: bytes, what: str) -> Manifest:
    """Read and check a manifest. `what` names it in errors (`step-40/manifest.json`).

    Raises DamagedCheckpoint if it is cut, altered, or says anything that cannot be; NewerFormat.
    """
    body = unseal(data, what)
    try:
        manifest = msgspec.json.decode(body, type=Manifest)
        _check(manifest)
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError) as error:
        raise DamagedCheckpoint(f"{what} cannot be used: {error}") from error
    return manifest


def _check(manifest: Manifest) -> None:
    """Raise ValueError for a manifest that no save writes. One pass over everything that is later trusted."""
    if min(manifest.step, manifest.micro_step, manifest.generation) < 0 or manifest.world_size < 1:
        raise ValueError("step, generation or world size is out of range")
    if len(manifest.rank_tensors) != manifest.world_size:
        raise ValueError(f"{len(manifest.rank_tensors)} ranks' tensors for a world size of {manifest.world_size}")
    for file in manifest.files:
        _check_file(file)
    if len({file.name for file in manifest.files}) != len(manifest.files):
        raise ValueError("a file is listed twice")
    for tensors in (manifest.tensors, *manifest.rank_tensors):
        for name, tensor in tensors.items():
            _check_tensor(name, tensor, manifest.files)


def _check_file(file: FileRecord) -> None:
    if not _FILE_NAME.fullmatch(file.name):
        raise ValueError(f"{file.name!r} is no name of a checkpoint's file")
    if file.size < 0 or file.block_bytes < 1:
        raise ValueError(f"{file.name} has an impossible size")
    if len(file.blocks) != HEX_CHARS * -(-file.size // file.block_bytes):
        raise ValueError(f"{file.name} has {file.size} bytes but digests for another number of blocks")


def _check_tensor(name: str, tensor: TensorRecord, files: list[FileRecord]) -> None:
    itemsize = dtype_of(tensor.dtype).itemsize
    shape = tuple(tensor.shape)
    if any(length < 0 for length in shape):
        raise ValueError(f"tensor {name!r} has a negative length")
    covered = 0
    for piece in tensor.pieces:
        box = box_of(piece, shape)
        if not 0 <= piece.file < len(files) or not 0 <= piece.begin <= piece.end <= files[piece.file].size:
            raise ValueError(f"a piece of tensor {name!r} lies outside its file")
        if piece.end - piece.begin != box.numel * itemsize:
            raise ValueError(f"a piece of tensor {name!r} has {piece.end - piece.begin} bytes for {box.numel} elements")
        covered += box.numel
    if covered != whole(shape).numel or _overlapping(tensor, shape):
        raise ValueError(f"the pieces of tensor {name!r} do not cover it exactly once")


def _overlapping(tensor: TensorRecord, shape: tuple[int, ...]) -> bool:
    """True if two pieces share an element. Cheap for the row-wise cuts we write; exact for any boxes."""
    boxes = sorted((box_of(piece, shape) for piece in tensor.pieces), key=lambda box: box.begin)
    for index, box in enumerate(boxes):
        for other in boxes[index + 1 :]:
            if other.begin and box.end and other.begin[0] >= box.end[0]:
                break
            if intersect(box, other) is not None:
                return True
    return False


def box_of(piece: PieceRecord, shape: tuple[int, ...]) -> Box:
    """The part of a tensor of `shape` that a piece holds. Raises ValueError if it lies outside the tensor."""
    if piece.box is None:
        return whole(shape)
    if len(piece.box) != len(shape) or any(
        not 0 <= begin <= end <= length for (begin, end), length in zip(piece.box, shape, strict=True)
    ):
        raise ValueError(f"box {piece.box} lies outside a tensor of shape {list(shape)}")
    return Box(tuple(begin for begin, _ in piece.box), tuple(end for _, end in piece.box))
