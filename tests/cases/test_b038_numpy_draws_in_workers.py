"""B038: NumPy's draws were equal in all workers and in all epochs, and a resumed job repeated them.

Forked workers inherit one NumPy stream, so each of them drew the same augmentation; new workers in the next epoch drew
it again. Streams here are seeded from (seed, epoch, sample).
"""

import json
from functools import partial
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset

from loaders import resume, watch
from unbroken.data import ResumableLoader, resumable


class Draws(Dataset[Any]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> float:
        return float(np.random.rand())


def job(workers: int) -> ResumableLoader:
    return resumable(DataLoader(Draws(), batch_size=3, num_workers=workers), seed=1)


def test_draws_are_the_straight_runs_for_any_workers_and_any_kill() -> None:
    straight = watch(job(2), 2)
    assert watch(job(0), 2) == straight
    for workers in (0, 1):
        resumed = resume(partial(job, workers), straight[4][1])  # batch 5
        assert watch(resumed, 2) == straight[5:]


def test_no_draw_occurs_twice() -> None:
    loader = job(2)
    draws = [draw for _ in range(2) for batch in loader for draw in batch.tolist()]
    assert len(set(draws)) == 48
    assert json.loads(json.dumps(loader.state_dict()))["epoch"] == 2
