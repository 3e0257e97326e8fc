"""What is deleted, and when: only after a newer checkpoint has committed, and never the last good one.

Checkpoints are ordered by the step and generation that their manifests record; names and times do not count
(invariant 5). The sweep after a commit counts and deletes only checkpoints on the lineage of the running generation:
an abandoned history is no business of a running job. `unbroken prune` may be told to delete those too.

The order of a deletion, and what a crash leaves after each point (invariant 14): the manifest first, durably (the
checkpoint no longer exists; its files are leftovers), then the files, then the directory. Leftovers are found by the
next sweep, and so is what starts of the job that were killed left in `generations/`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass

from unbroken import faultpoints
from unbroken.errors import UnbrokenError
from unbroken.generations import DIRECTORY, Generation
from unbroken.manifest import MOST_BYTES, Manifest, decode, parse_step_directory
from unbroken.policy import Keep
from unbroken.store.local import LocalStore

log = logging.getLogger(__name__)

MANIFEST_NAME = re.compile(r"manifest(?:\.g([0-9]{4,9}))?\.json")
_TEMPORARY = re.compile(r"\.tmp-[0-9a-f]+|\.probe-([0-9]{4,9})-[0-9a-f]+")
_OUR_FILE = re.compile(r"g([0-9]{4,9})-rank-[0-9]{5,}(?:-[0-9]+)?(?:-kept)?\.safetensors|\.tmp-[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class Kept:
    """One checkpoint that lies in the run directory, with a manifest that can be read."""

    directory: str
    name: str
    """Of its manifest in the directory."""
    manifest: Manifest

    @property
    def order(self) -> tuple[int, int, int]:
        """Newer checkpoints have a greater one."""
        return (self.manifest.step, self.manifest.micro_step, self.manifest.generation)


@dataclass(frozen=True, slots=True)
class Contents:
    """What lies in the step directories of a run."""

    checkpoints: tuple[Kept, ...]
    """Newest first, of all histories."""
    leftovers: tuple[str, ...]
    """Files that no manifest refers to, in the run directory: of dead generations, and temporary ones."""
    directories: tuple[tuple[tuple[int, int], str], ...]
    """Step and name of each step directory."""


def look(store: LocalStore, generation: Generation) -> Contents:
    """Everything that retention may ever delete.

    Left out, and so never deleted: directories with a manifest that cannot be read, since its step cannot be known;
    files of `generation` and later ones that no manifest refers to, since they may be a save in progress.
    """
    checkpoints: list[Kept] = []
    leftovers: list[str] = []
    directories = []
    for directory in store.list(""):
        place = parse_step_directory(directory)
        found = _manifests(store, directory) if place is not None else None
        if place is None or found is None:
            continue
        directories.append((place, directory))
        checkpoints += found
        used = {file.name for kept in found for file in kept.manifest.files}
        for name in store.list(directory):
            match = _OUR_FILE.fullmatch(name)
            if match and name not in used and (match[1] is None or int(match[1]) < generation.number):
                leftovers.append(f"{directory}/{name}")
    checkpoints.sort(key=lambda kept: kept.order, reverse=True)
    return Contents(tuple(checkpoints), tuple(leftovers), tuple(directories))


def sweep(store: LocalStore, generation: Generation, keep: Keep) -> None:
    """Delete what `keep` does not keep, and what crashed saves of earlier generations left behind.

    Call only after a commit of `generation`, from the process that commits: no other one publishes, so temporary files
    are nobody's any more. Errors of single deletions are logged: the next sweep tries again.
    """
    contents = look(store, generation)
    ours = [kept for kept in contents.checkpoints if generation.reaches(kept.manifest.where)]
    problems = delete_files(store, [*contents.leftovers, *_leftovers_of_starts(store, generation.number)])
    for kept in ours[keep.last :]:
        problems += delete_checkpoint(store, kept)
    if ours:
        delete_empty_directories(store, contents, ours[0])
    for problem in problems:
        log.warning("%s; the next save tries again", problem)


def delete_checkpoint(store: LocalStore, kept: Kept) -> list[str]:
    """Delete one checkpoint, but no file that another manifest in its directory refers to. What went wrong."""
    problems = delete_files(store, [f"{kept.directory}/{kept.name}"])
    store.sync(kept.directory)
    faultpoints.reach("deleting")
    others = _manifests(store, kept.directory)
    if problems or others is None:
        return problems
    used = {file.name for other in others for file in other.manifest.files}
    for name in store.list(kept.directory):
        match = _OUR_FILE.fullmatch(name)
        # Of its generation and older ones there are no saves of this step any more, only what is left of failed ones.
        if match and name not in used and (match[1] is None or int(match[1]) <= kept.manifest.generation):
            problems += delete_files(store, [f"{kept.directory}/{name}"])
    store.delete_directory(kept.directory)
    return problems


def delete_files(store: LocalStore, names: Iterable[str]) -> list[str]:
    """Delete each that can be deleted. What went wrong with the others."""
    problems = []
    for name in names:
        try:
            store.delete(name)
        except OSError as error:
            problems.append(f"could not delete {name}: {error.strerror or error}")
    return problems


def delete_empty_directories(store: LocalStore, contents: Contents, newest: Kept) -> None:
    """An empty directory after the newest checkpoint may be the one a rank has just made for the next save."""
    for place, directory in contents.directories:
        if place < (newest.manifest.step, newest.manifest.micro_step):
            store.delete_directory(directory)


def _manifests(store: LocalStore, directory: str) -> list[Kept] | None:
    """The checkpoints in a step directory; None if a manifest there cannot be read."""
    found = []
    for name in store.list(directory):
        if MANIFEST_NAME.fullmatch(name):
            try:
                manifest = decode(store.read(f"{directory}/{name}", MOST_BYTES), f"{directory}/{name}")
            except (UnbrokenError, OSError, ValueError, EOFError) as error:
                log.debug("retention leaves %s alone: %s", directory, error)
                return None
            if (manifest.step, manifest.micro_step) != parse_step_directory(directory):
                log.debug("retention leaves %s alone: it was renamed", directory)
                return None
            found.append(Kept(directory, name, manifest))
    return found


def _leftovers_of_starts(store: LocalStore, current: int) -> list[str]:
    """What starts of the job that were killed left beside the generations' records.

    A newer start may be about to publish its record: it writes a temporary file that is gone anew, and its probe bears
    a higher number.
    """
    found = []
    for name in store.list(DIRECTORY):
        match = _TEMPORARY.fullmatch(name)
        if match is not None and (match[1] is None or int(match[1]) <= current):
            found.append(f"{DIRECTORY}/{name}")
    return found
