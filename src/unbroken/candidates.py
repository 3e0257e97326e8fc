"""Which checkpoints lie in a run directory, and what of one a rank restores. Reads records, never tensors.

Needs no process group: the command line looks at a directory with the same eyes as a restoring job.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from unbroken.errors import DamagedCheckpoint, NewerFormat
from unbroken.generations import Generation, read_newest
from unbroken.image.header import dtype_of
from unbroken.manifest import MANIFEST, MOST_BYTES, FileRecord, Manifest, TensorRecord, decode, parse_step_directory
from unbroken.retention import MANIFEST_NAME
from unbroken.state import rng
from unbroken.state.captured import SavedTensor
from unbroken.state.merging import MERGED, merge
from unbroken.store.local import LocalStore
from unbroken.values import check_values

_OF_GENERATION = re.compile(r"g([0-9]{4,9})-rank-")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a manifest lies, whole or not."""

    step: int
    micro_step: int
    directory: str
    name: str
    """`manifest.json`, or `manifest.g0001.json` if a newer generation moved it aside."""

    @property
    def path(self) -> str:
        """Inside the run directory."""
        return f"{self.directory}/{self.name}"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One checkpoint that lies in the run directory, good or not."""

    directory: str
    step: int
    micro_step: int
    manifest: Manifest | None
    """None if it cannot be used."""
    problem: str = ""
    """Why not."""
    name: str = MANIFEST
    """Of the manifest in its directory."""
    data: bytes = field(default=b"", repr=False)
    """The manifest's bytes as they lie on disk."""


def find_tip(store: LocalStore) -> tuple[Generation | None, list[str]]:
    """The newest generation, whose lineage counts, and warnings about records that are damaged or lost.

    A manifest carries the number and the lineage of its generation: where a generation has one, it stands in for the
    record, and damage to a record costs nothing. Raises NewerFormat.
    """
    tip, damaged = read_newest(store)
    witness = _newest_witness(store, tip.number if tip is not None else 0)
    if witness is not None:
        tip = Generation(witness.generation, witness.lineage, witness.world_size, witness.saved_at, host="", pid=0)
        lost = damaged or [f"the record of generation {tip.number} is missing"]
        return tip, [f"{line}; its checkpoint of step {witness.step} tells the lineage instead" for line in lost]
    return tip, [f"{line}; its lineage is unknown, going by the generation before it" for line in damaged]


def _newest_witness(store: LocalStore, known: int) -> Manifest | None:
    """A whole manifest of the highest generation that has one, if that is higher than `known`."""
    newest: Manifest | None = None
    for directory in store.list(""):
        place = parse_step_directory(directory)
        for name in store.list(directory) if place is not None else []:
            match = _OF_GENERATION.match(name)
            if match and int(match[1]) > (known if newest is None else newest.generation):
                newest = _whole_manifest_of(store, directory, int(match[1])) or newest
    return newest


def _whole_manifest_of(store: LocalStore, directory: str, generation: int) -> Manifest | None:
    for name in filter(MANIFEST_NAME.fullmatch, store.list(directory)):
        with contextlib.suppress(DamagedCheckpoint, OSError, ValueError, EOFError):
            manifest = decode(store.read(f"{directory}/{name}", MOST_BYTES), f"{directory}/{name}")
            if manifest.generation == generation:
                return manifest
    return None


def first_manifest(store: LocalStore) -> str | None:
    """The directory of the highest step with a manifest, whole or not, of any history; None if there is none."""
    steps = sorted((place, name) for name in store.list("") if (place := parse_step_directory(name)) is not None)
    for _, directory in reversed(steps):
        if any(MANIFEST_NAME.fullmatch(name) for name in store.list(directory)):
            return directory
    return None


def candidates(store: LocalStore, tip: Generation | None) -> Iterator[Candidate]:
    """Every checkpoint on the lineage of `tip`, newest first, and those that cannot be read, with the reason.

    Directories without a manifest were never committed and are passed over in silence, as are checkpoints of an
    abandoned history. Manifests are read one by one, as the caller asks. Raises NewerFormat.
    """
    for place in manifest_places(store):
        candidate = _read_candidate(store, place)
        if candidate.manifest is None or tip is None or tip.reaches(candidate.manifest.where):
            yield candidate


def manifest_places(store: LocalStore) -> Iterator[Place]:
    """Every manifest in the run directory, of any history, newest step first."""
    steps = [(place, name) for name in store.list("") if (place := parse_step_directory(name)) is not None]
    for (step, micro_step), directory in sorted(steps, reverse=True):
        # One that was moved aside by a newer generation may be the one on our lineage (commit._move_aside).
        names = sorted(filter(MANIFEST_NAME.fullmatch, store.list(directory)), key=_age)
        for name in names:
            yield Place(step, micro_step, directory, name)


def _age(name: str) -> tuple[bool, int, str]:
    """Sorts `manifest.json` first, and those that were moved aside by falling generation."""
    match = MANIFEST_NAME.fullmatch(name)
    assert match is not None
    return (name != MANIFEST, -int(match[1] or 0), name)


def read_manifest(store: LocalStore, place: Place) -> tuple[Manifest, bytes]:
    """A manifest that may be trusted, and its bytes. Raises DamagedCheckpoint, OSError, NewerFormat."""
    try:
        data = store.read(place.path, MOST_BYTES)
    except (ValueError, EOFError) as error:
        raise DamagedCheckpoint(f"{place.path} cannot be read: {error}") from error
    manifest = decode(data, place.path)
    if (manifest.step, manifest.micro_step) != (place.step, place.micro_step):
        raise DamagedCheckpoint(f"{place.path} is the manifest of step {manifest.step}; was the directory renamed?")
    check_values(manifest, place.path)
    return manifest, data


def _read_candidate(store: LocalStore, place: Place) -> Candidate:
    where = (place.directory, place.step, place.micro_step)
    try:
        manifest, data = read_manifest(store, place)
        for file in manifest.files:
            problem = size_problem(store, place.directory, file)
            if problem:
                raise DamagedCheckpoint(problem)
    except NewerFormat:
        raise
    except (DamagedCheckpoint, OSError) as error:
        return Candidate(*where, None, str(error), name=place.name)
    return Candidate(*where, manifest, data=data, name=place.name)


def size_problem(store: LocalStore, directory: str, file: FileRecord) -> str:
    """What is wrong with a file of a checkpoint as far as its size tells; empty if nothing is. Raises OSError."""
    size = store.size(f"{directory}/{file.name}")
    if size == file.size:
        return ""
    found = "is missing" if size is None else f"has {size} bytes instead of {file.size}"
    return f"{directory}/{file.name} {found}"


@dataclass(frozen=True, slots=True)
class Saved:
    """What a checkpoint has for one rank of a job."""

    records: dict[str, TensorRecord]
    """Tensors by full name: what ranks share, what was this rank's own, and what only others had."""
    values: dict[str, Any]
    """By registered name."""
    contested: dict[str, list[tuple[int, TensorRecord]]]
    """Tensors that several ranks had as their own, with those ranks: which is meant cannot be told unless they are
    equal."""
    borrowed: list[str]
    """Registered names of which this rank, being new, has what rank 0 kept for itself."""
    own: frozenset[str] = frozenset()
    """Those of the tensors that were stored as a rank's own."""


def saved_for(manifest: Manifest, rank: int, world_size: int) -> Saved:
    """What `rank` of a job of `world_size` restores.

    At the saved world size each rank gets its own. At another one, per-rank state of a rank that did not exist is
    rank 0's, without its RNG: two ranks must not draw the same numbers. Models and optimizers are one thing, whatever
    ranks had parts of it: what a rank did not have itself comes from those that had it.
    """
    same_size = world_size == manifest.world_size
    part = rank if rank < manifest.world_size else 0
    values = _values_for(manifest, part)
    records = manifest.tensors_of(part)
    if part != rank:
        records = {name: record for name, record in records.items() if not name.startswith("rng/")}
        values.pop("rng", None)
    models = {name for name, value in values.items() if value.get("kind") in MERGED and name != "gradients"}
    broadcast = {f"{name}/{fqn}" for name in models for fqn in values[name].get("broadcast", ())}
    holders: dict[str, list[tuple[int, TensorRecord]]] = {}
    for holder, own in enumerate(manifest.rank_tensors):
        for name, record in own.items():
            known = name in manifest.tensors or (same_size and name in manifest.rank_tensors[part])
            if not known and name.partition("/")[0] in models:
                holders.setdefault(name, []).append((holder, record))
    for name, held in holders.items():
        records.setdefault(name, held[0][1])
    contested = {name: held for name, held in holders.items() if len(held) > 1 and name not in broadcast}
    borrowed = _own_values(manifest, part, values) if part != rank else []
    return Saved(records, values, contested, borrowed, frozenset(records.keys() - manifest.tensors.keys()))


def _own_values(manifest: Manifest, part: int, values: Mapping[str, Any]) -> list[str]:
    """Registered names of which ranks need not have had the same: their values differ, or each stored tensors.

    Generators always: a single process stores its own as everybody's, and ranks would draw the same.
    """
    own = {name.partition("/")[0] for name in manifest.rank_tensors[part]}
    others = [name for name, value in sorted(values.items()) if value.get("kind") not in MERGED]
    return [
        name for name in others if name in own or len(manifest.values[name]) > 1 or values[name].get("kind") == rng.KIND
    ]


def _values_for(manifest: Manifest, part: int) -> dict[str, Any]:
    """The values of one rank; those of models and optimizers with what other ranks had of them."""
    values = manifest.values_of(part)
    for name, records in manifest.values.items():
        every = [record.value for record in records if isinstance(record.value, dict)]
        if len(every) > 1 and values.get(name, every[0]).get("kind") in MERGED:
            own = values.get(name)
            values[name] = merge([*([own] if own is not None else []), *every])
    return values


def saved_tensors(records: Mapping[str, TensorRecord], own: Collection[str] = ()) -> dict[str, SavedTensor]:
    """The same as the live state wants to know it; `own` are those that a rank stored as its own."""
    return {
        name: SavedTensor(dtype_of(record.dtype), tuple(record.shape), name in own) for name, record in records.items()
    }
