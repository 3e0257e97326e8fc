"""Find and end the processes of a proof, wherever they have gone.

torchrun starts workers in sessions of their own, and they outlive a killed agent. But everything started for a proof
inherits its marker in the environment, and the kernel shows the environment of every process in /proc: that finds
them all. Only processes that bear the marker are ever ended.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from unbroken.errors import DeadlineExceeded, UsageError

MARKER = "UNBROKEN_PROVE_ID"
"""Environment variable that marks every process of one proof."""
NODE = "UNBROKEN_PROVE_NODE"
"""Environment variable that says on which simulated node a process runs."""
KILL_DEADLINE_S = 10.0
_PROC = Path("/proc")
_LEDGER = re.compile(r"rank-(?P<rank>\d+)-g(?P<generation>\d+)-(?P<pid>\d+)\.jsonl")


@dataclass(frozen=True, slots=True)
class Process:
    """One live process of a proof."""

    pid: int
    parent: int
    environment: dict[str, str]
    """As it was when the program was started."""


def require_proc() -> None:
    """Raise UsageError where processes cannot be found."""
    if not (_PROC / "self" / "environ").exists():
        raise UsageError("prove needs Linux: it finds the job's processes in /proc, which is not there")


def marked(marker: str) -> list[Process]:
    """Every live process that bears `marker`. A process that ends meanwhile is left out, a zombie too."""
    found = []
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            process = _read(entry)
            if process is not None and process.environment.get(MARKER) == marker:
                found.append(process)
    return found


def on_node(processes: Iterable[Process], node: int) -> list[int]:
    """The process ids among `processes` that run on one simulated node."""
    return [process.pid for process in processes if process.environment.get(NODE) == str(node)]


def workers(processes: list[Process]) -> dict[int, int]:
    """Process ids of the job's workers by rank. Helpers that a worker has forked are not workers."""
    ranks = {process.pid: rank for process in processes if (rank := process.environment.get("RANK", "")).isdigit()}
    return {int(ranks[process.pid]): process.pid for process in processes if _leads(process, ranks)}


def recorded(ledger: Path, processes: list[Process]) -> dict[int, int]:
    """Process ids of ranks by what their ledgers are called: of workers that some other launcher has started.

    ledger  the directory of the ledgers; only processes among `processes` count
    """
    alive = {process.pid for process in processes}
    found: dict[int, tuple[int, int]] = {}
    for path in ledger.glob("*.jsonl"):
        named = _LEDGER.fullmatch(path.name)
        if named and int(named["pid"]) in alive:
            rank, newest = int(named["rank"]), (int(named["generation"]), int(named["pid"]))
            found[rank] = max(newest, found.get(rank, newest))
    return {rank: pid for rank, (_, pid) in found.items()}


def _leads(process: Process, ranks: dict[int, str]) -> bool:
    """True for a rank's own process: its parent, the launcher, has no rank or another one."""
    return process.pid in ranks and ranks.get(process.parent) != ranks[process.pid]


def kill(pids: Iterable[int]) -> None:
    """SIGKILL each; those that are gone already do not matter."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def terminate(pids: Iterable[int]) -> None:
    """SIGTERM each, as a scheduler does before it takes a machine away."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def kill_marked(marker: str) -> None:
    """End every process that bears `marker`, also those that are started meanwhile. Raises DeadlineExceeded."""
    end = time.monotonic() + KILL_DEADLINE_S
    while processes := marked(marker):
        kill(process.pid for process in processes)
        if time.monotonic() > end:
            pids = ", ".join(str(process.pid) for process in processes)
            raise DeadlineExceeded(f"processes {pids} of the proof did not end within {KILL_DEADLINE_S:g} s of SIGKILL")
        time.sleep(0.01)


def _read(entry: Path) -> Process | None:
    try:
        # The name in `stat` may hold spaces and parentheses: the fields that count follow the last parenthesis.
        state, parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
        variables = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
    except (OSError, ValueError):
        return None
    if state == "Z":
        return None
    pairs = (variable.partition("=") for variable in variables)
    return Process(int(entry.name), int(parent), {name: value for name, _, value in pairs})
