"""Loops with Accelerate that may be broken off, for tests on one rank and on several."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import unbroken
from integrations.lightning_runs import Numbers, Stream
from unbroken.state.registry import State


def net(sharded: bool) -> nn.Module:
    """FSDP2 leaves running means to each rank, and then no other number of ranks can have them."""
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(4) if sharded else nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 1))


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch[0]).squeeze(1) - batch[1] / 46).square().mean()


def shard(accelerator: Any) -> None:
    """Let an Accelerator take the way of FSDP2 as on GPUs: on CPUs it takes that of DDP whatever it was asked for."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    accelerator.state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False
    )


class Counted:
    """What a user registers with Accelerate."""

    def __init__(self) -> None:
        self.batches = 0

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state):
        self.batches = state["batches"]


def train(
    rank: int, world: int, out: str, settings: dict[str, Any], broken_at: int | None = None, every: int = 1
) -> dict[str, Any]:
    """Three epochs with an evaluation after each, or until so many steps are done."""
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import set_seed

    from unbroken.integrations.accelerate import checkpointer

    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": 1}
    if world > 1:
        os.environ.update({name: str(value) for name, value in environment.items()})
    try:
        accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=settings.get("accumulate", 2),
            mixed_precision=settings.get("precision", "no"),
            dataloader_config=DataLoaderConfiguration(**settings.get("loader", {})),
            step_scheduler_with_optimizer=settings.get("paced", True),
            rng_types=settings.get("rng_types"),
            dynamo_backend=settings.get("compiled", "no"),
        )
    finally:
        for name in environment:
            os.environ.pop(name, None)
    if settings.get("sharded") and world > 1:
        shard(accelerator)
    if settings.get("scaled"):  # Accelerate makes none on CPUs
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8, growth_interval=3)
    set_seed(5)
    model = net(settings.get("sharded", False))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    stream = settings.get("stream", False)
    loader = DataLoader(Stream() if stream else Numbers(), 4, shuffle=not stream)
    workers = settings.get("lasting_workers", 0)
    evaluation = DataLoader(Numbers(8), 4, num_workers=workers, persistent_workers=workers > 0)
    model, optimizer, loader, held_out, scheduler = accelerator.prepare(model, optimizer, loader, evaluation, scheduler)
    counted = Counted()
    accelerator.register_for_checkpointing(counted)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    if settings.get("all_loaders"):
        state["held_out"] = held_out
    ckpt = checkpointer(
        accelerator, f"{out}/run", state, every=unbroken.Every(steps=every) if every else None, keep=None
    )
    ckpt.restore()
    seen, evaluated, epochs = [], [], settings.get("epochs", 3)
    total = settings.get("steps") or -(-len(loader) // settings.get("accumulate", 2)) * epochs
    while ckpt.global_step < total:
        for batch in loader:
            if ckpt.global_step == broken_at:
                return {"seen": seen}  # without closing: nothing is waited for
            seen.append(batch[1].tolist())
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            counted.batches += 1
            ckpt.step()
            if ckpt.global_step == total:
                break
        with torch.no_grad():
            evaluated += [loss_of(model, batch).item() for batch in held_out]
    ckpt.close()
    weights = State({"model": model, "optimizer": optimizer.optimizer}).digests()
    return {
        "seen": seen,
        "evaluated": evaluated,
        "weights": (weights["model"], weights["optimizer"]),
        "rate": scheduler.get_last_lr(),
        "counted": counted.batches,
        "iteration": loader.iteration,
        "random": torch.get_rng_state().sum().item(),
        "scale": accelerator.scaler and accelerator.scaler.get_scale(),
        "kinds": sorted({type(weight).__name__ for weight in model.parameters()}),
    }
