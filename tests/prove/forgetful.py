"""A training script as a user writes it, which with `--forget` leaves one thing out of what it restores.

Started under torchrun by the slow tests of `prove`, and called in-process by their short twins. It has all that is
easily forgotten: a schedule, a shuffled loader, a grad scaler, an average of the weights, a generator of its own, and
windows of two micro-batches.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import unbroken

FORGET = ("nothing", "scheduler", "loader", "plain loader", "scaler", "ema", "rank rng", "generator", "seed", "window")
WINDOW = 2


class Lost(Exception):
    """The process is lost here, with everything in it."""


def train(
    out: Path, steps: int, every: int, forget: str, rank: int, world_size: int, lost_after: int | None = None
) -> str:
    """Train from where `out` is up to `steps`; the digest of the final weights and of their average.

    lost_after  raise Lost after this step, with nothing closed
    """
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(7 + rank)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        net = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 1))
        rows = torch.randn(256, 8)
    model = DistributedDataParallel(net) if world_size > 1 else net
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    noise = torch.Generator()
    noise.seed() if forget == "seed" else noise.manual_seed(11 + rank)
    sampler = DistributedSampler(TensorDataset(rows), world_size, rank, seed=3)
    plain = DataLoader(TensorDataset(rows), 4, sampler=sampler, drop_last=True)
    loader = plain if forget == "plain loader" else unbroken.resumable(plain)

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    state |= {"ema": ema, "noise": noise, "loader": loader}
    missing = {"plain loader": "loader", "generator": "noise", "seed": "noise"}.get(forget, forget)
    state.pop(missing, None)
    by_hand = forget == "window"
    ckpt = unbroken.Checkpointer(out, state, every=None if by_hand else unbroken.Every(steps=every))
    restored = ckpt.restore()
    if restored and rank == 0:
        print(restored, flush=True)
    if restored and forget == "rank rng" and rank == world_size - 1:
        torch.manual_seed(7 + rank)

    micro = 0
    while ckpt.global_step < steps:
        for (batch,) in loader:
            batch = batch + 0.1 * torch.randn(batch.shape, generator=noise)
            loss = model(batch).square().mean() / WINDOW
            scaler.scale(loss).backward()
            micro += 1
            if micro % WINDOW:
                if by_hand and ckpt.global_step and ckpt.global_step % every == 0:
                    ckpt.save()  # in the middle of a window, and nobody told the Checkpointer that it is one
                if not by_hand:
                    ckpt.step(accumulating=True)
                continue
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
            ema.update_parameters(net)
            ckpt.step(loss=loss)
            if ckpt.global_step == lost_after:
                ckpt._end(abandon=True)
                raise Lost
            if ckpt.global_step >= steps:
                break
    ckpt.close()
    digest = hashlib.sha256()
    for tensor in [*net.state_dict().values(), *ema.state_dict().values()]:
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--forget", choices=FORGET, default="nothing")
    args = parser.parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    final = train(args.out, args.steps, args.every, args.forget, rank, world_size)
    if rank == 0:
        print(f"final {final}", flush=True)
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
