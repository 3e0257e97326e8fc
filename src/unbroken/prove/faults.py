"""What strikes a job, when, and whom. The plan of a trial follows from the seed and the trial's number alone.

A moment is told in the undisturbed run's own steps, not in seconds: so it means the same on a slower machine.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from unbroken.prove.nodes import Node
from unbroken.prove.processes import KILL_DEADLINE_S, kill, marked, workers

KINDS = {
    "rank": "SIGKILL of one worker",
    "node": "every process of one node killed at once",
    "all": "every process of all nodes killed at once",
}
MORE_FAULTS = (0, 0, 0, 1, 1, 2)
"""How many more faults than one a trial has; drawn evenly."""


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
    """And then waits this share of a step's time (of the start's time for `after_step` 0), from 0 to 1."""

    def __str__(self) -> str:
        return self.kind if self.victim is None else f"{self.kind} {self.victim}"

    def earlier(self) -> Fault:
        """The same fault long before: for a job that had ended when this one was to strike."""
        return replace(self, after_step=self.after_step // 4, delay=self.delay / 2)


def plan_trial(seed: int, trial: int, kinds: Sequence[str], nodes: int, world_size: int, steps: int) -> list[Fault]:
    """The faults of one trial, in the order in which they strike; at least one.

    trial  from 1; the first `len(kinds)` trials take one kind after another, in the middle third of the run
    steps  of the undisturbed run; 0 if it keeps no ledger, and `delay` is then a share of its whole time
    """
    order = random.Random(f"order/{seed}").sample(list(kinds), len(kinds))
    draw = random.Random(f"trial/{seed}/{trial}")
    first = order[trial - 1] if trial <= len(order) else draw.choice(kinds)
    chosen = [first, *(draw.choice(kinds) for _ in range(draw.choice(MORE_FAULTS)))]
    faults = [_draw(draw, kind, nodes, world_size, steps) for kind in chosen]
    if trial <= len(order) and steps:
        # A fault before the first checkpoint or after the last step says little: each kind strikes in the middle once.
        faults[0] = replace(faults[0], after_step=draw.randint(steps // 3, max(steps // 3, 2 * steps // 3)))
    return faults


def strike(fault: Fault, nodes: Sequence[Node], marker: str) -> bool:
    """Kill what the fault kills; False if nothing of it is running (yet, or any more)."""
    if fault.kind == "rank":
        pid = workers(marked(marker)).get(fault.victim or 0)
        kill([] if pid is None else [pid])
        return pid is not None
    struck = [node for node in nodes if fault.kind == "all" or node.index == fault.victim]
    found = False
    end = time.monotonic() + KILL_DEADLINE_S
    # Again until nothing is left: what was being forked during the first sweep belongs to the lost node too.
    while pids := [pid for node in struck for pid in node.pids()]:
        found = True
        kill(pids)
        if time.monotonic() > end:
            break  # Job.end kills the rest, and raises if it cannot
    return found


def _draw(draw: random.Random, kind: str, nodes: int, world_size: int, steps: int) -> Fault:
    victim = {"rank": draw.randrange(world_size), "node": draw.randrange(nodes)}.get(kind)
    return Fault(kind, victim, draw.randrange(steps) if steps else 0, draw.random())
