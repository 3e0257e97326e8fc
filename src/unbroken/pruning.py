"""Deleting old checkpoints by hand, by the rules of retention, beside a running job or without one.

Before anything is deleted, every checkpoint that is to stay is read whole: damaged ones do not count as kept, and if
none is usable nothing is deleted at all (invariant 5). Only what is older than the newest usable checkpoint of the
current history is deleted: a running job never saves there again, so no file that it writes or publishes is touched,
not even one that it moves aside meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from unbroken.candidates import Place, find_tip
from unbroken.errors import NoUsableCheckpoint, UnbrokenError
from unbroken.generations import Generation, newest_number
from unbroken.policy import Keep
from unbroken.retention import Contents, Kept, delete_checkpoint, delete_empty_directories, delete_files, look
from unbroken.store.local import LocalStore
from unbroken.verification import Fault, Progress, verify_checkpoint


@dataclass(slots=True)
class Pruning:
    """What is to be deleted, and what stays."""

    newest_generation: int
    """When this was planned."""
    contents: Contents
    kept: list[Kept] = field(default_factory=list)
    """Usable, newest first."""
    damaged: list[Fault] = field(default_factory=list)
    """What is wrong with checkpoints that are newer than the oldest kept one; they are left alone."""
    checkpoints: list[Kept] = field(default_factory=list)
    """To be deleted, newest first."""
    leftovers: list[str] = field(default_factory=list)
    """Files to be deleted that no checkpoint refers to."""
    spared: list[Kept] = field(default_factory=list)
    """Of abandoned histories, but too new to be deleted beside a running job."""


def plan_pruning(store: LocalStore, keep: Keep, abandoned: bool, progress: Progress) -> Pruning:
    """What `keep` does not keep, and with `abandoned` also checkpoints of abandoned histories. Deletes nothing.

    Raises NoUsableCheckpoint if no checkpoint that would stay can be used, UnbrokenError if a damaged generation
    record leaves open which history is the current one, NewerFormat.
    """
    newest = newest_number(store)
    tip, warnings = find_tip(store)
    if tip is None:
        return Pruning(newest, Contents((), (), ()))
    if tip.number < newest:
        # The lost record may be a rollback to just the checkpoint that would be deleted as an old one.
        raise UnbrokenError(f"nothing is deleted: {warnings[0] if warnings else f'generation {newest} is unknown'}")
    plan = Pruning(newest, look(store, tip))
    ours = [kept for kept in plan.contents.checkpoints if tip.reaches(kept.manifest.where)]
    while ours and len(plan.kept) < keep.last:
        _verify(store, ours.pop(0), tip, plan, progress)
    if not plan.kept:
        raise NoUsableCheckpoint(
            f"nothing is deleted: {store.root} holds no usable checkpoint of the current history"
            + (f" ({plan.damaged[0]})" if plan.damaged else "")
        )
    plan.checkpoints = [kept for kept in ours if _is_older(kept, plan)]
    if abandoned:
        others = [kept for kept in plan.contents.checkpoints if not tip.reaches(kept.manifest.where)]
        plan.checkpoints += [kept for kept in others if _is_older(kept, plan)]
        plan.spared = [kept for kept in others if not _is_older(kept, plan)]
    plan.checkpoints.sort(key=lambda kept: kept.order, reverse=True)
    plan.leftovers = [name for name in plan.contents.leftovers if not _is_temporary(name) or _is_old(name, plan)]
    return plan


def prune(store: LocalStore, plan: Pruning) -> list[str]:
    """Carry out a plan. What went wrong; the rest was deleted all the same.

    Raises UnbrokenError, having deleted nothing, if the job was started again since the plan was made.
    """
    if newest_number(store) != plan.newest_generation:
        raise UnbrokenError("nothing is deleted: the job was started again meanwhile; prune again")
    problems = delete_files(store, plan.leftovers)
    for kept in plan.checkpoints:
        try:
            problems += delete_checkpoint(store, kept)
        except OSError as error:
            problems.append(f"could not delete {kept.directory}: {error.strerror or error}")
    if plan.kept:
        delete_empty_directories(store, plan.contents, plan.kept[0])
    return problems


def _verify(store: LocalStore, kept: Kept, tip: Generation, plan: Pruning, progress: Progress) -> None:
    manifest = kept.manifest
    place = Place(manifest.step, manifest.micro_step, kept.directory, kept.name)
    verified = verify_checkpoint(store, place, tip, progress)
    if verified.usable:
        plan.kept.append(kept)
    elif store.size(place.path) is not None:  # else a running job deleted it meanwhile
        plan.damaged += verified.faults


def _is_older(kept: Kept, plan: Pruning) -> bool:
    """True if a running job is past this step: it saves and moves aside only at later ones."""
    return kept.order[:2] < plan.kept[0].order[:2] or kept.manifest.where in plan.kept[0].manifest.lineage


def _is_temporary(name: str) -> bool:
    return name.rpartition("/")[2].startswith(".")


def _is_old(name: str, plan: Pruning) -> bool:
    """True for what lies in the directory of a step that a running job is past."""
    directory = name.partition("/")[0]
    places = {name: place for place, name in plan.contents.directories}
    return places[directory] < plan.kept[0].order[:2]
