"""Data sets with random augmentation, and what a job sees of its loader: shared by the tests of data and of cases."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from unbroken.data import ResumableLoader, resumable


class Augmented(Dataset[Any]):
    """Sample i is (i, and a draw of Python's, NumPy's and torch's global generator). Notes what was fetched."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        self.fetched.append(index)
        return index, random.random(), float(np.random.rand()), torch.rand(1, dtype=torch.float64).item()


def batch_bytes(batch: Any) -> bytes:
    """All the bits of a batch."""
    if isinstance(batch, torch.Tensor):
        return batch.numpy().tobytes()
    if isinstance(batch, (list, tuple)):
        return b"|".join(batch_bytes(part) for part in batch)
    return repr(batch).encode()


Seen = list[tuple[Any, str]]
"""What a job saw: (batch's bits, or the epoch whose end it was) with the state saved then, as JSON."""


def watch(loader: ResumableLoader, epochs: int) -> Seen:
    """Run to the end of epoch number `epochs`, saving after every batch and after every epoch."""
    seen: Seen = []
    while loader.epoch < epochs:
        for batch in loader:
            seen.append((batch_bytes(batch), json.dumps(loader.state_dict())))
        seen.append((loader.epoch, json.dumps(loader.state_dict())))
    return seen


def resume(make: Callable[[], ResumableLoader], saved: str) -> ResumableLoader:
    """A new process's loader, put to a saved state."""
    loader = make()
    loader.load_state_dict(json.loads(saved))
    assert json.dumps(loader.state_dict()) == saved
    return loader


def check_every_kill(
    make: Callable[[], ResumableLoader], epochs: int = 2, kills: slice = slice(None), *, states: bool = True
) -> Seen:
    """Kill after each event of a run and see that the rest equals the run that was not killed, saved states included.

    states  False for data sets that describe one and the same place in several ways
    Global streams are put somewhere else in between, as in a new process.
    """
    straight = watch(make(), epochs)
    for number in range(len(straight))[kills]:
        random.seed(number), np.random.seed(number), torch.manual_seed(number)
        rest = watch(resume(make, straight[number][1]), epochs)
        expected = straight[number + 1 :]
        assert [event[0] for event in rest] == [event[0] for event in expected], f"killed after event {number}"
        assert not states or rest == expected, f"states differ after a kill after event {number}"
    return straight


def ids(loader: ResumableLoader, batches: int | None = None) -> Iterator[list[int]]:
    """Indices of the samples of each batch, at most `batches` batches; for data sets whose sample begins with them."""
    for number, batch in enumerate(loader, start=1):
        yield batch[0].tolist()
        if number == batches:
            return


def rank_loaders(
    length: int, world: int, batch_size: int, *, seed: int = 5, drop_last: bool = False, **options: Any
) -> list[ResumableLoader]:
    """The loaders of all ranks of a job, in one process."""
    dataset = Augmented(length)
    return [
        resumable(
            DataLoader(
                dataset,
                batch_size=batch_size,
                sampler=DistributedSampler(dataset, world, rank, seed=seed, drop_last=drop_last),
                **options,
            )
        )
        for rank in range(world)
    ]


def read_steps(loaders: list[ResumableLoader], steps: int | None = None) -> list[list[int]]:
    """Run the ranks in step; per step the samples of all ranks in the epoch's global order."""
    read = []
    for batches in zip(*(ids(loader, steps) for loader in loaders), strict=True):
        read.append([rank_ids[n] for n in range(len(batches[0])) for rank_ids in batches])
    return read


def same_state(loaders: list[ResumableLoader]) -> dict[str, Any]:
    """The state of a job's loaders, which is one and the same on all ranks."""
    states = [json.dumps(loader.state_dict()) for loader in loaders]
    assert len(set(states)) == 1
    return dict(json.loads(states[0]))
