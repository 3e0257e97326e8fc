"""A directory of `torch.distributed.checkpoint` as a tree of values and tensors that are not read yet.

Read without torch's own reader, which runs whatever its metadata and its values say (both are pickles): the metadata is
read as data (`inert.py`), values and tensors weights-only. Names of files lead nowhere outside the directory.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unbroken.errors import DamagedCheckpoint, UsageError
from unbroken.exchange.incoming import IncomingPart, IncomingTensor
from unbroken.exchange.inert import Inert, read_inert
from unbroken.exchange.torch_files import load_stream
from unbroken.image.header import dtype_of
from unbroken.layout.boxes import Box, whole
from unbroken.state.codec import MOST_LEVELS
from unbroken.store.local import LocalStore

METADATA = ".metadata"
MOST_METADATA_BYTES = 1 << 30
BUFFER_BYTES = 1 << 20
_MODULE = "torch.distributed.checkpoint.metadata."


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Where the source has one item."""

    file: str
    begin: int
    length: int
    """Bytes."""


class _Slice(io.RawIOBase):
    """A part of a file as a file of its own: torch reads a tensor from it without another copy of its bytes."""

    def __init__(self, store: LocalStore, place: _Stretch) -> None:
        self._store = store
        self._place = place
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._place.length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._place.length - self._at))
        if count:
            self._store.read_into(self._place.file, self._place.begin + self._at, view[:count])
        self._at += count
        return count


@dataclass(frozen=True, slots=True)
class _Source:
    """One directory, its metadata read."""

    store: LocalStore
    places: Mapping[tuple[str, tuple[int, ...] | None], _Stretch]
    """By the name of an item and, of a tensor, where in it a chunk begins."""

    def read(self, name: str, offset: tuple[int, ...] | None) -> Any:
        """One item, weights-only. Raises DamagedCheckpoint, UsageError."""
        place = self.places.get((name, offset))
        if place is None:
            raise DamagedCheckpoint(f"{METADATA} does not say where {name} lies")
        try:
            if place.begin + place.length > (self.store.size(place.file) or 0):
                raise EOFError(f"it ends before byte {place.begin + place.length}")
        except (OSError, ValueError, EOFError) as error:
            raise DamagedCheckpoint(f"{place.file[:80]} cannot be read: {error}") from error
        return load_stream(io.BufferedReader(_Slice(self.store, place), BUFFER_BYTES), f"{name} in {place.file}")

    def tensor(self, name: str, offset: tuple[int, ...]) -> Tensor:
        """One chunk of a tensor."""
        found = self.read(name, offset)
        if type(found) is not Tensor:
            raise DamagedCheckpoint(f"{name} should be a tensor and is a {type(found).__name__}")
        return found


def load_dcp(directory: Path) -> tuple[Any, list[str]]:
    """The state dict that was saved, nested as it was, with an IncomingTensor for each tensor; and what was left out.

    Raises UsageError if it is no such directory, DamagedCheckpoint if it cannot be read.
    """
    path = directory / METADATA
    if not path.is_file():
        raise UsageError(f"{directory} holds no {METADATA}: give a directory that dcp.save wrote")
    if path.stat().st_size > MOST_METADATA_BYTES:
        raise DamagedCheckpoint(f"{path} has more than {MOST_METADATA_BYTES} bytes")
    try:
        metadata = _fields(read_inert(path.read_bytes(), str(path)), _MODULE + "Metadata")
        source = _Source(LocalStore(directory), dict(map(_place_of, metadata["storage_data"].items())))
        described = {str(name): _described(source, str(name), e) for name, e in metadata["state_dict_metadata"].items()}
        paths = _paths(described, metadata.get("planner_data"))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        if isinstance(error, (DamagedCheckpoint, UsageError)):
            raise
        raise DamagedCheckpoint(f"{path} is no metadata of torch.distributed.checkpoint: {error!r}") from error
    return _tree(source, described, paths)


def _fields(value: Any, name: str) -> dict[str, Any]:
    """What an object of this class would have. Raises ValueError if it is another."""
    if not isinstance(value, Inert) or value.name != name or not isinstance(value.state, dict):
        raise ValueError(f"there is no {name.rpartition('.')[2]} where one should be")
    return value.state


def _size(value: Any) -> tuple[int, ...]:
    if not isinstance(value, Inert) or value.name != "torch.Size" or not value.arguments:
        raise ValueError("there is no size where one should be")
    lengths = tuple(value.arguments[0])
    if not all(type(length) is int and length >= 0 for length in lengths):
        raise ValueError("a size is not of whole numbers")
    return lengths


def _place_of(item: tuple[Any, Any]) -> tuple[tuple[str, tuple[int, ...] | None], _Stretch]:
    index = _fields(item[0], _MODULE + "MetadataIndex")
    info = item[1].state
    if info.get("transform_descriptors"):
        raise UsageError(f"{index['fqn']} was saved through {info['transform_descriptors']}, which is not supported")
    begin, length = info["offset"], info["length"]
    if not isinstance(info["relative_path"], str) or not all(
        type(number) is int and number >= 0 for number in (begin, length)
    ):
        raise ValueError(f"{index['fqn']} lies at no place of a file")
    offset = index.get("offset")
    return (str(index["fqn"]), None if offset is None else _size(offset)), _Stretch(
        info["relative_path"], begin, length
    )


def _described(source: _Source, name: str, entry: Any) -> IncomingTensor | None:
    """A tensor; None for what is none."""
    if isinstance(entry, Inert) and entry.name == _MODULE + "BytesStorageMetadata":
        return None
    fields = _fields(entry, _MODULE + "TensorStorageMetadata")
    properties = fields["properties"].state
    dtype = dtype_of((properties[0] if isinstance(properties, tuple) else properties["dtype"]).name[len("torch.") :])
    shape = _size(fields["size"])
    parts = []
    for chunk in fields["chunks"]:
        described = _fields(chunk, _MODULE + "ChunkStorageMetadata")
        offset, lengths = _size(described["offsets"]), _size(described["sizes"])
        box = Box(offset, tuple(first + length for first, length in zip(offset, lengths, strict=True)))
        if box.numel:  # a rank that holds nothing of a tensor has a chunk all the same
            parts.append(IncomingPart(box, lambda offset=offset: source.tensor(name, offset)))  # type: ignore[misc]
    if not parts and not whole(shape).numel:
        parts.append(IncomingPart(whole(shape), lambda: torch.empty(shape, dtype=dtype)))
    return IncomingTensor(dtype, shape, tuple(parts), name)


def _paths(described: Mapping[str, Any], planned: Any) -> dict[str, tuple[str | int, ...]]:
    """Where in the state dict each item stood, which torch notes unless it was told not to flatten."""
    if not isinstance(planned, dict):
        return {name: (name,) for name in described}
    paths: dict[str, tuple[str | int, ...]] = {}
    for name in described:
        path = planned.get(name, (name,))
        if not path or len(path) > MOST_LEVELS or not all(type(key) in (str, int) for key in path):
            raise ValueError(f"{name[:80]} stands nowhere")
        paths[name] = tuple(path)
    return paths


def _tree(
    source: _Source, described: Mapping[str, IncomingTensor | None], paths: Mapping[str, tuple[str | int, ...]]
) -> tuple[Any, list[str]]:
    root: dict[Any, Any] = {}
    left_out = []
    for name, tensor in described.items():
        try:
            value = source.read(name, None) if tensor is None else tensor
        except UsageError as error:
            left_out.append(f"{name}: {error}")
            continue
        at = root
        for key in paths[name][:-1]:
            at = at.setdefault(key, _Nested())
            if not isinstance(at, _Nested):
                raise DamagedCheckpoint(f"{METADATA} puts {name[:80]} into something that is no dict")
        at[paths[name][-1]] = value
    return _with_lists(root), left_out


class _Nested(dict[Any, Any]):
    """A dict or a list of the state dict, by key or position: not one that was saved as a value."""


def _with_lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    items = {key: _with_lists(item) if isinstance(item, _Nested) else item for key, item in value.items()}
    if (
        isinstance(value, _Nested)
        and all(type(key) is int for key in items)
        and sorted(items) == list(range(len(items)))
    ):
        return [items[index] for index in range(len(items))]
    return items
