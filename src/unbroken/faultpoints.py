"""Named points in a save and in a restore at which a proof can strike this process.

`unbroken prove` and the tests ask for a fault through the environment: die, or find the disk full, at one point of one
rank once some step is reached. Nothing happens anywhere else: without the variable a point costs one look at a name.
"""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Literal

import msgspec

from unbroken.errors import UsageError

VARIABLE = "UNBROKEN_FAULT"
"""Environment variable that holds a `Fault` as JSON."""

SAVE = {
    "entered": "before the state is copied",
    "copied": "the state is copied, nothing is written",
    "half a file": "half of a rank's file is written",
    "written": "a rank's file is durable, its vote is not cast",
    "voted": "the vote is cast, the outcome is not known",
}
"""Points of a save, in order, that every rank passes."""
COMMIT = {
    "all voted": "all ranks have voted, nothing is published",
    "half a manifest": "half of the manifest is written, under a temporary name",
    "published": "the manifest is published, no rank knows",
    "told": "all ranks know, nothing older is deleted",
    "deleting": "an older checkpoint has lost its manifest, not its files",
}
"""Points of a save, in order, that rank 0 alone passes."""
RESTORE = {
    "announced": "the checkpoint is chosen, nothing is read",
    "reading": "the first bytes are read into place",
    "read": "all bytes are in place, nothing else is",
    "filled": "the whole state is in place, no generation is begun",
}
"""Points of a restore, in order, that every rank passes."""
BEGIN = {"begun": "the generation is recorded, no other rank knows"}
"""Points of a restore that rank 0 alone passes."""


class Fault(msgspec.Struct, frozen=True):
    """What shall happen, where and when."""

    point: str
    """One of the names above."""
    rank: int
    """The rank that is struck."""
    told: str
    """A file that is created when the fault strikes; while it exists the fault does not strike again."""
    from_step: int = 0
    """Points of a save strike from the save of this step on."""
    act: Literal["kill", "no space"] = "kill"
    """SIGKILL to this process, or the error of a full disk."""


def _asked_for() -> Fault | None:
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    try:
        return msgspec.json.decode(text, type=Fault)
    except msgspec.MsgspecError as error:
        raise UsageError(f"{VARIABLE} is set by `unbroken prove` and its tests; unset it ({error})") from error


armed = _asked_for()
"""The fault that was asked for; None in every job that nobody tests."""
_saving_step = -1


def saving(step: int) -> None:
    """The training thread begins to save `step`."""
    global _saving_step
    _saving_step = step


def reach(point: str) -> None:
    """Strike if the fault that was asked for waits at `point`. Raises OSError for a disk that is full."""
    if armed is None or armed.point != point or os.environ.get("RANK", "0") != str(armed.rank):
        return  # some launchers tell a worker its rank only after it has begun
    if (point in SAVE or point in COMMIT) and _saving_step < armed.from_step:
        return
    try:
        Path(armed.told).touch(exist_ok=False)
    except FileExistsError:
        return
    if armed.act == "no space":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.kill(os.getpid(), signal.SIGKILL)
