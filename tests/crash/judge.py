"""May this be found after a crash? Restores what lies in a directory with the code a restart uses, and goes on.

In: a tree of files, and what was promised. Out: nothing if all is well, else what is wrong, in a sentence.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from crash.filesystem import Tree, digest
from crash.lives import RUN, Live, start, state_of
from unbroken import generations
from unbroken.candidates import candidates, find_tip, saved_for, saved_tensors
from unbroken.errors import UnbrokenError
from unbroken.manifest import Manifest, decode, parse_step_directory
from unbroken.policy import Keep
from unbroken.reading import read_tensors, targets_of
from unbroken.retention import MANIFEST_NAME
from unbroken.store.local import LocalStore


@dataclass
class Judge:
    """Judges states, each one once. Works in a directory of its own."""

    base: Path
    world_size: int
    atomic: bool = True
    """False where the file system has no hard links: then a record may be found cut, and is passed over."""
    judged: dict[object, str] = field(default_factory=dict)
    went_on: dict[object, str] = field(default_factory=dict)

    def verdict(self, tree: Tree, promised: int | None, at_least: int = 1) -> str:
        """What is wrong with this state; empty if nothing is.

        promised  the newest step whose save was reported as committed, None before the first
        at_least  how many checkpoints must be there, if any was promised
        """
        key = (digest(tree), promised, at_least)
        if key not in self.judged:
            self.judged[key] = self._verdict(tree, promised, at_least)
        return self.judged[key]

    def _verdict(self, tree: Tree, promised: int | None, at_least: int) -> str:
        write(tree, self.base)
        root = self.base / RUN
        problem, found = examine(root, self.world_size, self.atomic)
        if problem:
            return problem
        if promised is not None and (not found or found[0] < promised):
            return f"step {promised} was committed, but {f'step {found[0]}' if found else 'nothing'} is the newest"
        if promised is not None and len(found) < at_least:
            return f"{at_least} checkpoints were to be kept, but steps {found} are there"
        # What lies in files that no manifest names cannot matter for what comes next: only their names do.
        names = digest({path: data if path.endswith(".json") else None for path, data in tree.items()})
        if names not in self.went_on:
            self.went_on[names] = go_on(root, self.world_size, found[0] if found else None, self.atomic)
        return self.went_on[names]


def write(tree: Tree, base: Path) -> None:
    """Make `base` hold exactly `tree`."""
    shutil.rmtree(base, ignore_errors=True)
    base.mkdir(parents=True)
    for path, content in sorted(tree.items()):
        if content is None:
            (base / path).mkdir()
        else:
            (base / path).write_bytes(content)


def read(base: Path) -> Tree:
    """What `base` holds."""
    return {path.relative_to(base).as_posix(): None if path.is_dir() else path.read_bytes() for path in base.rglob("*")}


def examine(root: Path, world_size: int, atomic: bool = True) -> tuple[str, list[int]]:
    """Whether every checkpoint that a restart would consider is whole and equal to what was saved; their steps."""
    store = LocalStore(root)
    try:
        tip, damaged = find_tip(store)
        found = list(candidates(store, tip))
    except UnbrokenError as error:
        return f"the directory cannot be read: {error}", []
    if damaged and atomic:
        return f"a record is damaged: {damaged[0]}", []
    for candidate in found:
        if candidate.manifest is None:
            if atomic:
                return f"{candidate.directory} is damaged: {candidate.problem}", []
            continue
        problem = _compare(store, candidate.directory, candidate.manifest, world_size)
        if problem:
            return problem, []
    return "", [candidate.step for candidate in found if candidate.manifest is not None]


def _compare(store: LocalStore, directory: str, manifest: Manifest, world_size: int) -> str:
    for rank in range(world_size):
        saved = saved_for(manifest, rank, world_size)
        live = Live()
        restoration = live.prepare(saved_tensors(saved.records), saved.values, strict=True)
        targets = {name: targets_of(target, None, rank) for name, target in restoration.targets.items()}
        try:
            read_tensors(store, directory, manifest, saved.records, targets)
        except UnbrokenError as error:
            return f"{directory} is damaged: {error}"
        if not live.equals(state_of(rank, manifest.step, world_size)):
            return f"{directory} is not what rank {rank} saved"
    return ""


def go_on(root: Path, world_size: int, newest: int | None, atomic: bool = True) -> str:
    """Restart in the directory, save the next step, and restart once more: what goes wrong, if anything."""
    taken = generations.highest_seen(LocalStore(root))
    following = (newest or 0) + 1
    try:
        job = start(root, world_size, Keep(last=3))
    except UnbrokenError as error:
        return f"the job does not start: {error}"
    manifest = job.restored.manifest
    restored = manifest.step if manifest is not None else None
    if restored != newest or not all(
        live.equals(state_of(rank, restored, world_size)) for rank, live in enumerate(job.live) if restored is not None
    ):
        job.close()
        return f"the job went on from step {restored} instead of {newest}"
    number = job.sessions[0].starts
    outcome = job.save(following)
    job.close()
    if number <= taken:
        return f"generation {number} was given out again"
    if not outcome.committed:
        return f"the next save fails: {outcome.reason}"
    problem, found = examine(root, world_size, atomic)
    if problem or found[:1] != [following]:
        return f"after the next save: {problem or f'steps {found} are there'}"
    return leftovers(root) if atomic else ""


def leftovers(root: Path) -> str:
    """Something that no checkpoint and no generation needs; empty if there is nothing."""
    store = LocalStore(root)
    for name in store.list(generations.DIRECTORY):
        if not name.endswith(".json"):
            return f"{generations.DIRECTORY}/{name} is left over"
    for directory in store.list(""):
        if parse_step_directory(directory) is None:
            continue
        names = store.list(directory)
        used = set(filter(MANIFEST_NAME.fullmatch, names))
        for name in [*used]:
            used |= _files_of(root / directory / name)
        if set(names) - used or not used:
            return f"{directory} holds {sorted(set(names) - used) or 'nothing'}, which nobody needs"
    return ""


def _files_of(path: Path) -> set[str]:
    return {file.name for file in decode(path.read_bytes(), path.name).files}
