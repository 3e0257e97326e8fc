"""Lives of a run that are recorded and then cut at every moment: what is saved, kept, left behind, and goes wrong.

A story gets a recorder and a run directory and plays; what it returns is the number of events after which cuts begin,
a quiet moment.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias
from unittest.mock import patch

from crash.lives import RUN, start
from crash.recorder import Call, Event, Recorder
from unbroken.policy import Keep

Story: TypeAlias = Callable[[Recorder, Path, int], int]
"""Plays with a recorder, in a run directory, on so many ranks."""
USES_SPACE = ("mkdir", "create", "write", "sync", "link")
"""Calls that a full disk can fail."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A story that was played."""

    trace: list[Event] = field(repr=False)
    since: int
    base: Path
    """The recorded directory as the story left it."""


def play(story: Story, base: Path, world_size: int) -> Recording:
    """Play a story in a new directory and record it."""
    base.mkdir(parents=True, exist_ok=True)
    with Recorder(base) as recorder:
        since = story(recorder, base / RUN, world_size)
    return Recording(recorder.trace, since, base)


def first_save(recorder: Recorder, root: Path, world_size: int) -> int:
    """The directory is made, the first generation begins, the first checkpoint is saved."""
    job = start(root, world_size, recorder=recorder)
    job.save(1)
    job.close()
    return 0


def second_save(recorder: Recorder, root: Path, world_size: int) -> int:
    """A job restarts, which begins a generation, and saves the step after the one it restored."""
    since = _saved(recorder, root, world_size, [1], None)
    job = start(root, world_size, recorder=recorder)
    job.save(2)
    job.close()
    return since


def keeping(last: int) -> Story:
    """Saves with retention: each deletes one, while the next is being written."""

    def story(recorder: Recorder, root: Path, world_size: int) -> int:
        _saved(recorder, root, world_size, list(range(1, last + 1)), Keep(last=last))
        job = start(root, world_size, Keep(last=last), recorder)
        since = recorder.quiet()
        job.save(last + 1)
        job.save(last + 2)
        job.close()
        return since

    return story


def abandoned(recorder: Recorder, root: Path, world_size: int) -> int:
    """A dead generation left a checkpoint off our lineage; we save the same step, and its manifest is moved aside."""
    _saved(recorder, root, world_size, [1], None)
    old = start(root, world_size)
    new = start(root, world_size, Keep(last=2), recorder)
    with patch("unbroken.commit.newest_number", lambda _store: 2):  # the old one passed the fence just before
        assert old.save(2).committed
    old.close()
    since = recorder.quiet()
    new.save(2)
    new.close()
    return since


def saved_again(recorder: Recorder, root: Path, world_size: int) -> int:
    """A job saves the very step it restored: the manifest that is moved aside is on its lineage."""
    _saved(recorder, root, world_size, [1], None)
    job = start(root, world_size, Keep(last=1), recorder)
    since = recorder.quiet()
    job.save(1)
    job.close()
    return since


def disk_full(nth: int, reached: list[int], again: bool = False) -> Story:
    """The second save fails at its `nth` call that uses space; `reached` gets the place of it, if there was one.

    Cuts begin there: what comes before is a save like any other.

    again  save the step again afterwards, with room
    """

    def story(recorder: Recorder, root: Path, world_size: int) -> int:
        _saved(recorder, root, world_size, [1], Keep(last=1))
        job = start(root, world_size, Keep(last=1), recorder)
        left = [nth]

        def full(call: Call) -> OSError | None:
            left[0] -= call.kind in USES_SPACE
            if left[0] != 0 or call.kind not in USES_SPACE:
                return None
            reached.append(len(recorder.trace))
            return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        recorder.fail = full
        job.save(2)
        recorder.fail = lambda _call: None
        if again:
            job.save(2, attempt=1)
        job.close()
        end = recorder.quiet()
        return reached[0] if reached else end

    return story


def without_hard_links(recorder: Recorder, root: Path, world_size: int) -> int:
    """The file system refuses links: records are created exclusively, in place."""
    since = _saved(recorder, root, world_size, [1], None)
    recorder.fail = lambda call: OSError(errno.EPERM, "no links") if call.kind == "link" else None
    job = start(root, world_size, recorder=recorder)
    job.save(2)
    job.close()
    return since


def _saved(recorder: Recorder, root: Path, world_size: int, steps: list[int], keep: Keep | None) -> int:
    """A job that saved `steps` and ended well."""
    job = start(root, world_size, keep, recorder)
    for step in steps:
        job.save(step)
    job.close()
    return recorder.quiet()
