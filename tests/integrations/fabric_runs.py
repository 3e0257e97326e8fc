"""A small script with Lightning Fabric, in the shapes that the tests need, and what a run of it tells."""

import contextlib
import os
from dataclasses import dataclass, field

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import unbroken
from integrations.lightning_jobs import Noisy, Stream, digest_of
from unbroken.integrations.fabric import checkpointer


@dataclass
class Script:
    """A kind of script."""

    accumulate: int = 2
    workers: int = 0
    stream: bool = False
    sharded: bool = False
    shuffle: bool = True
    batch_size: int = 4
    every: int | None = 1
    options: dict = field(default_factory=dict)


@dataclass
class Told:
    """Samples and losses of this rank by step, and the end."""

    steps: dict
    epochs: dict
    weights: str
    begun_at: int


def shard(model, mesh):
    for part in (model[0], model):
        fully_shard(part, mesh=mesh["data_parallel"])
    return model


def run(directory, script, until, *, rank=0, world=1, saved_in_window=False):
    """Train to a step; a later call goes on from there, as if the job had been killed."""
    options = {"accelerator": "cpu", "devices": world, **script.options}
    if world > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_PORT": "1"}
        os.environ |= {"TORCHELASTIC_RUN_ID": "tests", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": str(world)}
        options["plugins"] = [TorchElasticEnvironment()]
        options["strategy"] = ModelParallelStrategy(shard, world, 1) if script.sharded else DDPStrategy()
    else:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "GROUP_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
    fabric = Fabric(**options)
    fabric.launch()
    fabric.seed_everything(11, verbose=False)
    norm = [] if script.sharded else [nn.BatchNorm1d(16)]
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), *norm, nn.Linear(16, 1))
    if script.sharded and world > 1:
        model = fabric.setup_module(model)
        first = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), 1e-2))
        optimizers = [first]
    else:
        head, rest = model[-1].parameters(), model[:-1].parameters()
        model, *optimizers = fabric.setup(model, torch.optim.AdamW(rest, 1e-2), torch.optim.SGD(head, 1e-2, 0.9))
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 3) for optimizer in optimizers]
    if script.stream:
        loader = DataLoader(Stream(), script.batch_size, num_workers=script.workers)
    else:
        loader = DataLoader(Noisy(), script.batch_size, shuffle=script.shuffle, num_workers=script.workers)
    loader = fabric.setup_dataloaders(loader)
    state = {"model": model, "loader": loader}
    state |= {f"optimizer.{at}": value for at, value in enumerate(optimizers)}
    state |= {f"scheduler.{at}": value for at, value in enumerate(schedulers)}
    every = None if script.every is None else unbroken.Every(steps=script.every)
    steps, epochs, batches = {}, {}, []
    with checkpointer(fabric, directory, state, every=every, keep=None, on_error="raise") as ckpt:
        ckpt.restore()
        begun_at = ckpt.global_step
        while ckpt.global_step < until:
            for rows, wanted, ids in loader:
                accumulating = ckpt.micro_step + 1 < script.accumulate
                skips = accumulating and not script.sharded
                with fabric.no_backward_sync(model) if skips else contextlib.nullcontext():
                    loss = (model(rows).squeeze(-1) - wanted).square().mean() / script.accumulate
                    fabric.backward(loss)
                batches.append((ids.tolist(), loss.item().hex()))
                if accumulating:
                    ckpt.step(accumulating=True)
                    if saved_in_window and ckpt.global_step == until - 1:
                        ckpt.save()
                        return Told(steps, epochs, digest_of(model), begun_at)
                    continue
                fabric.clip_gradients(model, optimizers[0], max_norm=1.0)
                for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                    optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step()
                ckpt.step(loss=loss)
                steps[ckpt.global_step], batches = batches, []
                epochs[ckpt.global_step] = loader._dataloader.epoch
                if ckpt.global_step >= until:
                    break
    return Told(steps, epochs, digest_of(model), begun_at)


def on_rank(rank, world, directory, script, until, saved_in_window=False):
    """The same as one rank of several."""
    return run(directory, script, until, rank=rank, world=world, saved_in_window=saved_in_window)
