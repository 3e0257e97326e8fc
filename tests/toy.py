"""A small training job with what is easily forgotten: dropout, batch norm, momentum, a schedule, augmentation.

Runs in one process or under DDP, up to a step, and returns what an undisturbed run must equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import unbroken

SAMPLES = 96
BATCH = 4


class Numbers(Dataset):
    """Sample i is a row of numbers with noise by NumPy; it comes with its id."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.rows = torch.randn(samples, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.rows[index] + torch.from_numpy(np.random.rand(8).astype(np.float32)), index


@dataclass
class Job:
    """All objects of one start of the job."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    loader: Any
    ckpt: unbroken.Checkpointer
    losses: dict[int, str] = field(default_factory=dict)
    samples: dict[int, list[int]] = field(default_factory=dict)

    def weights(self) -> str:
        """Digest over all parameters and buffers."""
        digest = hashlib.sha256()
        for name, value in sorted(self.model.state_dict().items()):
            digest.update(name.removeprefix("module.").encode() + value.numpy().tobytes())
        return digest.hexdigest()


def make_model(width: int = 32) -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, width),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(width, width),
        nn.Linear(width, 1),
    )


def make_job(path: str | Path, rank: int, world_size: int, seed: int = 0, elastic: bool = False, **options: Any) -> Job:
    """Build everything anew, as a started process does.

    seed     stands for what differs between processes
    elastic  a DistributedSampler on a single rank too, so that another world size can take over
    """
    torch.manual_seed(seed + 100 * rank)
    np.random.seed(seed + rank)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model: nn.Module = make_model()
    if world_size > 1:
        model = DistributedDataParallel(model, bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.5)
    dataset = Numbers()
    sampler = DistributedSampler(dataset, world_size, rank, shuffle=True, seed=3) if world_size > 1 or elastic else None
    plain = DataLoader(dataset, BATCH, shuffle=sampler is None, sampler=sampler, drop_last=True)
    loader = unbroken.resumable(plain)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    return Job(model, optimizer, scheduler, loader, unbroken.Checkpointer(path, state, **options))


def train(job: Job, until: int, before: dict[int, Callable[[], object]] | None = None) -> Job:
    """Train up to global step `until`; `before[k]` is called in step k, between forward and backward."""
    while job.ckpt.global_step < until:
        for rows, ids in job.loader:
            loss = job.model(rows).square().mean()
            (before or {}).get(job.ckpt.global_step + 1, lambda: None)()
            loss.backward()
            job.optimizer.step()
            job.optimizer.zero_grad()
            job.scheduler.step()
            job.losses[job.ckpt.global_step + 1] = loss.item().hex()
            job.samples[job.ckpt.global_step + 1] = ids.tolist()
            job.ckpt.step(loss=loss)
            if job.ckpt.global_step >= until:
                break
    return job


def run_to(path: str | Path, until: int, **options: Any) -> Job:
    """A job that saves at every step, from where the directory is up to `until`, and closes."""
    job = make_job(path, 0, 1, every=unbroken.Every(steps=1), **options)
    job.ckpt.restore()
    train(job, until).ckpt.close()
    return job
