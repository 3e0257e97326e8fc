"""What the user forgot to register: it lives in the process, looks like training state, and is in no checkpoint.

    Coverage(registered)   when the Checkpointer is made
    .look()                then, and again when the job was restored: what is alive, and what it is like
    .check()               at the first save: what is alive, not covered, and new or changed since

A false alarm costs more trust than it brings, so in doubt nothing is said; the design page lists what is not noticed.
Runs on the training thread. Nothing here may disturb training: it draws nothing, runs no code of what it looks at,
keeps nothing alive, and lets no error out but NotCovered.
"""

from __future__ import annotations

import gc
import logging
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import TypeVar

from unbroken.coverage.alive import is_resumable
from unbroken.coverage.movement import Mark
from unbroken.coverage.search import Search
from unbroken.errors import NotCovered
from unbroken.garbage import without_collecting

log = logging.getLogger(__name__)
T = TypeVar("T")

SHOWN = 5
"""So many are named in a message, the others counted."""
KINDS = ("optimizer", "scheduler", "scaler", "generator", "module", "tensors", "loader", "object")
"""In the order in which they are told of."""


@dataclass(frozen=True, slots=True)
class Uncovered:
    """Something that lives in the process, looks like training state, and is not saved."""

    kind: str
    """One of KINDS."""
    name: str
    """The variable's name if one leads to it (`ema`, `trainer.ema`), else the class; unique in one list. The same in
    every run of a script."""
    cls: str
    """Name of its class."""
    value: object
    """The live object."""

    def __str__(self) -> str:
        return f"{self.kind} `{self.name}` ({self.cls})"


class Coverage:
    """What one Checkpointer saves, as long as it lives, and what the rest of the process was like before training."""

    def __init__(self, registered: Mapping[str, object]) -> None:
        self.registered = dict(registered)
        self.before: dict[int, Mark] | None = None
        """What the latest look saw, by id; None before the first."""
        self._checked = False
        _all.add(self)

    @without_collecting()
    def look(self) -> None:
        """Remember what is not covered, and what it is like now. To be called before training goes on.

        Goes by the script's variables, to be cheap. What they do not lead to counts at the check like what is new.
        """
        nothing: dict[int, Mark] = {}
        self.before = _guarded(
            lambda: Search(_everything_registered(), sys._getframe(), everywhere=False).marks(), nothing
        )

    def check(self, *, strict: bool, loud: bool) -> None:
        """Say once what is not covered: with `strict` by NotCovered, else in a warning, or only for information."""
        if self._checked:
            return
        found = find_uncovered(self.registered, sys._getframe())
        if found and strict:
            raise NotCovered(f"{_message(found)}, or leave out strict=True", tuple(map(str, found)))
        self._checked = True
        if found:
            log.log(logging.WARNING if loud else logging.INFO, "%s", _message(found))


_all: weakref.WeakSet[Coverage] = weakref.WeakSet()
"""Of every Checkpointer that is alive: what one of them saves is not forgotten."""


def find_uncovered(registered: Mapping[str, object], frame: FrameType | None = None) -> list[Uncovered]:
    """What looks like training state and is saved by no Checkpointer; in order of kind and name.

    registered  what a Checkpointer was given. What it saw before training tells what has moved since; if there is no
                such Checkpointer, every generator in a variable counts, and a module only if an optimizer or gradients
                tell that it is trained
    frame       where to begin looking for variables; the caller's by default

    Never raises. If it finds something it runs the garbage collector and looks again: a training that is over leaves
    objects that only hold each other.
    """
    frame = frame or sys._getframe(1)
    before = next((each.before for each in list(_all) if _is_about(each, registered)), None)
    objects = [*registered.values(), *_everything_registered()]
    if not _guarded(lambda: bool(Search(objects, frame).found(before)), False):
        return []
    gc.collect()
    return _guarded(lambda: _named(Search(objects, frame), before), [])


def _is_about(coverage: Coverage, registered: Mapping[str, object]) -> bool:
    own = coverage.registered
    return own.keys() == registered.keys() and all(own[name] is registered[name] for name in own)


def _everything_registered() -> list[object]:
    return [value for coverage in list(_all) for value in coverage.registered.values()]


def _guarded(look: Callable[[], T], otherwise: T) -> T:
    """A bug in the search must not end a training."""
    try:
        return look()
    except Exception as error:
        log.warning("cannot tell whether all training state is registered: %s: %s", type(error).__name__, error)
        log.debug("the search failed", exc_info=True)
        return otherwise


def _named(search: Search, before: Mapping[int, Mark] | None) -> list[Uncovered]:
    found = [
        (one.kind, search.names.get(id(one.value), type(one.value).__name__), one.value) for one in search.found(before)
    ]
    found.sort(key=lambda entry: (KINDS.index(entry[0]), entry[1]))
    taken: Counter[str] = Counter()
    named = []
    for kind, name, value in found:
        taken[name] += 1
        unique = name if taken[name] == 1 else f"{name} {taken[name]}"
        named.append(Uncovered(kind, unique, type(value).__name__, value))
    return named


def _message(found: list[Uncovered]) -> str:
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    shown = ", ".join(map(str, found[:SHOWN]))
    loaders = any(one.kind == "loader" and not is_resumable(one.value) for one in found)
    how = " (a loader as unbroken.resumable(loader), which is iterated instead)" if loaders else ""
    return (
        f"not in the checkpoint, and looks like training state: {shown}{more}; register it in the Checkpointer's state"
        f"{how}"
    )
