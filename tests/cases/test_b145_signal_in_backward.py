"""B145: the checkpoint was written inside the signal handler, sometimes in the middle of backward; sometimes never.

Right: the handler sets a flag, the save comes at the end of the step. SIGUSR1 is sent again and again at random moments
of a backward pass (twenty times in the slow variant), and every resumed run ends like the straight one. B151: the
signal reaches one rank only, and all ranks save the same step and leave.
"""

from __future__ import annotations

import os
import random
import signal
import threading

import pytest
import torch

import unbroken
from toy import make_job, train

MODULE = "cases.test_b145_signal_in_backward"
STEPS = 96


@pytest.mark.parametrize("least", [6, pytest.param(20, marks=pytest.mark.slow)])
def test_signals_at_random_moments_change_nothing(tmp_path, least):
    steps = STEPS if least == 20 else 32
    straight = train(make_job(tmp_path / "straight", 0, 1), steps)
    straight.ckpt.close()
    moments = random.Random(145)
    signals, done, start = 0, 0, 0
    while done < steps:
        job = make_job(tmp_path / "run", 0, 1, seed=start)
        restored = job.ckpt.restore()
        assert (restored.step if restored else 0) == done
        start += 1
        at = done + moments.randint(1, 3)
        try:
            train(job, steps, before={at: lambda: signal_within(moments.uniform(0, 0.0008))})
            job.ckpt.close()
        except unbroken.Preempted as left:
            signals += 1
            assert left.step >= at
        assert {step: straight.losses[step] for step in job.losses} == job.losses
        done = job.ckpt.global_step
    assert signals >= least
    assert job.weights() == straight.weights()


def signal_within(seconds: float) -> None:
    """Send SIGUSR1 to this process a moment from now, when backward is likely under way."""
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGUSR1)).start()


def until_told(rank, world_size, path, told_rank):
    job = make_job(path, rank, world_size)
    job.ckpt.restore()
    at = {6: lambda: os.kill(os.getpid(), signal.SIGTERM)} if rank == told_rank else {}
    try:
        train(job, 100_000, before=at)
    except unbroken.Preempted as left:
        return left.step, left.code, left.reason
    return "never told"


def resumed(rank, world_size, path):
    job = make_job(path, rank, world_size, seed=2)
    restored = job.ckpt.restore()
    job.ckpt.close()
    return restored.step


@pytest.mark.parametrize("told_rank", [0, 1])
def test_b151_a_signal_to_one_rank_makes_all_save_one_step_and_leave(ranks, tmp_path, told_rank):
    results = ranks.run_all_well(f"{MODULE}:until_told", 2, str(tmp_path / "run"), told_rank)
    (step, code, _), other = results
    assert other[:2] == (step, code)
    assert step >= 6
    assert code == 75
    assert results[told_rank][2] == "SIGTERM"
    assert ranks.run_all_well(f"{MODULE}:resumed", 2, str(tmp_path / "run")) == [step, step]


def test_a_handler_that_was_there_before_is_back_afterwards(tmp_path):
    mine = signal.signal(signal.SIGTERM, lambda *_: None)
    ours = signal.getsignal(signal.SIGTERM)
    try:
        with unbroken.Checkpointer(tmp_path, {"w": torch.zeros(1)}) as ckpt:
            ckpt.restore()
            assert signal.getsignal(signal.SIGTERM) is not ours
        assert signal.getsignal(signal.SIGTERM) is ours
    finally:
        signal.signal(signal.SIGTERM, mine)
