"""Carry a planned fault out on a running job.

Faults inside a save or a restore are asked for through the environment when the job is started, and strike by
themselves at a point that no one outside can hit (faultpoints.py); a file tells when. All others are done from here.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from unbroken import faultpoints
from unbroken.prove.damage import committed, damage
from unbroken.prove.faults import INSIDE, Fault
from unbroken.prove.launch import Place
from unbroken.prove.nodes import Node
from unbroken.prove.processes import KILL_DEADLINE_S, kill, marked, recorded, terminate, workers


def arm(fault: Fault | None, told: Path) -> dict[str, str]:
    """What the environment of a start needs so that `fault` strikes in it; `told` appears when it has."""
    if fault is None or fault.kind not in INSIDE:
        return {}
    asked = faultpoints.Fault(
        fault.point,
        fault.victim or 0,
        str(told),
        fault.after_step,
        "no space" if fault.kind == "disk-full" else "kill",
    )
    return {faultpoints.VARIABLE: msgspec.json.encode(asked).decode()}


def may_strike(fault: Fault, run: Path) -> bool:
    """False while the run directory does not hold the checkpoints that the fault needs."""
    if not fault.checkpoints:
        return True
    count = committed(run)
    return count is None or count >= fault.checkpoints


def strike(fault: Fault, nodes: Sequence[Node], marker: str, place: Place, draw: random.Random) -> str | None:
    """Do what the fault does; how, for the report, or None if there was nothing to strike (yet, or any more)."""
    if fault.kind in INSIDE:
        return fault.point  # it has struck by itself
    if fault.kind in ("rank", "sigterm"):
        processes = marked(marker)
        pid = (workers(processes) or recorded(place.ledger, processes)).get(fault.victim or 0)
        if pid is None:
            return None
        (terminate if fault.kind == "sigterm" else kill)([pid])
        return ""
    struck = [node for node in nodes if fault.kind != "node" or node.index == fault.victim]
    if not _kill_nodes(struck):
        return None
    return (
        (damage(place.run, fault.kind, draw) or "no file to damage") if fault.kind in ("bit-flip", "truncate") else ""
    )


def _kill_nodes(nodes: Sequence[Node]) -> bool:
    """Kill every process of `nodes`; False if nothing was running."""
    found = False
    end = time.monotonic() + KILL_DEADLINE_S
    # Again until nothing is left: what was being forked during the first sweep belongs to the lost node too.
    while pids := [pid for node in nodes for pid in node.pids()]:
        found = True
        kill(pids)
        if time.monotonic() > end:
            break  # Job.end kills the rest, and raises if it cannot
    return found
