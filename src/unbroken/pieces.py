"""Where the parts of a checkpoint's tensors lie: in which file, at which bytes.

A manifest lists the pieces of a tensor, or, where thousands of ranks hold one each, only how meshes cut it. Then a
piece is found by its name in the header of its rank's file, which is verified like any other bytes (invariant 2).
What is looked at grows with the pieces that are wanted, not with the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from unbroken.blocks import read_verified
from unbroken.errors import DamagedCheckpoint
from unbroken.image.header import LENGTH_BYTES, MOST_HEADER_BYTES, bytes_of_element, dtype_of, stored_form
from unbroken.layout.boxes import Box, name_of_part, whole
from unbroken.layout.spread import Cuts, Mesh, overlapping
from unbroken.manifest import FileRecord, Manifest, PieceRecord, TensorRecord, cuts_of, is_kept, mesh_of, rank_of_file
from unbroken.store.local import LocalStore


class MisleadingHeader(DamagedCheckpoint):
    """A header whose bytes are whole, and which says what cannot be so."""


class Place(msgspec.Struct, frozen=True):
    """One tensor in the header of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    """As stored (`image.header.stored_form`)."""
    data_offsets: tuple[int, int]
    """First byte and one past the last, counted from the start of the file."""


@dataclass(slots=True)
class Pieces:
    """The pieces of one checkpoint. Used by one thread."""

    store: LocalStore
    directory: str
    """Of the checkpoint inside the run directory."""
    manifest: Manifest
    _meshes: dict[int, Mesh] = field(default_factory=dict)
    _files: dict[int, int] = field(default_factory=dict)
    """Index of a file by its rank."""
    _headers: dict[int, dict[str, Place]] = field(default_factory=dict)
    """By file and name."""

    def overlapping(self, name: str, record: TensorRecord, box: Box) -> Iterator[PieceRecord]:
        """Pieces of a tensor, at least all those that share elements with `box`. Raises DamagedCheckpoint."""
        if record.cuts is None:
            yield from record.pieces
            return
        for held, rank in overlapping(self.cuts(record), box):
            yield self.find(name, record, held, self.file_of(rank))

    def cuts(self, record: TensorRecord) -> Cuts:
        """How meshes cut a tensor whose pieces are not listed."""
        assert record.cuts is not None
        index = record.cuts.mesh
        if index not in self._meshes:
            self._meshes[index] = mesh_of(self.manifest.meshes[index])
        return cuts_of(record, self._meshes[index])

    def file_of(self, rank: int) -> int:
        """Index of a rank's file. Raises DamagedCheckpoint if the manifest has none."""
        if not self._files:
            # What does not change is listed piece by piece, wherever it lies.
            files = [(index, file.name) for index, file in enumerate(self.manifest.files) if not is_kept(file.name)]
            self._files = {rank_of_file(name): index for index, name in files}
        if rank not in self._files:
            raise DamagedCheckpoint(f"{self.directory} has no file of rank {rank}, which holds parts of its tensors")
        return self._files[rank]

    def find(self, name: str, record: TensorRecord, held: Box, file: int) -> PieceRecord:
        """The piece that a file has of the box `held` of a tensor. Raises DamagedCheckpoint, or MisleadingHeader."""
        stored_as = name_of_part(name, held, tuple(record.shape))
        place = self._header(file).get(stored_as)
        path = f"{self.directory}/{self.manifest.files[file].name}"
        if place is None:
            raise MisleadingHeader(f"{path} has no tensor {stored_as} in its header")
        dtype, shape = stored_form(dtype_of(record.dtype), held.shape)
        if (place.dtype, list(place.shape)) != (dtype, shape):
            said, due = f"{place.dtype} {list(place.shape)}", f"{dtype} {shape}"
            raise MisleadingHeader(f"{path} says that {stored_as} is {said}, where the manifest has {due}")
        box = None if held == whole(tuple(record.shape)) else list(zip(held.begin, held.end, strict=True))
        return PieceRecord(file, *place.data_offsets, box)

    def _header(self, file: int) -> dict[str, Place]:
        if file not in self._headers:
            self._headers[file] = read_header(self.store, self.directory, self.manifest.files[file])
        return self._headers[file]


def read_header(store: LocalStore, directory: str, file: FileRecord) -> dict[str, Place]:
    """What a safetensors file says of its tensors, its header verified on the way.

    Raises DamagedCheckpoint if bytes are not what was written, MisleadingHeader if they are and make no sense.
    """
    path = f"{directory}/{file.name}"
    first = read_verified(store, directory, file, 0, min(file.size, file.block_bytes))
    length = int.from_bytes(first[:LENGTH_BYTES], "little")
    data_begin = LENGTH_BYTES + length
    if len(first) < LENGTH_BYTES or data_begin > min(file.size, MOST_HEADER_BYTES):
        raise MisleadingHeader(f"{path} says that its header has {length} bytes")
    end = min(file.size, -(-data_begin // file.block_bytes) * file.block_bytes)
    text = first if end <= len(first) else read_verified(store, directory, file, 0, end)
    try:
        entries = msgspec.json.decode(text[LENGTH_BYTES:data_begin], type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        places = {name: msgspec.json.decode(raw, type=Place) for name, raw in entries.items()}
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise MisleadingHeader(f"{path} has a header that is no safetensors header: {error}") from error
    _check_places(path, places, file.size - data_begin)
    return {
        name: Place(place.dtype, place.shape, (data_begin + place.data_offsets[0], data_begin + place.data_offsets[1]))
        for name, place in places.items()
    }


def _check_places(path: str, places: Mapping[str, Place], size: int) -> None:
    """Raises MisleadingHeader unless each tensor has its own bytes, as many as it needs, of the `size` there are."""
    reached = 0
    for name, place in sorted(places.items(), key=lambda entry: entry[1].data_offsets):
        begin, end = place.data_offsets
        needed = math.prod(place.shape) * bytes_of_element(place.dtype)
        if end - begin != needed or any(length < 0 for length in place.shape):
            raise MisleadingHeader(f"{path} gives {end - begin} bytes to {name}, {place.dtype} {list(place.shape)}")
        if begin < reached or end > size:
            raise MisleadingHeader(f"{path} gives bytes {begin}-{end} to {name}, which are not its own")
        reached = end
