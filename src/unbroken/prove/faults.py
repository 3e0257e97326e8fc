"""What strikes a job, when, and whom. The plan of a trial follows from the seed and the trial's number alone.

A moment is told in the undisturbed run's own steps, not in seconds: so it means the same on a slower machine. Pure:
`strike.py` carries a plan out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from unbroken.faultpoints import BEGIN, COMMIT, RESTORE, SAVE

KINDS = {
    "rank": "SIGKILL of one worker",
    "node": "every process of one node killed at once",
    "all": "every process of all nodes killed at once",
    "save": "a worker killed inside a save; each trial takes another of its points",
    "restore": "everything killed, then a worker killed while it restores",
    "sigterm": "SIGTERM to one worker, as a scheduler preempts",
    "disk-full": "no space for one save; everything killed a little later",
    "bit-flip": "everything killed, and one bit of the newest checkpoint flipped",
    "truncate": "everything killed, and a file of the newest checkpoint cut",
}
DEFAULT = ("rank", "node", "all", "save", "restore", "sigterm")
"""What a training script meets whatever its disk does."""
MORE_FAULTS = (0, 0, 0, 1, 1, 2)
"""How many more faults than one a trial has; drawn evenly."""
INSIDE = ("save", "restore", "disk-full")
"""Kinds that strike inside the job, at a point of faultpoints.py, and need a Checkpointer there."""
OF_ONE_WORKER = ("rank", "save", "restore", "sigterm")
"""Kinds that take one worker, which some launchers start again by themselves."""
SAVE_POINTS = (*SAVE, *COMMIT)
RESTORE_POINTS = (*RESTORE, *BEGIN)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, planned."""

    kind: str
    """One of KINDS."""
    victim: int | None
    """The rank or the node that is lost; None for all."""
    after_step: int
    """It strikes once some rank has done this step since the job was last started; 0: while the job starts."""
    delay: float
    """And then waits this share of a step's time (of the start's time for `after_step` 0)."""
    point: str = ""
    """Where inside the job, for kinds INSIDE."""
    checkpoints: int = 0
    """How many must have been committed before it may strike: there must be one to restore, or to fall back to."""
    required: bool = True
    """False if the trial says enough without it."""

    def __str__(self) -> str:
        victim = "" if self.victim is None else f" {self.victim}"
        return f"{self.kind}{victim}" + (f", {self.point}" if self.point else "")

    @property
    def ends_the_job(self) -> bool:
        """False for what a job is to survive by itself."""
        return self.kind != "disk-full"

    def earlier(self) -> Fault:
        """The same fault long before: for a job that had ended when this one was to strike."""
        return replace(self, after_step=self.after_step // 4, delay=self.delay / 2)


@dataclass(frozen=True, slots=True)
class Job:
    """What a plan needs to know of the job."""

    nodes: int
    world_size: int
    steps: int
    """Of the undisturbed run; 0 if it keeps no ledger, and `delay` is then a share of its whole time."""


def plan_trial(seed: int, trial: int, trials: int, kinds: Sequence[str], job: Job) -> list[Fault]:
    """The faults of trial number `trial`, from 1, in the order in which they strike; at least one.

    The kinds are dealt out to the `trials` trials, so that each strikes at least once, in the middle third of the run;
    a trial that is dealt none, and the further faults of one that is dealt one, take kinds at random.
    """
    order = random.Random(f"order/{seed}").sample(list(kinds), len(kinds))
    draw = random.Random(f"trial/{seed}/{trial}")
    dealt = order[trial - 1 :: trials]
    chosen = list(dealt) or [draw.choice(kinds)]
    if len(chosen) == 1:
        chosen += [draw.choice(kinds) for _ in range(draw.choice(MORE_FAULTS))]
    faults: list[Fault] = []
    for number, kind in enumerate(chosen):
        # A fault before the first checkpoint or after the last step says little: each kind strikes in the middle once.
        middle = bool(number < len(dealt) and job.steps)
        step = _middle(draw, job.steps) if middle else draw.randrange(max(1, job.steps))
        planned = _MAKE.get(kind, _simple)(_Draw(draw, kind, step, trial + number, job))
        further = number >= max(1, len(dealt))
        faults += [replace(fault, required=fault.required and not further) for fault in planned]
    return faults


@dataclass(frozen=True, slots=True)
class _Draw:
    """What the faults of one kind are drawn from."""

    draw: random.Random
    kind: str
    step: int
    turn: int
    """Points of a save and a restore take turns."""
    job: Job

    def rank(self) -> int:
        return self.draw.randrange(self.job.world_size)

    def point(self, points: Sequence[str]) -> tuple[str, int]:
        """A point, and a rank that passes it."""
        point = points[self.turn % len(points)]
        return point, 0 if point in COMMIT or point in BEGIN else self.rank()


def _middle(draw: random.Random, steps: int) -> int:
    return draw.randint(steps // 3, max(steps // 3, 2 * steps // 3))


def _simple(of: _Draw) -> list[Fault]:
    victim = {"rank": of.rank(), "sigterm": of.rank(), "node": of.draw.randrange(of.job.nodes)}.get(of.kind)
    return [Fault(of.kind, victim, of.step, of.draw.random())]


def _save(of: _Draw) -> list[Fault]:
    point, rank = of.point(SAVE_POINTS)
    return [Fault("save", rank, of.step, 0.0, point)]


def _restore(of: _Draw) -> list[Fault]:
    point, rank = of.point(RESTORE_POINTS)
    return [
        Fault("all", None, of.step, of.draw.random(), checkpoints=1),
        Fault("restore", rank, 0, 0.0, point),
    ]


def _disk_full(of: _Draw) -> list[Fault]:
    point, rank = of.point(("half a file", "half a manifest"))
    return [
        Fault("disk-full", rank, of.step, 0.0, point),
        Fault("all", None, of.step, 4 * of.draw.random(), required=False),
    ]


def _damage(of: _Draw) -> list[Fault]:
    return [Fault(of.kind, None, of.step, of.draw.random(), checkpoints=2)]


_MAKE: dict[str, Callable[[_Draw], list[Fault]]] = {
    "save": _save,
    "restore": _restore,
    "disk-full": _disk_full,
    "bit-flip": _damage,
    "truncate": _damage,
}
