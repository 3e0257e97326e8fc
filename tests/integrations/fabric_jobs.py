"""A training job with Lightning Fabric, in every way that people set one up; stopped and started again."""

from __future__ import annotations

import contextlib
import hashlib
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, WeightedRandomSampler

import unbroken
from unbroken.integrations.fabric import checkpointer

SAMPLES, BATCH = 48, 4


@dataclass(frozen=True)
class Job:
    """What the script of a job says."""

    strategy: str = "auto"
    precision: str = "32-true"
    accumulate: int = 1
    optimizers: int = 1
    workers: int = 0
    data: str = "plain"
    compiled: str = "no"
    validate: str = "no"
    when_ranks_change: str = "batch"


class Given(LightningEnvironment):
    """Ranks that exist already."""

    creates_processes_externally = True

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def local_rank(self) -> int:
        return self.rank


class Noisy(Dataset[Any]):
    """Sample i with noise of each global generator, and i itself."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        noise = torch.rand(6) + random.random() + float(np.random.rand())
        return torch.full((6,), float(index)) / SAMPLES + noise / 8, index


class Stream(IterableDataset[Any]):
    """The same as a stream."""

    def __iter__(self) -> Any:
        return (Noisy()[index] for index in range(SAMPLES))


class Reversed(RandomSampler):
    """A sampler of the user's own."""

    def __iter__(self) -> Any:
        return reversed(list(super().__iter__()))


class Net(nn.Module):
    """Dropout, and a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.norm = nn.Linear(6, 8), nn.Dropout(0.3), nn.BatchNorm1d(8)
        self.down = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(torch.relu(self.norm(self.up(x)))))


class Average:
    """A callback of the user's own."""

    def __init__(self) -> None:
        self.value = 0.0

    def on_step(self, loss: float) -> None:
        self.value = 0.9 * self.value + 0.1 * loss

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


def make_fabric(rank: int, world_size: int, strategy: str = "auto", precision: str = "32-true", **more: Any) -> Fabric:
    """Fabric on the CPU, launched."""
    plugins: list[Any] = [Given(rank)]
    kind: Any = strategy
    if strategy == "fsdp2":
        kind = ModelParallelStrategy(_sharded, data_parallel_size=world_size, tensor_parallel_size=1)
    if precision == "16-mixed":  # on a CPU Fabric runs bf16-mixed instead unless it is given the plugin
        plugins.append(MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8, growth_interval=3)))
    else:
        more["precision"] = precision
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=kind, plugins=plugins, **more)
    fabric.launch()
    return fabric


def _sharded(model: Any, mesh: Any) -> Any:
    for part in (model.up, model.down, model):
        fully_shard(part, mesh=mesh["data_parallel"])
    return model


def make_loader(job: Job, generator: torch.Generator | None) -> Any:
    """The training loader as the script makes it; a weighted sampler draws from the generator."""
    if job.data == "stream":
        return DataLoader(Stream(), BATCH, num_workers=job.workers)
    if job.data == "weighted":
        drawn = WeightedRandomSampler([1.0 + i for i in range(SAMPLES)], SAMPLES, generator=generator)
        return DataLoader(Noisy(), BATCH, sampler=drawn, num_workers=job.workers)
    if job.data == "own sampler":
        return DataLoader(Noisy(), BATCH, sampler=Reversed(Noisy()), num_workers=job.workers)
    if job.data == "batch sampler":
        return DataLoader(Noisy(), batch_sampler=BatchSampler(RandomSampler(Noisy()), BATCH, False))
    return DataLoader(
        Noisy(), BATCH, shuffle=True, num_workers=job.workers, persistent_workers=job.workers > 0, drop_last=True
    )


class Run:
    """One start of a job."""

    def __init__(self, rank: int, world_size: int, directory: str, job: Job, every: int | None) -> None:
        self.job = job
        self.average = Average()
        fabric = self.fabric = make_fabric(rank, world_size, job.strategy, job.precision, callbacks=[self.average])
        fabric.seed_everything(5, workers=True, verbose=False)
        net: nn.Module = torch.compile(Net(), backend="eager") if job.compiled == "before" else Net()
        self.model = fabric.setup_module(net)
        if job.compiled == "after":
            self.model = torch.compile(self.model, backend="eager")
        parts = [list(self.model.parameters())[turn :: job.optimizers] for turn in range(job.optimizers)]
        made = fabric.setup_optimizers(*(torch.optim.AdamW(part, 0.01) for part in parts))
        self.optimizers = [made] if job.optimizers == 1 else list(made)
        self.schedulers = [torch.optim.lr_scheduler.StepLR(each, 4, 0.7) for each in self.optimizers]
        self.generator = torch.Generator() if job.data == "weighted" else None  # the script draws from it, too
        self.loader = fabric.setup_dataloaders(make_loader(job, self.generator))
        self.unseen = fabric.setup_dataloaders(DataLoader(Noisy(), 4, shuffle=True))
        torch.manual_seed(100 + rank)
        state = {"model": self.model, "loader": self.loader, "unseen": self.unseen}
        if self.generator is not None:
            state["generator"] = self.generator
        for turn, (optimizer, scheduler) in enumerate(zip(self.optimizers, self.schedulers, strict=True)):
            state |= {f"optimizer_{turn}": optimizer, f"scheduler_{turn}": scheduler}
        self.ckpt = checkpointer(
            fabric,
            directory,
            state,
            when_ranks_change=job.when_ranks_change,
            every=unbroken.Every(steps=every) if every else None,
            on_error="raise",
            strict=True,
        )
        self.told: dict[int, list[Any]] = {}

    def go(self, until: int, stop: tuple[int, int] | None) -> None:
        """Train to a step; or stop with a checkpoint in the given step, after so many micro-steps of it."""
        while self.ckpt.global_step < until:
            for batch in self.loader:
                self._micro_step(batch)
                if stop == (self.ckpt.global_step, self.ckpt.micro_step):
                    self.ckpt.save()
                    return
                if self.ckpt.global_step >= until:
                    break

    def _micro_step(self, batch: Any) -> None:
        windows = self.job.accumulate * (self.loader.micro_batches if self.job.when_ranks_change == "accumulate" else 1)
        accumulating = self.ckpt.micro_step + 1 < windows
        sync = self.fabric.no_backward_sync(self._set_up(), enabled=accumulating) if windows > 1 else _nothing()
        with sync if self.job.strategy != "fsdp2" else _nothing():
            more = torch.rand((), generator=self.generator)
            loss = self.model(batch[0] + more / 8).square().mean() / windows
            self.fabric.backward(loss)
        self.told.setdefault(self.ckpt.global_step + 1, []).append((loss.item().hex(), batch[1].tolist()))
        if accumulating:
            self.ckpt.step(accumulating=True)
            return
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            if self.job.precision != "16-mixed" or len(self.optimizers) == 1:
                self.fabric.clip_gradients(self._set_up(), optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        self.fabric.call("on_step", loss.item())
        if self.job.validate == "before the step" and (self.ckpt.global_step + 1) % 2 == 0:
            self._validate()
        self.ckpt.step(loss=loss)

    def _validate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            seen = [(self.model(rows).mean().item().hex(), ids.tolist()) for rows, ids in self.unseen]
        self.model.train()
        self.told[self.ckpt.global_step + 1].append(seen)

    def _set_up(self) -> Any:
        return self.model._orig_mod if self.job.compiled == "after" else self.model

    def end(self) -> dict[str, Any]:
        """What this start did and where it ended."""
        self.ckpt.close()
        return {
            "told": self.told,
            "weights": digest(self.model.state_dict()),
            "moments": digest(*(each.optimizer.state_dict()["state"] for each in self.optimizers)),
            "rates": [each["param_groups"][0]["lr"] for each in (o.state_dict() for o in self.optimizers)],
            "random": (torch.rand(()).item(), random.random(), float(np.random.rand())),
            "scaler": self.fabric.strategy.precision.state_dict(),
            "callback": self.average.value,
            "epoch": self.loader.epoch,
        }


def _nothing() -> Any:
    return contextlib.nullcontext()


def digest(*values: Any) -> str:
    """Of all tensors in nested values, gathered."""
    whole = hashlib.sha256()
    for value in values:
        if isinstance(value, Tensor):
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            whole.update(value.detach().contiguous().flatten().view(torch.uint8).numpy())
        else:
            inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
            whole.update(repr([key for key, _ in inner] or value).encode())
            inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
            whole.update(digest(*(held for _, held in inner)).encode() if inner else b"")
    return whole.hexdigest()


def train(
    rank: int,
    world_size: int,
    directory: str,
    job: Job,
    until: int,
    stop: tuple[int, int] | None = None,
    every: int | None = 1,
) -> dict[str, Any]:
    """One start of a job, to its end or to where it is stopped."""
    run = Run(rank, world_size, directory, job, every)
    run.ckpt.restore()
    run.go(until, stop)
    return run.end()


def train_fabrics_way(path: str, job: Job, until: int, begin: int) -> dict[str, Any]:
    """A start with Fabric's own save and load, without `unbroken`: from its beginning, or from a checkpoint of a step.

    Saves after `begin` steps if there is no checkpoint yet.
    """
    fabric = make_fabric(0, 1, job.strategy, job.precision)
    fabric.seed_everything(5, workers=True, verbose=False)
    model, optimizer = fabric.setup(net := Net(), torch.optim.AdamW(net.parameters(), 0.01))
    loader = fabric.setup_dataloaders(make_loader(job, None))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if Path(path).exists():
        fabric.load(path, state)
    told: dict[int, list[Any]] = {}
    while state["step"] < until:
        for rows, ids in loader:
            loss = model(rows).square().mean()
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            state["step"] += 1
            told[state["step"]] = [(loss.item().hex(), ids.tolist())]
            if state["step"] == begin and not Path(path).exists():
                fabric.save(path, state)
            if state["step"] >= until:
                break
    return {"told": told, "weights": digest(model.state_dict()), "scaler": fabric.strategy.precision.state_dict()}
