"""B075: saving was not atomic; a kill in the middle left a file that ends too early, and the next load failed.

Right: whenever the process is killed, the newest committed checkpoint loads, and a partial one is never picked. One
process saves in a loop and is killed thirty times at random moments; each start restores what the last one committed.
Also B079 (two files renamed in turn mixed two steps): all values of a checkpoint are of one step.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

import unbroken

KILLS = 30


def state() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(1 << 15) for name in "abc"}


def test_the_newest_committed_checkpoint_always_loads_and_is_of_one_step(tmp_path):
    moments = random.Random(75)
    reached = 0
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    for _ in range(2):
        reached = kill_again_and_again(tmp_path, environment, moments, reached)
    assert reached > KILLS, "the runs went on, one after another"


def kill_again_and_again(path: Path, environment: dict[str, str], moments: random.Random, reached: int) -> int:
    """Starting Python takes longer than a hundred saves: one process imports torch, and its forks are killed."""
    server = subprocess.Popen(
        [sys.executable, "-c", FORKS], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        for _ in range(KILLS // 2):
            server.stdin.write(f"{path}\n")
            server.stdin.flush()
            pid, step = map(int, server.stdout.readline().split())
            assert step >= reached, f"restored step {step} after step {reached} had been committed"
            for _ in range(moments.randint(0, 5)):
                server.stdout.readline()  # a step is done, and its save under way
            time.sleep(moments.uniform(0.0, 0.03))  # the random moment, not a wait
            os.kill(pid, signal.SIGKILL)
            while server.stdout.readline() != "gone\n":
                pass
            reached = newest_step(path)
    finally:
        server.stdin.close()
        server.wait(60)
    return reached


def newest_step(path: Path) -> int:
    objects = state()
    restored = unbroken.Checkpointer(path, objects).restore()
    if restored is None:
        return 0
    assert not restored.skipped, restored.skipped
    for tensor in objects.values():
        assert (tensor == restored.step).all(), "a checkpoint of mixed steps"
    return restored.step


FORKS = """
import os, sys
import torch, unbroken
from cases.test_b075_kill_while_saving import state
for line in sys.stdin:
    path = line.strip()
    pid = os.fork()
    if pid == 0:
        objects = state()
        ckpt = unbroken.Checkpointer(path, objects, every=unbroken.Every(steps=1), keep=unbroken.Keep(last=2))
        ckpt.restore()
        print(os.getpid(), ckpt.global_step, flush=True)
        while True:
            for tensor in objects.values():
                tensor.fill_(ckpt.global_step + 1)
            ckpt.step()
            print(ckpt.global_step, flush=True)
    os.waitpid(pid, 0)
    print("\\ngone", flush=True)
"""


def test_the_same_step_can_be_saved_again_after_a_kill_in_its_save(tmp_path):
    """B081: the left-over directory blocked the next save of that step. Our files carry the generation."""
    with unbroken.Checkpointer(tmp_path, state()) as first:
        first.restore()
    (tmp_path / "step-1").mkdir(parents=True)
    left_over = tmp_path / "step-1/g0001-rank-00000.safetensors"
    left_over.write_bytes(b"cut off in the middle")
    with unbroken.Checkpointer(tmp_path, state(), every=unbroken.Every(steps=1)) as second:
        assert second.restore() is None
        second.step()
        second.wait()
    assert unbroken.Checkpointer(tmp_path, state()).restore().step == 1
    assert not left_over.exists(), "and it is cleared away"
