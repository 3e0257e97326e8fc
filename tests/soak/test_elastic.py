"""B152, B153, B155: an elastic job of torchrun's loses a node, goes on at half the size, and takes the node back.

Right: each step is done by all ranks there are, with the same samples as in the undisturbed run, each once; what is
done again after a restart has the same samples; losses agree to the order of reduction.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from soak.test_sharded_examples import EXAMPLES, TOLERANCE, run
from unbroken.prove.ledger import read_ledger

STEPS, EVERY = 30, 5


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_agent(port: int, directory: Path, host: bool, log: Path) -> subprocess.Popen:
    """A node of one worker; the one that is `host` keeps the rendezvous."""
    settings = "join_timeout=60,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
    command = (
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1"),
        *("--max-restarts", "9", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"),
        *("--rdzv-conf", f"{settings},is_host={str(host).lower()}", "--monitor-interval", "0.5"),
        *(str(EXAMPLES / "fsdp2.py"), "--out", str(directory / "run"), "--steps", str(STEPS)),
        *("--every", str(EVERY), "--dropout", "0"),
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "UNBROKEN_LEDGER": str(directory / "ledger")}
    with log.open("wb") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)


def children_of(pid: int) -> list[int]:
    """The workers of an agent, which are in sessions of their own."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                    found.append(int(entry.name))
    return found


def lose(agent: subprocess.Popen) -> None:
    """The node dies: its agent and its workers, all at once."""
    for pid in (agent.pid, *children_of(agent.pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    agent.wait()


def until(arrived, agents, seconds=120.0) -> None:
    deadline = time.monotonic() + seconds
    while not arrived():
        assert time.monotonic() < deadline, "the job does not go on"
        assert any(agent.poll() is None for agent in agents)
        time.sleep(0.1)


def lines_in(ledger: Path) -> dict[int, dict[int, list]]:
    """By step and world size: all lines."""
    found: dict[int, dict[int, list]] = {}
    for (step, _), lines in read_ledger(ledger).items() if ledger.exists() else ():
        for line in lines:
            found.setdefault(step, {}).setdefault(line.world, []).append(line)
    return found


@pytest.mark.slow  # its short twin is tests/sharded/test_elastic.py
def test_a_job_that_loses_a_node_and_takes_it_back_consumes_each_sample_once(tmp_path):
    run("fsdp2", 2, tmp_path / "straight", STEPS, tmp_path / "straight-ledger")
    expected = lines_in(tmp_path / "straight-ledger")
    port, ledger = free_port(), tmp_path / "ledger"
    agents = [start_agent(port, tmp_path, host, tmp_path / f"agent-{host}.log") for host in (True, False)]
    try:
        until(lambda: any(step >= 8 for step in lines_in(ledger)), agents)
        lose(agents[1])
        until(lambda: any(1 in worlds and step >= 12 for step, worlds in lines_in(ledger).items()), agents[:1])
        agents.append(start_agent(port, tmp_path, False, tmp_path / "agent-again.log"))
        assert agents[0].wait(240) == 0, (tmp_path / "agent-True.log").read_text()[-2000:]
    finally:
        for agent in agents:
            lose(agent)
    found = lines_in(ledger)
    assert sorted(found) == list(range(1, STEPS + 1))
    assert {world for worlds in found.values() for world in worlds} == {1, 2}
    for step, worlds in found.items():
        (straight,) = expected[step].values()
        samples = sorted(sample for line in straight for sample in line.samples)
        loss = sum(float.fromhex(line.loss) for line in straight) / len(straight)
        for world, lines in worlds.items():
            by_rank = {line.rank: line for line in lines}
            if len(by_rank) < world:
                continue  # a rank was lost before it had noted the step, which was done again
            assert sorted(sample for line in by_rank.values() for sample in line.samples) == samples, step
            mean = sum(float.fromhex(line.loss) for line in by_rank.values()) / world
            assert mean == pytest.approx(loss, abs=TOLERANCE), step
