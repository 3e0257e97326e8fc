"""Makes a run directory of a foreign checkpoint: generation 1 and one checkpoint, which any job can restore.

Streamed: a part of a tensor is read, written and digested before the next, so a checkpoint may be larger than memory.
The order of writing is that of a save: the generation's record, the data file, then the manifest. An error takes all of
it back; a process that is killed leaves a directory without a checkpoint, into which one can import again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import xxhash

from unbroken import generations
from unbroken.candidates import first_manifest
from unbroken.elements import as_bytes
from unbroken.environment import describe_environment
from unbroken.errors import DamagedCheckpoint, DirectoryProblem, HistoryExists, UnbrokenError, UsageError
from unbroken.exchange.contents import CHUNK_BYTES
from unbroken.exchange.dcp_source import load_dcp
from unbroken.exchange.incoming import IncomingPart, IncomingTensor, with_incoming
from unbroken.exchange.registering import Registered, Wishes, register
from unbroken.exchange.torch_files import load_torch
from unbroken.image.digest import BlockDigests, block_bytes_for
from unbroken.image.header import dtype_name
from unbroken.image.image import ImageLayout, TensorSpec, lay_out
from unbroken.layout.boxes import name_of_part, whole
from unbroken.manifest import (
    MANIFEST,
    MOST,
    FileRecord,
    Manifest,
    PieceRecord,
    TensorRecord,
    ValueRecord,
    decode,
    encode,
    step_directory,
)
from unbroken.store.local import LocalStore
from unbroken.values import check_values

MOST_EQUAL = 4
"""Pairs of equal tensors that are named."""

Progress = Callable[[int], None]
"""Called with the number of bytes written since the last call."""


def read_torch(source: Path, wishes: Wishes) -> Registered:
    """What a file of `torch.save` holds that can be registered. Runs no pickle.

    Raises UsageError if it holds more than tensors and plain values, or nothing that can be imported;
    DamagedCheckpoint if it cannot be read.
    """
    return _registered(load_torch(source), wishes)


def read_dcp(source: Path, wishes: Wishes) -> Registered:
    """The same for a directory of `torch.distributed.checkpoint`. Tensors are not read yet."""
    tree, left_out = load_dcp(source)
    made = _registered(tree, wishes)
    made.notes += [f"left out: {reason}" for reason in left_out]
    return made


def _registered(tree: Any, wishes: Wishes) -> Registered:
    try:
        return register(with_incoming(tree), wishes)
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        if isinstance(error, UnbrokenError):
            raise
        raise UsageError(f"the source has state dicts of no known form: {error!r}") from error


def import_checkpoint(run: Path, step: int, registered: Registered, progress: Progress) -> Manifest:
    """Write a new run directory that holds `registered` as its checkpoint of `step`. Durable when this returns.

    Raises HistoryExists if it holds checkpoints, UsageError, DirectoryProblem, DamagedCheckpoint if the source does
    not hold what it says; then nothing is left.
    """
    if not 0 <= step <= MOST:
        raise UsageError(f"{step} is no step")
    _check_names(registered)
    store = LocalStore(run.expanduser().absolute())
    existing = first_manifest(store)
    if existing is not None:
        raise HistoryExists(f"{store.root} holds checkpoints up to {existing.replace('-', ' ')}: give a new directory")
    was_there = store.root.exists()
    if was_there and not store.root.is_dir():
        raise DirectoryProblem(f"{store.root} is a file, not a directory; give the path of a run directory")
    with contextlib.ExitStack() as undo:
        if not was_there:
            undo.callback(_remove_directory, store.root)
        store.create_root()
        undo.callback(store.delete_directory, generations.DIRECTORY)
        begun = generations.begin(store, None, 1)
        undo.callback(store.delete, generations.record_name(begun.number))
        manifest = _write(store, step, begun.number, registered, progress, undo)
        undo.pop_all()
    return manifest


def _check_names(registered: Registered) -> None:
    for name in registered.tensors:
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"the name {name!a} is no Unicode text") from error


def _remove_directory(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.rmdir()


def _write(
    store: LocalStore,
    step: int,
    generation: int,
    registered: Registered,
    progress: Progress,
    undo: contextlib.ExitStack,
) -> Manifest:
    parts = _parts(registered.tensors)
    layout = lay_out([TensorSpec(name, tensor.dtype, part.box.shape) for name, (tensor, part) in parts.items()])
    directory = step_directory(step, 0)
    file = f"g{generation:04d}-rank-00000.safetensors"
    digests = BlockDigests(block_bytes_for(layout.size))
    undo.callback(store.delete_directory, directory)
    undo.callback(store.delete, f"{directory}/{file}")
    same = _SameValues(registered)
    store.create_in_parts(f"{directory}/{file}", digests.of(_bytes_of(layout, parts, same, progress)))
    manifest = Manifest(
        step=step,
        micro_step=0,
        generation=generation,
        lineage=[],
        world_size=1,
        saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
        files=[FileRecord(file, layout.size, digests.block_bytes, digests.text())],
        tensors=_records(registered.tensors, layout),
        rank_tensors=[{}],
        values={name: [ValueRecord([(0, 0)], value)] for name, value in registered.values.items()},
        environment=describe_environment(),
    )
    # What a restore would refuse must not be published: a source can say that two chunks are one part of a tensor.
    name = f"{directory}/{MANIFEST}"
    data = encode(manifest)
    check_values(decode(data, "what was imported"), "what was imported")
    store.publish(name, data)
    registered.notes += same.notes()
    return manifest


_Parts = Mapping[str, tuple[IncomingTensor, IncomingPart]]
"""What is written, by the name that it has in the file."""


def _parts(tensors: Mapping[str, IncomingTensor]) -> _Parts:
    parts: dict[str, tuple[IncomingTensor, IncomingPart]] = {}
    for name, tensor in tensors.items():
        for part in tensor.parts:
            stored_as = name_of_part(name, part.box, tensor.shape)
            if stored_as in parts or stored_as == "__metadata__":
                raise UsageError(f"the source has two tensors, or two parts of one, that would be called {stored_as}")
            parts[stored_as] = (tensor, part)
    return parts


def _bytes_of(
    layout: ImageLayout, parts: _Parts, same: _SameValues, progress: Progress
) -> Iterator[memoryview | bytes]:
    """The file, in pieces of about CHUNK_BYTES. Each part is read when its turn comes, and let go."""
    yield layout.header
    for entry in layout.entries:
        tensor, part = parts[entry.name]
        try:
            loaded = tensor.load_part(part)
        except DamagedCheckpoint as error:
            raise DamagedCheckpoint(f"{entry.name}: {error}") from error
        for piece in _pieces(loaded):
            same.look(tensor, piece)
            yield piece
            progress(len(piece))


@torch.no_grad()
def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The elements in row-major order."""
    rows = tensor if tensor.dim() else tensor.reshape(1)
    at_once = max(1, CHUNK_BYTES * len(rows) // max(1, tensor.numel() * tensor.element_size()))
    for begin in range(0, len(rows), at_once):
        piece = as_bytes(rows[begin : begin + at_once])
        if piece.numel():
            yield piece.numpy().data


class _SameValues:
    """Finds matrices of a module that are equal: they may be one tensor, which only the model's code can tell."""

    def __init__(self, registered: Registered) -> None:
        modules = {name for name, value in registered.values.items() if value["kind"] == "module"}
        self._names = {
            id(tensor): name
            for name, tensor in registered.tensors.items()
            if name.partition("/")[0] in modules and len(tensor.shape) > 1
        }
        self._tensors = registered.tensors
        self._digests = {name: xxhash.xxh3_128() for name in self._names.values()}

    def look(self, tensor: IncomingTensor, piece: memoryview) -> None:
        """Take in the next bytes of a tensor. Parts come in the order of their names, so in the same for equal ones."""
        name = self._names.get(id(tensor))
        if name is not None:
            self._digests[name].update(piece)

    def notes(self) -> list[str]:
        """A line for each that has the values of another."""
        first: dict[object, str] = {}
        found = []
        for name, digest in self._digests.items():
            tensor = self._tensors[name]
            other = first.setdefault((tensor.dtype, tensor.shape, digest.digest()), name)
            if other != name:
                one, two = (full.partition("/")[2] for full in (name, other))
                found.append(f"{name} and {other} are equal; if the model ties them, import with --tie {one}={two}")
        return [*found[:MOST_EQUAL], *([f"and {len(found) - MOST_EQUAL} more are equal"] if found[MOST_EQUAL:] else [])]


def _records(tensors: Mapping[str, IncomingTensor], layout: ImageLayout) -> dict[str, TensorRecord]:
    places = {entry.name: entry for entry in layout.entries}
    records: dict[str, TensorRecord] = {}
    for name, tensor in tensors.items():
        pieces = []
        for part in tensor.parts:
            place = places[name_of_part(name, part.box, tensor.shape)]
            is_whole = part.box == whole(tensor.shape)
            box: Any = None if is_whole else list(zip(part.box.begin, part.box.end, strict=True))
            pieces.append(PieceRecord(0, place.begin, place.end, box))
        records[name] = TensorRecord(dtype_name(tensor.dtype), list(tensor.shape), pieces)
    return records
