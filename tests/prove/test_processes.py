"""Finding and ending a proof's processes: those of sessions of their own too, and never anybody else's."""

import os
import random
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from unbroken.prove.faults import Fault
from unbroken.prove.launch import Place
from unbroken.prove.nodes import LoopbackNode
from unbroken.prove.processes import MARKER, NODE, kill_marked, marked, recorded, workers
from unbroken.prove.strike import strike

# Says that it runs, with its process ids, and waits until its input ends.
WAIT = "import os, sys; print(os.getpid(), flush=True); sys.stdin.read()"
FORK_AND_WAIT = (
    "import os, sys; child = os.fork(); child or os.setsid();"
    "print(os.getpid() if child else -1, child, flush=True) if child else None; sys.stdin.read()"
)


class Family:
    """Processes that the test started."""

    def __init__(self):
        self.marker = secrets.token_hex(8)
        self.processes = []

    def start(self, code=WAIT, marker=None, **variables):
        """Process ids that the program prints once it runs."""
        process = subprocess.Popen(
            [sys.executable, "-Sc", code],
            env={**os.environ, MARKER: marker or self.marker, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self.processes.append(process)
        return [int(word) for word in process.stdout.readline().split()]


@pytest.fixture
def family():
    family = Family()
    yield family
    for process in family.processes:
        process.kill()
        process.communicate()


def test_exactly_the_marked_processes_are_found(family):
    ours = family.start()
    family.start(marker="somebody else")
    assert [process.pid for process in marked(family.marker)] == ours


def test_orphans_in_sessions_of_their_own_are_found_and_ended(family):
    parent, child = family.start(FORK_AND_WAIT)
    family.processes[0].kill()
    family.processes[0].wait()
    assert [process.pid for process in marked(family.marker)] == [child]
    kill_marked(family.marker)
    assert marked(family.marker) == []
    assert parent != child


def test_nobody_elses_processes_are_ended(family):
    family.start()
    family.start(marker="somebody else")
    kill_marked(family.marker)
    assert family.processes[0].wait() == -9
    assert family.processes[1].poll() is None


def test_a_worker_is_told_from_what_it_forked(family):
    parent, child = family.start(FORK_AND_WAIT, RANK="1")
    (other,) = family.start(RANK="0")
    assert {process.pid for process in marked(family.marker)} == {parent, child, other}
    assert workers(marked(family.marker)) == {0: other, 1: parent}


def test_workers_of_another_launcher_are_known_by_their_ledgers(family, tmp_path):
    (old,), (new,), (other,) = family.start(), family.start(), family.start()
    (stranger,) = family.start(marker="somebody else")
    names = [(0, 1, old), (0, 2, new), (1, 1, stranger), (2, 1, 4194303), (3, 1, other)]
    for rank, generation, pid in names:
        (tmp_path / f"rank-{rank:05d}-g{generation:04d}-{pid}.jsonl").touch()
    (tmp_path / "notes.jsonl").touch()
    assert recorded(tmp_path, marked(family.marker)) == {0: new, 3: other}


@pytest.mark.parametrize(("kind", "victim", "dead"), [("rank", 1, {1}), ("node", 1, {1, 2}), ("all", None, {0, 1, 2})])
def test_a_fault_kills_what_it_says(family, kind, victim, dead):
    for rank, node in ((0, 0), (1, 1), (2, 1)):
        family.start(**{"RANK": str(rank), NODE: str(node)})
    nodes = [LoopbackNode(index, family.marker) for index in (0, 1)]
    assert strike(Fault(kind, victim, 0, 0.0), nodes, family.marker, Place(Path()), random.Random(0)) is not None
    for rank in dead:
        assert family.processes[rank].wait(30) == -9  # the kernel needs a moment to end it
    living = {int(process.environment["RANK"]) for process in marked(family.marker)}
    assert living == {0, 1, 2} - dead


def test_a_fault_that_finds_nobody_has_not_struck(family):
    family.start(RANK="0", **{NODE: "0"})
    nodes = [LoopbackNode(index, family.marker) for index in (0, 1)]
    for kind in ("rank", "node", "sigterm"):
        assert strike(Fault(kind, 1, 0, 0.0), nodes, family.marker, Place(Path()), random.Random(0)) is None
    assert len(marked(family.marker)) == 1


def test_a_preempted_worker_alone_gets_the_signal(family):
    for rank in (0, 1):
        family.start(**{"RANK": str(rank), NODE: "0"})
    nodes = [LoopbackNode(0, family.marker)]
    assert strike(Fault("sigterm", 1, 0, 0.0), nodes, family.marker, Place(Path()), random.Random(0)) is not None
    assert family.processes[1].wait(30) == -15
    assert family.processes[0].poll() is None
