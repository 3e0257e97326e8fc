"""The manifest: what a checkpoint holds and where, and the proof that it is whole.

A checkpoint exists if and only if its manifest exists and is whole (invariant 1). On disk it is one JSON object
`{"format": "unbroken", "version": 1, "digest": "…", "body": {…}}`; the digest covers the bytes of `body`, so that a
flipped bit in a learning rate is found like one in a tensor. `docs/format.md` describes every field.

A manifest comes from a directory that anyone may have written: `decode` checks every number and name that is used
later to read or to allocate. No code runs and no path outside the run directory is touched (invariant 10).
"""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec

from unbroken.errors import DamagedCheckpoint, NewerFormat
from unbroken.image.digest import HEX_CHARS, digest_text
from unbroken.image.header import dtype_of
from unbroken.layout.boxes import Box, intersect, whole
from unbroken.layout.spread import Cuts, Mesh

FORMAT = "unbroken"
VERSION = 3
"""The newest one. A record is written with the lowest that it needs, so that older readers can read it."""
MANIFEST = "manifest.json"
MOST_BYTES = 1 << 30
"""A manifest larger than this is refused before it is read."""
MOST_BLOCK_BYTES = 1 << 30
"""A block is read whole before any of its bytes is used."""
MOST = (1 << 63) - 1
"""The largest number of anything that is counted: larger ones overflow in what reads them."""
MOST_DIMENSIONS = 60
"""NumPy's limit is 64; torch's is not higher."""
MOST_GENERATION = 999_999_999
"""A directory that holds a higher number was not written by us, and would leave none for the next start."""

_FILE_NAME = re.compile(r"g([0-9]{4,9})-rank-([0-9]{5,19})(?:-[0-9]{1,19})?(-kept)?\.safetensors")
_STEP_DIRECTORY = re.compile(r"step-([0-9]{1,19})(?:\.([0-9]{1,19}))?")


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


class MeshRecord(msgspec.Struct, frozen=True):
    """Ranks in an n-dimensional order."""

    shape: list[int]
    ranks: list[tuple[int, int]]
    """Runs (first, last) of ascending ranks, both ends included; one after another, the ranks in row-major order."""


class CutsRecord(msgspec.Struct, frozen=True):
    """How a mesh cuts a tensor into one piece for each of its ranks (layout/spread.py)."""

    mesh: int
    """Index into `Manifest.meshes`."""
    order: list[tuple[int, int]]
    """(mesh dimension, tensor dimension): cut after cut, each into ceil(length / parts), the last ones shorter."""


class TensorRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One tensor."""

    dtype: str
    """torch's name, e.g. `float32`."""
    shape: list[int]
    """Of the whole tensor."""
    pieces: list[PieceRecord]
    """Together they cover the tensor exactly once; empty if `cuts` tells them."""
    cuts: CutsRecord | None = None
    """Where there are too many pieces to list them (format version 2): each lies in the file of its rank, under its
    name there."""


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
    meshes: list[MeshRecord] = []
    """What tensors are cut by (format version 2)."""
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
    if max(step, micro_step) > MOST or step_directory(step, micro_step) != name:
        return None
    return step, micro_step


def seal(body: bytes, version: int = 1) -> bytes:
    """A record's bytes on disk: its body in an envelope with format, version and digest."""
    return msgspec.json.encode(_Envelope(FORMAT, version, digest_text(body), msgspec.Raw(body)))


def unseal(data: bytes, what: str, newest: int = 1) -> bytes:
    """The body of a record whose format version is at most `newest`; `what` names the record in errors.

    Raises DamagedCheckpoint or NewerFormat.
    """
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{what} is cut or damaged: {error}") from error
    if envelope.format != FORMAT:
        raise DamagedCheckpoint(f"{what} is no record of unbroken")
    if envelope.version > newest:
        raise NewerFormat(
            f"{what} has format version {envelope.version}, written by a newer unbroken; "
            f"this one reads up to {newest}: upgrade it (pip install -U unbroken)"
        )
    body = bytes(envelope.body)
    if digest_text(body) != envelope.digest:
        raise DamagedCheckpoint(f"{what} does not match its digest")
    # The digest covers the body only: what stands around it must be exactly what `seal` writes.
    if envelope.version < 1 or seal(body, envelope.version) != data:
        raise DamagedCheckpoint(f"{what} was changed outside of what its digest covers")
    return body


def encode(manifest: Manifest) -> bytes:
    """The bytes of a manifest.json."""
    return seal(msgspec.json.encode(manifest), version_of(manifest))


def version_of(manifest: Manifest) -> int:
    """The lowest format version that can say what a manifest holds."""
    if any(is_kept(file.name) for file in manifest.files):
        return 3
    return 2 if manifest.meshes else 1


def decode(data: bytes, what: str) -> Manifest:
    """Read and check a manifest. `what` names it in errors (`step-40/manifest.json`).

    Raises DamagedCheckpoint if it is cut, altered, or says anything that cannot be; NewerFormat.
    """
    body = unseal(data, what, VERSION)
    try:
        manifest = msgspec.json.decode(body, type=Manifest)
        _check(manifest)
        if seal(body, version_of(manifest)) != data:
            raise ValueError("it says another format version than what it holds has")
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError) as error:
        raise DamagedCheckpoint(f"{what} cannot be used: {error}") from error
    return manifest


def _check(manifest: Manifest) -> None:
    """Raise ValueError for a manifest that no save writes. One pass over everything that is later trusted."""
    counts = (manifest.step, manifest.micro_step, manifest.generation, manifest.world_size)
    if min(counts) < 0 or max(counts) > MOST or manifest.world_size < 1 or manifest.generation > MOST_GENERATION:
        raise ValueError("step, generation or world size is out of range")
    check_lineage(manifest.generation, manifest.lineage)
    if len(manifest.rank_tensors) != manifest.world_size:
        raise ValueError(f"{len(manifest.rank_tensors)} ranks' tensors for a world size of {manifest.world_size}")
    for file in manifest.files:
        _check_file(file, manifest)
    if len({file.name for file in manifest.files}) != len(manifest.files):
        raise ValueError("a file is listed twice")
    for mesh in manifest.meshes:
        _check_mesh(mesh, manifest.world_size)
    for tensors in (manifest.tensors, *manifest.rank_tensors):
        for name, tensor in tensors.items():
            _check_tensor(name, tensor, manifest)
            if tensor.cuts is not None and tensors is not manifest.tensors:
                raise ValueError(f"tensor {name!r} is one rank's own, and cut")


def check_lineage(generation: int, lineage: list[Origin]) -> None:
    """Raise ValueError for a lineage that no generation of this number has: forebears are older, nearest first."""
    younger = generation
    for origin in lineage:
        if not 0 <= origin.generation < younger or min(origin.step, origin.micro_step) < 0:
            raise ValueError(f"generation {generation} cannot come from generation {origin.generation}")
        if max(origin.step, origin.micro_step) > MOST:
            raise ValueError(f"generation {generation} comes from a step that is out of range")
        younger = origin.generation


def _check_file(file: FileRecord, manifest: Manifest) -> None:
    match = _FILE_NAME.fullmatch(file.name)
    if match is None:
        raise ValueError(f"{file.name[:80]!r} is no name of a checkpoint's file")
    if int(match[1]) != manifest.generation or int(match[2]) >= manifest.world_size:
        raise ValueError(f"{file.name} is no file of generation {manifest.generation} and {manifest.world_size} ranks")
    if not 0 <= file.size <= MOST or not 1 <= file.block_bytes <= MOST_BLOCK_BYTES:
        raise ValueError(f"{file.name} has an impossible size")
    if len(file.blocks) != HEX_CHARS * -(-file.size // file.block_bytes):
        raise ValueError(f"{file.name} has {file.size} bytes but digests for another number of blocks")


def _check_mesh(mesh: MeshRecord, world_size: int) -> None:
    """A mesh must be small enough to be unfolded: at most each rank once."""
    if len(mesh.shape) > MOST_DIMENSIONS or any(not 0 < length <= world_size for length in mesh.shape):
        raise ValueError(f"a mesh of shape {mesh.shape[:MOST_DIMENSIONS]} has no place in {world_size} ranks")
    last_of_all = -1
    for first, last in sorted(mesh.ranks):
        if not last_of_all < first <= last < world_size:
            raise ValueError(f"a mesh holds ranks {first}-{last} of {world_size} twice, or they are none")
        last_of_all = last
    if sum(last - first + 1 for first, last in mesh.ranks) != math.prod(mesh.shape):
        raise ValueError(f"a mesh of shape {mesh.shape} has another number of ranks")


def _check_cuts(name: str, cuts: CutsRecord, tensor: TensorRecord, meshes: list[MeshRecord]) -> None:
    if not 0 <= cuts.mesh < len(meshes) or tensor.pieces:
        raise ValueError(f"tensor {name!r} is cut by no mesh, or has pieces besides")
    shape = meshes[cuts.mesh].shape
    cutting = [mesh_dimension for mesh_dimension, _ in cuts.order]
    uncut = [length for at, length in enumerate(shape) if at not in cutting]
    if len(set(cutting)) != len(cutting) or not set(cutting) <= set(range(len(shape))) or math.prod(uncut) != 1:
        raise ValueError(f"tensor {name!r} is not cut by each dimension of its mesh")
    if any(not 0 <= dimension < len(tensor.shape) for _, dimension in cuts.order):
        raise ValueError(f"tensor {name!r} is cut along a dimension that it does not have")


def _check_tensor(name: str, tensor: TensorRecord, manifest: Manifest) -> None:
    files = manifest.files
    itemsize = dtype_of(tensor.dtype).itemsize
    shape = tuple(tensor.shape)
    if len(shape) > MOST_DIMENSIONS or (shape and min(shape) < 0):
        raise ValueError(f"tensor {name!r} has a negative length or {len(shape)} dimensions")
    # An empty tensor has no bytes to bound its other lengths by.
    if math.prod([length or 1 for length in shape]) * itemsize > MOST:
        raise ValueError(f"tensor {name!r} is too large for any machine")
    if tensor.cuts is not None:
        _check_cuts(name, tensor.cuts, tensor, manifest.meshes)
        return
    if len(tensor.pieces) == 1 and tensor.pieces[0].box is None:
        _check_piece(name, tensor.pieces[0], math.prod(shape), itemsize, files)
        return
    covered = 0
    for piece in tensor.pieces:
        box = box_of(piece, shape)
        _check_piece(name, piece, box.numel, itemsize, files)
        covered += box.numel
    if covered != whole(shape).numel or _overlapping(tensor, shape):
        raise ValueError(f"the pieces of tensor {name!r} do not cover it exactly once")


def _check_piece(name: str, piece: PieceRecord, numel: int, itemsize: int, files: list[FileRecord]) -> None:
    if not 0 <= piece.file < len(files) or not 0 <= piece.begin <= piece.end <= files[piece.file].size:
        raise ValueError(f"a piece of tensor {name!r} lies outside its file")
    if piece.end - piece.begin != numel * itemsize:
        raise ValueError(f"a piece of tensor {name!r} has {piece.end - piece.begin} bytes for {numel} elements")


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


def mesh_of(record: MeshRecord) -> Mesh:
    """A mesh with each of its ranks."""
    return Mesh(tuple(record.shape), tuple(rank for first, last in record.ranks for rank in range(first, last + 1)))


def record_of(mesh: Mesh) -> MeshRecord:
    """The inverse of `mesh_of`."""
    runs: list[tuple[int, int]] = []
    for rank in mesh.ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    return MeshRecord(list(mesh.shape), runs)


def cuts_of(tensor: TensorRecord, mesh: Mesh) -> Cuts:
    """How `mesh`, which is the one that its record names, cuts a tensor."""
    assert tensor.cuts is not None
    return Cuts(tuple(tensor.shape), mesh, tuple(tensor.cuts.order))


def is_kept(name: str) -> bool:
    """True for a file of tensors that do not change, which several checkpoints have (format version 3)."""
    return name.endswith("-kept.safetensors")


def rank_of_file(name: str) -> int:
    """Which rank wrote a file of a checkpoint that was checked."""
    match = _FILE_NAME.fullmatch(name)
    assert match is not None
    return int(match[2])
