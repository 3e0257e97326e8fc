"""Start a job, under torchrun with one launcher per node or as a script that starts its workers itself; watch it end.

Each launcher writes into a log file of its own. Whatever becomes of a job, `Job.end` leaves none of its processes.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from unbroken import faultpoints
from unbroken.directory import RUN_DIRECTORY
from unbroken.ledger import VARIABLE as LEDGER_DIRECTORY
from unbroken.prove.nodes import Node, free_port
from unbroken.prove.processes import MARKER, NODE, kill_marked

OUT = "{out}"
"""Stands for the run directory in a script's arguments."""
POLL_S = 0.01
_LAUNCHERS_OWN = re.compile(
    "RANK|LOCAL_RANK|GROUP_RANK|ROLE_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_WORLD_SIZE|ROLE_WORLD_SIZE|ROLE_NAME|"
    "MASTER_ADDR|MASTER_PORT|TORCHELASTIC_.*|PET_.*"
)
_RESTORED = re.compile(r"\brestored step (\d+)")
# torchrun's own exit code is 1 whatever its workers' was; its summary tells theirs.
_PREEMPTED = re.compile(r"^\s*exitcode\s*:\s*75\b", re.MULTILINE)
_LAUNCHERS_ACCOUNT = re.compile(r"[EW]\d{4} \d\d:\d\d:.*(Sending process|failed \(exitcode)")
_FINAL = re.compile(r"^final ([0-9a-f]+)\s*$", re.MULTILINE)
_UNCOVERED = re.compile(r"not in the checkpoint, and looks like training state: .*")


@dataclass(frozen=True, slots=True)
class Place:
    """Where one run, the undisturbed one or a trial, keeps what it writes."""

    root: Path

    @property
    def run(self) -> Path:
        """The run directory: checkpoints, and `final.txt`."""
        return self.root / "run"

    @property
    def ledger(self) -> Path:
        """The ledgers of all processes."""
        return self.root / "ledger"

    def final(self) -> str | None:
        """The digest of the final weights: from `final.txt`, else the last one that was printed, else None."""
        texts = [_text(self.run / "final.txt"), *map(_text, reversed(self.logs()))]
        return next((found[-1] for text in texts if (found := _FINAL.findall(text))), None)

    def logs(self) -> list[Path]:
        """What the launchers and workers printed, oldest start first."""
        return sorted(self.root.glob("start-*/node-*.log"))

    def uncovered(self) -> str:
        """The Checkpointer's warning about what is in no checkpoint, if the job printed one."""
        found = [line for path in self.logs() for line in _UNCOVERED.findall(_text(path))]
        return found[0].strip() if found else ""

    def last_lines(self, count: int = 15) -> str:
        """The end of what the job's newest start printed, of the launcher with most to say about an error."""
        newest = [_text(path).splitlines() for path in self.logs() if path.parent == self.logs()[-1].parent]
        told = max(newest, key=lambda lines: sum("Error" in line for line in lines), default=[])
        # The launcher's own account of a failed worker follows the script's and says nothing that is not there.
        ends = [number for number, line in enumerate(told) if _LAUNCHERS_ACCOUNT.match(line)]
        shown = told[: ends[0]] if ends else told
        return "\n".join(shown[-count:])


@dataclass(frozen=True, slots=True)
class Command:
    """What a user asked to prove."""

    script: tuple[str, ...]
    """A script and its arguments, or `-m`, a module and its arguments."""
    workers_per_node: int
    launcher: Literal["torchrun", "none"] = "torchrun"
    """none: the script starts its workers itself, and starts them again when one is lost."""


@dataclass(slots=True)
class Job:
    """One start of the job on all nodes. Used by one thread."""

    launchers: list[subprocess.Popen[bytes]]
    """By node."""
    logs: list[Path]
    marker: str
    started_at: float = field(default_factory=time.monotonic)

    def ended(self) -> bool:
        """True once every launcher has ended, by itself or not."""
        return all(launcher.poll() is not None for launcher in self.launchers)

    def codes(self) -> list[int]:
        """Exit codes of the launchers that have ended."""
        return [code for launcher in self.launchers if (code := launcher.poll()) is not None]

    def wait(self, deadline: float) -> bool:
        """Wait until every launcher has ended; False if one has not at `deadline` (of time.monotonic)."""
        while not self.ended():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True

    def end(self) -> None:
        """Kill whatever is left of the job: launchers, workers, and what they started."""
        for launcher in self.launchers:
            with contextlib.suppress(ProcessLookupError):
                launcher.kill()
        kill_marked(self.marker)
        for launcher in self.launchers:
            launcher.wait()

    def preempted(self) -> bool:
        """True if a worker left with code 75: it saved its state and wants to be started again."""
        return 75 in self.codes() or any(_PREEMPTED.search(_text(path)) for path in self.logs)

    def restored_step(self) -> int | None:
        """K of the line `restored step K …` that this start printed, if it did."""
        found = [int(step) for path in self.logs for step in _RESTORED.findall(_text(path))]
        return found[0] if found else None


def start(
    command: Command, nodes: Sequence[Node], place: Place, number: int, marker: str, armed: Mapping[str, str]
) -> Job:
    """Start the job on all `nodes`; `number` counts its starts in this place, from 1.

    marker  of this proof, in the environment of every process, by which `Job.end` finds them
    armed   further variables: a fault that strikes inside the job
    """
    place.run.mkdir(parents=True, exist_ok=True)
    place.ledger.mkdir(exist_ok=True)
    directory = place.root / f"start-{number:03d}"
    directory.mkdir()
    logs = [directory / f"node-{node.index}.log" for node in nodes]
    job = Job([], logs, marker)
    port = free_port(nodes[0])
    try:
        for node, log in zip(nodes, logs, strict=True):
            with log.open("wb") as output:
                job.launchers.append(
                    subprocess.Popen(
                        node.enter(_arguments(command, nodes, node, port, place, directory)),
                        env={**_environment(node, place, marker), **armed},
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        # Ctrl-C is for us: we then end the job in order.
                        start_new_session=True,
                    )
                )
    except BaseException:
        job.end()
        raise
    return job


def _arguments(
    command: Command, nodes: Sequence[Node], node: Node, port: int, place: Place, directory: Path
) -> list[str]:
    script = [argument.replace(OUT, str(place.run)) for argument in command.script]
    if command.launcher == "none":
        return [sys.executable, *script]
    # Not --standalone: static rendezvous works the same for one node and for several, and with --max-restarts 0 a
    # lost worker ends the job on its node, so that it is always we who start it again.
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", str(len(nodes)), "--node-rank", str(node.index)),
        *("--master-addr", nodes[0].address, "--master-port", str(port), "--local-addr", node.address),
        *("--nproc-per-node", str(command.workers_per_node), "--max-restarts", "0"),
        # Otherwise a killed launcher leaves a directory among the system's temporary files.
        *("--log-dir", str(directory / "torchrun")),
        *script,
    ]


def _environment(node: Node, place: Place, marker: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not _LAUNCHERS_OWN.fullmatch(name)}
    inherited.pop(faultpoints.VARIABLE, None)
    return {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        **inherited,
        "GLOO_SOCKET_IFNAME": node.interface,
        RUN_DIRECTORY: str(place.run),
        LEDGER_DIRECTORY: str(place.ledger),
        MARKER: marker,
        NODE: str(node.index),
    }


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
