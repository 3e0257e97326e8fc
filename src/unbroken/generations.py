"""Generations: each start of a job is one, like a timeline of PostgreSQL.

`generations/0002.json` says from which step of which generation it went on. It is created exclusively, so that two
starts never share a number, and it is the fence (invariant 6): a manifest counts only if it lies on the lineage of the
newest generation, so whatever a dead or partitioned old process still writes is never restored.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from unbroken.errors import DamagedCheckpoint, DirectoryProblem, UnbrokenError
from unbroken.manifest import MOST_GENERATION, Manifest, Origin, check_lineage, parse_step_directory, seal, unseal
from unbroken.store.local import LocalStore

DIRECTORY = "generations"
MOST_BYTES = 16 << 20
_NAME = re.compile(r"([0-9]{4,9})\.json")
_FILE = re.compile(r"g([0-9]{4,9})-rank-")


class Generation(msgspec.Struct, frozen=True):
    """One start of the job."""

    number: int
    """1 for the first start in a directory."""
    lineage: list[Origin]
    """What it restored, nearest first (see Manifest.lineage); empty for a fresh start."""
    world_size: int
    started_at: str
    """UTC, ISO 8601. For people."""
    host: str
    pid: int

    def reaches(self, where: Origin) -> bool:
        """True if `where` lies on this generation's lineage: on itself, or before the point it or a forebear left."""
        if where.generation == self.number:
            return True
        return any(
            where.generation == origin.generation and (where.step, where.micro_step) <= (origin.step, origin.micro_step)
            for origin in self.lineage
        )


def newest_number(store: LocalStore) -> int:
    """The highest generation number in the directory, damaged records included; 0 if there is none."""
    return max(recorded_numbers(store), default=0)


def read_newest(store: LocalStore) -> tuple[Generation | None, list[str]]:
    """The newest generation whose record is whole, and a line for each newer one that is damaged.

    Raises NewerFormat.
    """
    damaged: list[str] = []
    for number in sorted(recorded_numbers(store), reverse=True):
        try:
            return read(store, number), damaged
        except DamagedCheckpoint as error:
            damaged.append(str(error))
    return None, damaged


def read(store: LocalStore, number: int) -> Generation:
    """One generation's record. Raises DamagedCheckpoint, NewerFormat."""
    name = record_name(number)
    try:
        generation = msgspec.json.decode(unseal(store.read(name, MOST_BYTES), name), type=Generation)
        check_lineage(generation.number, generation.lineage)
    except UnbrokenError:
        raise
    except (OSError, ValueError, EOFError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise DamagedCheckpoint(f"{name} cannot be read: {error}") from error
    if generation.number != number:
        raise DamagedCheckpoint(f"{name} says it is generation {generation.number}")
    return generation


def begin(store: LocalStore, restored: Manifest | None, world_size: int) -> Generation:
    """Create the next generation. Durable when this returns. Raises OSError if the directory cannot be written."""
    lineage: Sequence[Origin] = [restored.where, *restored.lineage] if restored else []
    while True:
        number = highest_seen(store) + 1
        if number > MOST_GENERATION:
            raise DirectoryProblem(f"{store.root} holds generation {number - 1}, which no job has begun: remove it")
        generation = Generation(
            number=number,
            lineage=list(lineage),
            world_size=world_size,
            started_at=datetime.now(UTC).isoformat(timespec="seconds"),
            host=socket.gethostname(),
            pid=os.getpid(),
        )
        try:
            store.publish(record_name(generation.number), seal(msgspec.json.encode(generation)))
        except FileExistsError:
            continue  # another start was faster; it has a lower number and will find itself fenced
        return generation


def highest_seen(store: LocalStore) -> int:
    """The highest generation number that anything in the directory bears: records, and files of checkpoints.

    A record can be lost or damaged while its checkpoints stay; its number must not be given out again.
    """
    files = (
        _FILE.match(name)
        for directory in store.list("")
        if parse_step_directory(directory) is not None
        for name in store.list(directory)
    )
    return max([newest_number(store), *(int(match[1]) for match in files if match)])


def record_name(number: int) -> str:
    """Of a generation's record, inside the run directory."""
    return f"{DIRECTORY}/{number:04d}.json"


def recorded_numbers(store: LocalStore) -> set[int]:
    """The numbers of all generations that have a record, whole or not."""
    matches = (_NAME.fullmatch(name) for name in store.list(DIRECTORY))
    return {int(match[1]) for match in matches if match}
