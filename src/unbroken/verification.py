"""Is everything that lies in a run directory as it was written? Every byte is read, and every fault is listed.

Read only, beside a running job or long after; needs no process group and no GPU. Memory stays bounded however large a
checkpoint is: files are read in pieces of CHUNK_BYTES and digested as they come. A checkpoint that the job's own
retention deletes meanwhile is no fault.

What is compared: blocks with their digests, the header of each file with the manifest, manifests and generation
records with theirs. Not whether a script's objects would fit: they are not here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import xxhash

from unbroken import generations
from unbroken.candidates import Place, find_tip, manifest_places, read_manifest, size_problem
from unbroken.errors import DamagedCheckpoint, NewerFormat
from unbroken.generations import Generation
from unbroken.image.digest import HEX_CHARS
from unbroken.image.header import LENGTH_BYTES, MOST_HEADER_BYTES, dtype_of, stored_form
from unbroken.layout.boxes import name_of_part
from unbroken.manifest import (
    MANIFEST,
    FileRecord,
    Manifest,
    Origin,
    TensorRecord,
    box_of,
    is_kept,
    parse_step_directory,
    rank_of_file,
)
from unbroken.pieces import MisleadingHeader, Pieces
from unbroken.retention import MANIFEST_NAME
from unbroken.store.local import LocalStore

CHUNK_BYTES = 8 << 20
MOST_MISSING = 10_000
"""Up to this number each generation is expected to have its record; a hostile directory may hold a very high one."""

Progress = Callable[[int], None]
"""Called with the number of bytes read since the last call."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is not as it was written."""

    file: str
    """Inside the run directory."""
    problem: str
    """What is wrong, in words that follow the file's name."""
    begin: int | None = None
    """First byte, if only a part of the file is wrong."""
    end: int | None = None
    """One past the last byte."""
    tensors: tuple[str, ...] = ()
    """Tensors that lie there, in the order of their bytes; those of one rank with `rank-00001/` before them."""
    restorable: bool = False
    """True if a restore reads nothing of it: a header, or bytes that no tensor has."""

    def __str__(self) -> str:
        where = "" if self.begin is None else f", bytes {self.begin}-{self.end},"
        return f"{self.file}{where} {self.problem}"


@dataclass(frozen=True, slots=True)
class Verified:
    """One checkpoint after every byte of it was read."""

    place: Place
    manifest: Manifest | None
    """None if the manifest itself cannot be used."""
    on_lineage: bool
    """True if the next start may restore it."""
    faults: tuple[Fault, ...]
    newer_format: str = ""
    """What a start says that finds the manifest to be of a newer format, if it is; it would go no further."""

    @property
    def usable(self) -> bool:
        """True if a restore of it would succeed as far as its bytes go."""
        return self.manifest is not None and all(fault.restorable for fault in self.faults)


@dataclass(slots=True)
class Report:
    """What was found in a run directory."""

    generation: int | None = None
    """The newest one; None if no job ever started here."""
    checkpoints: list[Verified] = field(default_factory=list)
    """Newest first."""
    records: list[Fault] = field(default_factory=list)
    """Generation records that are damaged or lost."""
    unfinished: list[str] = field(default_factory=list)
    """Directories of saves that never committed, or are being written now."""
    leftovers: list[str] = field(default_factory=list)
    """Files beside a checkpoint that no manifest refers to."""
    restores: Verified | None = None
    """What a start of the job would restore now."""
    refusal: str = ""
    """Why a start would refuse to go on, if it would."""

    @property
    def faults(self) -> list[Fault]:
        """All of them."""
        return [*self.records, *(fault for checkpoint in self.checkpoints for fault in checkpoint.faults)]


def verify_run(store: LocalStore, progress: Progress, step: str | None = None) -> Report:
    """Read everything in a run directory. `step` (`40`, `40.1`) limits it to the checkpoints of one step."""
    report = Report()
    tip = None
    try:
        tip, _ = find_tip(store)
    except NewerFormat as error:
        report.refusal = str(error)
    report.generation = tip.number if tip else None
    for place in manifest_places(store):
        if step is None or place.directory == f"step-{step}":
            verified = verify_checkpoint(store, place, tip, progress)
            # What is gone now was deleted by the job's own retention while we read it.
            if not verified.faults or store.size(place.path) is not None:
                report.checkpoints.append(verified)
    if step is None:
        report.records = _verify_records(store, report.checkpoints)
        _foretell(report)
    _list_uncommitted(store, report, step)
    return report


def bytes_to_read(store: LocalStore, step: str | None = None) -> int:
    """How many bytes `verify_run` will read at most, as far as the sizes of files tell; for a progress bar."""
    directories = {place.directory for place in manifest_places(store)}
    return sum(
        store.size(f"{directory}/{name}") or 0
        for directory in directories
        if step is None or directory == f"step-{step}"
        for name in store.list(directory)
    )


def verify_checkpoint(store: LocalStore, place: Place, tip: Generation | None, progress: Progress) -> Verified:
    """Read one checkpoint: its manifest, and every byte of every file that it names."""
    try:
        manifest, _ = read_manifest(store, place)
    except NewerFormat as error:
        return Verified(place, None, False, (Fault(place.path, _without(place.path, error)),), str(error))
    except (DamagedCheckpoint, OSError) as error:
        return Verified(place, None, False, (Fault(place.path, _without(place.path, error)),))
    faults = []
    if place.name not in (MANIFEST, f"manifest.g{manifest.generation:04d}.json"):
        problem = f"is the manifest of generation {manifest.generation}; were files exchanged?"
        faults.append(Fault(place.path, problem, restorable=True))
    parts = _parts_by_file(manifest)
    pieces = Pieces(store, place.directory, manifest)
    for index, file in enumerate(manifest.files):
        unlisted, problems = _unlisted_parts(pieces, index)
        faults += problems
        faults += _verify_file(store, place.directory, file, parts.get(index, []) + unlisted, progress)
    return Verified(place, manifest, tip is None or tip.reaches(manifest.where), tuple(faults))


@dataclass(frozen=True, slots=True)
class _Part:
    """What a manifest says lies in a file."""

    begin: int
    end: int
    stored_as: str
    """Its name in the file's header."""
    dtype: str
    """As the header names it."""
    shape: list[int]


def _parts_by_file(manifest: Manifest) -> dict[int, list[_Part]]:
    """By index into the manifest's files, in the order of their bytes."""
    found: dict[int, list[_Part]] = {}

    def add(prefix: str, tensors: Mapping[str, TensorRecord]) -> None:
        for name, record in tensors.items():
            shape = tuple(record.shape)
            for piece in record.pieces:
                box = box_of(piece, shape)
                dtype, stored_shape = stored_form(dtype_of(record.dtype), box.shape)
                stored_as = prefix + name_of_part(name, box, shape)
                part = _Part(piece.begin, piece.end, stored_as, dtype, stored_shape)
                found.setdefault(piece.file, []).append(part)

    add("", manifest.tensors)
    for rank, tensors in enumerate(manifest.rank_tensors):
        add(f"rank-{rank:05d}/", tensors)
    for parts in found.values():
        parts.sort(key=lambda part: (part.begin, part.end, part.stored_as))
    return found


def _unlisted_parts(pieces: Pieces, index: int) -> tuple[list[_Part], list[Fault]]:
    """What a file holds of tensors whose pieces the manifest does not list, and what it lacks of them.

    If its header cannot be read, none of them can: each of its bytes belongs to all.
    """
    file = pieces.manifest.files[index]
    rank = rank_of_file(file.name)
    parts: list[_Part] = []
    faults: list[Fault] = []
    if is_kept(file.name):
        return parts, faults
    for name, record in pieces.manifest.tensors.items():
        cuts = pieces.cuts(record) if record.cuts is not None else None
        if cuts is None or rank not in cuts.mesh or not cuts.boxes_of(rank)[0].numel:
            continue
        box = cuts.boxes_of(rank)[0]
        stored_as = name_of_part(name, box, tuple(record.shape))
        dtype, stored_shape = stored_form(dtype_of(record.dtype), box.shape)
        begin, end = 0, file.size
        try:
            piece = pieces.find(name, record, box, index)
            begin, end = piece.begin, piece.end
        except MisleadingHeader as error:
            path = f"{pieces.directory}/{file.name}"
            faults.append(Fault(path, _without(path, str(error)), tensors=(stored_as,)))
            continue
        except DamagedCheckpoint:
            pass  # told when the file's bytes are read
        parts.append(_Part(begin, end, stored_as, dtype, stored_shape))
    return sorted(parts, key=lambda part: part.begin), faults


def _verify_file(
    store: LocalStore, directory: str, file: FileRecord, parts: list[_Part], progress: Progress
) -> Iterator[Fault]:
    path = f"{directory}/{file.name}"
    try:
        problem = size_problem(store, directory, file)
    except OSError as error:
        problem = f"{path} cannot be read: {error.strerror or error}"
    if problem:
        tensors = tuple(part.stored_as for part in parts if part.end > part.begin)
        yield Fault(path, _without(path, problem), tensors=tensors)
        return
    first_bad = file.size
    for begin, end, problem in _bad_stretches(store, path, file, progress):
        first_bad = min(first_bad, begin)
        tensors = tuple(part.stored_as for part in parts if part.begin < end and begin < part.end)
        yield Fault(path, problem, begin, end, tensors, restorable=not tensors)
    try:
        for problem in _header_problems(store, path, parts, first_bad):
            yield Fault(path, problem, restorable=True)
    except (OSError, EOFError) as error:
        yield Fault(path, f"cannot be read: {error}")


def _bad_stretches(
    store: LocalStore, path: str, file: FileRecord, progress: Progress
) -> Iterator[tuple[int, int, str]]:
    """(begin, end, problem) of neighbouring blocks with one problem."""
    bad: tuple[int, int, str] | None = None
    buffer = memoryview(bytearray(min(CHUNK_BYTES, file.block_bytes, file.size)))
    for index, begin in enumerate(range(0, file.size, file.block_bytes)):
        end = min(begin + file.block_bytes, file.size)
        expected = file.blocks[index * HEX_CHARS : (index + 1) * HEX_CHARS]
        problem = _block_problem(store, path, begin, end, expected, buffer)
        progress(end - begin)
        if bad is not None and problem == bad[2]:
            bad = (bad[0], end, problem)
            continue
        if bad is not None:
            yield bad
        bad = (begin, end, problem) if problem else None
    if bad is not None:
        yield bad


def _block_problem(store: LocalStore, path: str, begin: int, end: int, expected: str, buffer: memoryview) -> str:
    """What is wrong with one block; empty if nothing is."""
    digest = xxhash.xxh3_64()
    for first in range(begin, end, len(buffer)):
        chunk = buffer[: min(len(buffer), end - first)]
        try:
            store.read_into(path, first, chunk)
        except (OSError, ValueError, EOFError) as error:
            return f"cannot be read: {getattr(error, 'strerror', None) or error}"
        digest.update(chunk)
    return "" if digest.hexdigest() == expected else "do not match their digest"


def _header_problems(store: LocalStore, path: str, parts: list[_Part], whole_until: int) -> Iterator[str]:
    """Where the header of a safetensors file says something else than the manifest. No restore reads it.

    whole_until  first byte known to be damaged: a header beyond it is not looked at
    """
    prefix = bytearray(min(LENGTH_BYTES, whole_until))
    store.read_into(path, 0, memoryview(prefix))
    length = int.from_bytes(prefix, "little")
    if len(prefix) < LENGTH_BYTES or LENGTH_BYTES + length > whole_until:
        if whole_until >= LENGTH_BYTES and length > MOST_HEADER_BYTES:
            yield f"says that its header has {length} bytes"
        return
    text = bytearray(min(length, MOST_HEADER_BYTES))
    store.read_into(path, LENGTH_BYTES, memoryview(text))
    try:
        header = msgspec.json.decode(text, type=dict[str, dict[str, Any]])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        yield f"has a header that is no safetensors header: {error}"
        return
    header.pop("__metadata__", None)
    data_begin = LENGTH_BYTES + length
    for part in parts:
        offsets = [part.begin - data_begin, part.end - data_begin]
        expected = {"dtype": part.dtype, "shape": part.shape, "data_offsets": offsets}
        found = header.pop(part.stored_as, None)
        if found is None:
            yield f"has no tensor {part.stored_as} in its header"
        elif found != expected:
            wrong = [key for key, value in expected.items() if found.get(key) != value] or ["entry"]
            yield f"has another {' and '.join(wrong)} of {part.stored_as} in its header than in the manifest"
    for name in header:
        yield f"has a tensor {name!r} in its header that the manifest does not know"


def _verify_records(store: LocalStore, checkpoints: list[Verified]) -> list[Fault]:
    """Generation records that are damaged, and those that must have been there, since nobody ever deletes one."""
    numbers = generations.recorded_numbers(store)
    world_sizes: dict[int, int] = {}
    faults = []
    for number in sorted(numbers):
        try:
            world_sizes[number] = generations.read(store, number).world_size
        except (DamagedCheckpoint, NewerFormat) as error:
            name = generations.record_name(number)
            faults.append(Fault(name, _without(name, error)))
    known = [origin.generation for checkpoint in checkpoints for origin in _origins(checkpoint.manifest)]
    highest = max([*numbers, *known], default=0)
    missing = sorted(set(known) - numbers) if highest > MOST_MISSING else sorted(set(range(1, highest)) | set(known))
    for number in missing:
        if number not in numbers and number > 0:
            faults.append(Fault(generations.record_name(number), "is missing"))
    for checkpoint in checkpoints:
        manifest = checkpoint.manifest
        if manifest and world_sizes.get(manifest.generation, manifest.world_size) != manifest.world_size:
            recorded = world_sizes[manifest.generation]
            problem = f"says {manifest.world_size} ranks, and the record of its generation {recorded}"
            faults.append(Fault(checkpoint.place.path, problem))
    return faults


def _origins(manifest: Manifest | None) -> list[Origin]:
    return [manifest.where, *manifest.lineage] if manifest else []


def _list_uncommitted(store: LocalStore, report: Report, step: str | None) -> None:
    used: dict[str, set[str]] = {}
    for checkpoint in report.checkpoints:
        files = used.setdefault(checkpoint.place.directory, set())
        files |= {file.name for file in checkpoint.manifest.files} if checkpoint.manifest else set()
    for directory in store.list(""):
        if parse_step_directory(directory) is None or (step is not None and directory != f"step-{step}"):
            continue
        names = store.list(directory)
        if not any(map(MANIFEST_NAME.fullmatch, names)):
            report.unfinished.append(directory)
        elif all(checkpoint.manifest for checkpoint in report.checkpoints if checkpoint.place.directory == directory):
            others = [
                name for name in names if name not in used.get(directory, ()) and not MANIFEST_NAME.fullmatch(name)
            ]
            report.leftovers += [f"{directory}/{name}" for name in others]


def _foretell(report: Report) -> None:
    """What a start would do now: it takes the newest checkpoint on the lineage whose tensors are whole."""
    for checkpoint in report.checkpoints if not report.refusal else []:
        report.refusal = checkpoint.newer_format
        if report.refusal:
            return
        if checkpoint.on_lineage and checkpoint.usable:
            report.restores = checkpoint
            return
    if report.checkpoints and not report.refusal:
        report.refusal = "no checkpoint of the current history is whole"


def _without(path: str, error: object) -> str:
    """The text of an error that begins with the name of the file it is about, without that name."""
    return str(error).removeprefix(path).lstrip(" :")
