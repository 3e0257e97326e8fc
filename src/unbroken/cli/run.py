"""A run directory as the commands see it: from outside the job, while it trains or long after."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from unbroken.candidates import Place, candidates, find_tip, manifest_places
from unbroken.cli.output import stderr
from unbroken.errors import DamagedCheckpoint, UsageError
from unbroken.generations import Generation
from unbroken.manifest import MANIFEST, Manifest, parse_step_directory, step_directory
from unbroken.retention import MANIFEST_NAME
from unbroken.store.local import LocalStore
from unbroken.verification import Progress as Advance

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The run directory.", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
ADDRESS = "A run directory, RUN@STEP, RUN/step-STEP, or a manifest in it."
"""Help of an argument that `address` resolves."""


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
    name: str = MANIFEST
    """Of its manifest in the directory."""

    @property
    def committed(self) -> bool:
        """False for a save that was never finished, or is being written right now."""
        return self.manifest is not None or bool(self.problem)

    @property
    def place(self) -> Place:
        """Where its manifest lies."""
        return Place(self.step, self.micro_step, self.directory, self.name)


def open_run(path: Path) -> LocalStore:
    """The store at `path`. Raises UsageError if no run was ever there."""
    if not path.is_dir():
        raise UsageError(f"{path} is not a directory; give the run directory that a Checkpointer was given")
    if parse_step_directory(path.absolute().name) and (path / MANIFEST).exists():
        raise UsageError(f"{path} is a single checkpoint; give the run directory above it: {path.absolute().parent}")
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
        where = (candidate.directory, candidate.step, candidate.micro_step)
        found.append(Entry(*where, manifest, on_lineage, candidate.problem, candidate.name))
    for directory in store.list(""):
        place = parse_step_directory(directory)
        if place is not None and not any(map(MANIFEST_NAME.fullmatch, store.list(directory))):
            found.append(Entry(directory, *place, None, False))
    return tip, sorted(found, key=_order, reverse=True)


def choose(store: LocalStore, step: str | None, generation: int | None = None) -> Entry:
    """The checkpoint of `step` (`40`, or `40.1` in the accumulation window after it); else the newest restorable one.

    A step that was saved in several histories means the one on the current lineage, unless `generation` says which
    start of the job wrote it. The manifest of what is returned is not None. Raises UsageError, DamagedCheckpoint.
    """
    _, found = entries(store)
    usable = [entry for entry in found if entry.manifest is not None]
    if step is None:
        chosen = next((entry for entry in usable if entry.on_lineage), None)
        if chosen is None:
            damaged = next((entry.problem for entry in found if entry.problem), "")
            if damaged:
                raise DamagedCheckpoint(f"{store.root} holds no checkpoint that could be restored: {damaged}")
            raise UsageError(f"{store.root} holds no checkpoint that could be restored; see `unbroken ls {store.root}`")
        return chosen
    named = [entry for entry in usable if entry.directory == f"step-{step}" and _is_of(entry, generation)]
    if not named:
        damaged = next((entry.problem for entry in found if entry.directory == f"step-{step}" and entry.problem), "")
        if damaged:
            raise DamagedCheckpoint(f"step {step} in {store.root} cannot be used: {damaged}")
        raise UsageError(_no_such_step(store, step, generation, found))
    on_lineage = [entry for entry in named if entry.on_lineage]
    if not on_lineage and len(named) > 1:
        numbers = ", ".join(str(entry.manifest.generation) for entry in named if entry.manifest)
        raise UsageError(f"step {step} was saved by generations {numbers}, all abandoned: give --generation")
    return (on_lineage or named)[0]


def address(path: Path) -> tuple[LocalStore, Entry]:
    """The checkpoint that a path means, see ADDRESS; of a run the newest restorable one. Raises UsageError."""
    text = str(path)
    run, at, step = text.rpartition("@")
    if at and not path.exists():
        return _chosen(Path(run), step)
    path = path.absolute()
    if MANIFEST_NAME.fullmatch(path.name) and parse_step_directory(path.parent.name):
        return _of_manifest(path.parent.parent, path.parent.name, path.name)
    if parse_step_directory(path.name) and any(MANIFEST_NAME.fullmatch(child.name) for child in _children(path)):
        return _chosen(path.parent, path.name.removeprefix("step-"))
    return _chosen(Path(text), None)


def _children(path: Path) -> list[Path]:
    return list(path.iterdir()) if path.is_dir() else []


def _chosen(run: Path, step: str | None) -> tuple[LocalStore, Entry]:
    store = open_run(run)
    return store, choose(store, step)


def _of_manifest(run: Path, directory: str, name: str) -> tuple[LocalStore, Entry]:
    store = open_run(run)
    for entry in entries(store)[1]:
        if (entry.directory, entry.name) == (directory, name) and entry.manifest is not None:
            return store, entry
    raise UsageError(f"{run / directory / name} is no manifest that can be used; see `unbroken verify {run}`")


def choose_any(store: LocalStore, step: str) -> None:
    """Make sure that something lies there of `step`, good or not. Raises UsageError."""
    if not any(place.directory == f"step-{step}" for place in manifest_places(store)):
        raise UsageError(_no_such_step(store, step, None, entries(store)[1]))


def _is_of(entry: Entry, generation: int | None) -> bool:
    return generation is None or (entry.manifest is not None and entry.manifest.generation == generation)


def _no_such_step(store: LocalStore, step: str, generation: int | None, found: list[Entry]) -> str:
    for entry in found:
        if entry.directory == f"step-{step}" and entry.manifest is None:
            return f"step {step} in {store.root} cannot be used: {entry.problem or 'it was never committed'}"
    of = "" if generation is None else f" of generation {generation}"
    steps = ", ".join(entry.directory.removeprefix("step-") for entry in found if entry.manifest is not None)
    return f"{store.root} holds no checkpoint of step {step}{of}; it holds {f'steps {steps}' if steps else 'none'}"


def _order(entry: Entry) -> tuple[int, int, int]:
    return (entry.step, entry.micro_step, entry.manifest.generation if entry.manifest else -1)


def step_text(entry: Entry | Manifest | Place) -> str:
    """`40`, or `40.1`."""
    return step_directory(entry.step, entry.micro_step).removeprefix("step-")


def complete_step(context: typer.Context, incomplete: str) -> list[str]:
    """For shells: the steps of the run that was typed before, newest first."""
    # A line that ends with `--step` cannot be parsed: then RUN is among what is left over.
    run = context.params.get("run") or next((word for word in context.args if not word.startswith("-")), None)
    try:
        names = LocalStore(Path(run)).list("") if run else []
    except (OSError, ValueError):
        return []
    steps = sorted(((place, name) for name in names if (place := parse_step_directory(name))), reverse=True)
    found = [name.removeprefix("step-") for _, name in steps]
    return [step for step in found if step.startswith(incomplete)]


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Advance]:
    """A bar on stderr while bytes are read, if stderr is a terminal. Gives what to call with bytes just read."""
    console = stderr()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.update(task, advance=count)
