"""A run directory as `ls` and `show` see it: read only, from outside the job, while it trains or long after."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from unbroken.candidates import candidates, find_tip
from unbroken.errors import UsageError
from unbroken.generations import Generation
from unbroken.manifest import MANIFEST, Manifest, parse_step_directory, step_directory
from unbroken.retention import MANIFEST_NAME
from unbroken.store.local import LocalStore


@dataclass(frozen=True, slots=True)
class Entry:
    """One checkpoint in a run directory, or what is left of one."""

    directory: str
    step: int
    micro_step: int
    manifest: Manifest | None
    """None if it cannot be used."""
    on_lineage: bool
    """True if the next start of the job may restore it; False if it belongs to a history that was abandoned."""
    problem: str = ""
    """Why it cannot be used; empty also if it was never committed."""

    @property
    def committed(self) -> bool:
        """False for a save that was never finished, or is being written right now."""
        return self.manifest is not None or bool(self.problem)


def open_run(path: Path) -> LocalStore:
    """The store at `path`. Raises UsageError if no run was ever there."""
    if not path.is_dir():
        raise UsageError(f"{path} is not a directory; give the run directory that a Checkpointer was given")
    if parse_step_directory(path.name) and (path / MANIFEST).exists():
        raise UsageError(f"{path} is a single checkpoint; give the run directory above it: {path.parent}")
    return LocalStore(path)


def entries(store: LocalStore) -> tuple[Generation | None, list[Entry]]:
    """The newest generation and every checkpoint, newest first, also abandoned, unfinished and damaged ones.

    Only manifests are read, and the sizes of files; the bytes of tensors are not verified. Raises NewerFormat.
    """
    tip, _ = find_tip(store)
    found = []
    for candidate in candidates(store, None):
        manifest = candidate.manifest
        on_lineage = manifest is not None and (tip is None or tip.reaches(manifest.where))
        found.append(
            Entry(candidate.directory, candidate.step, candidate.micro_step, manifest, on_lineage, candidate.problem)
        )
    for directory in store.list(""):
        place = parse_step_directory(directory)
        if place is not None and not any(map(MANIFEST_NAME.fullmatch, store.list(directory))):
            found.append(Entry(directory, *place, None, False))
    return tip, sorted(found, key=_order, reverse=True)


def choose(store: LocalStore, step: str | None) -> Manifest:
    """The manifest of `step` (`40`, or `40.1` in the accumulation window after it); the newest that can be restored.

    A step that was saved in several histories means the one on the current lineage. Raises UsageError.
    """
    _, found = entries(store)
    usable = [entry for entry in found if entry.manifest is not None]
    if step is None:
        chosen = next((entry for entry in usable if entry.on_lineage), None)
        if chosen is None:
            raise UsageError(f"{store.root} holds no checkpoint that could be restored; see `unbroken ls {store.root}`")
    else:
        named = [entry for entry in usable if entry.directory == f"step-{step}"]
        chosen = next((entry for entry in named if entry.on_lineage), named[0] if named else None)
        if chosen is None:
            raise UsageError(_no_such_step(store, step, found))
    assert chosen.manifest is not None
    return chosen.manifest


def _no_such_step(store: LocalStore, step: str, found: list[Entry]) -> str:
    for entry in found:
        if entry.directory == f"step-{step}":
            return f"step {step} in {store.root} cannot be shown: {entry.problem or 'it was never committed'}"
    steps = ", ".join(entry.directory.removeprefix("step-") for entry in found if entry.manifest is not None)
    return f"{store.root} holds no checkpoint of step {step}; it holds {f'steps {steps}' if steps else 'none'}"


def _order(entry: Entry) -> tuple[int, int, int]:
    return (entry.step, entry.micro_step, entry.manifest.generation if entry.manifest else -1)


def step_text(entry: Entry | Manifest) -> str:
    """`40`, or `40.1`."""
    return step_directory(entry.step, entry.micro_step).removeprefix("step-")
