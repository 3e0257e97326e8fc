"""Nothing grows with the number of saves: memory, file descriptors, threads, keys of the store, files."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unbroken
from cases.test_b124_memory_at_load import memory

MODULE = "test_leaks"
WARM_UP = 60
SLACK = 6 << 20
"""Bytes. What the allocator keeps differs by about 2 MB from run to run."""


def counts() -> dict[str, int]:
    """What could leak, as numbers."""
    gc.collect()
    return {
        "memory": memory("VmRSS"),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
        "objects": len(gc.get_objects()),
        "shared memory": len(list(Path("/dev/shm").iterdir())),
    }


def save_often(rank, world_size, directory, saves):
    """What is there after a job of some saves, and after one of many."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 8)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    state = {"model": model, "optimizer": optimizer}
    found = []
    for run, count in (("few", WARM_UP), ("few again", WARM_UP), ("many", saves)):
        path = f"{directory}/{run}"
        with unbroken.Checkpointer(path, state, keep=unbroken.Keep(last=2), on_error="raise") as ckpt:
            for _ in range(count):
                optimizer.zero_grad()
                model(torch.randn(4, 64)).sum().backward()
                optimizer.step()
                ckpt.step()
                ckpt.save()
        del ckpt
        found.append(counts())
    return found[1:]


def saved_often(ranks, run: Path, saves: int) -> None:
    for before, after in ranks.run_all_well(f"{MODULE}:save_often", 2, str(run), saves):
        assert after["memory"] <= before["memory"] + SLACK
        assert after["objects"] <= before["objects"] + 50
        for what in ("descriptors", "threads", "shared memory"):
            assert after[what] == before[what], what
    directories = sorted(path.name for path in (run / "many").iterdir() if path.name.startswith("step-"))
    assert len(directories) == 2, directories
    assert len(list((run / "many/generations").iterdir())) == 1


def test_a_hundred_saves_leave_nothing_behind(ranks, tmp_path):
    saved_often(ranks, tmp_path, 100)


@pytest.mark.slow
def test_a_thousand_saves_leave_nothing_behind(ranks, tmp_path):
    saved_often(ranks, tmp_path, 1000)
