"""B119: a job that was made tensor parallel by a plan could not be resumed: `load_checkpoint` raised.

Right: it resumes in the same layout, with the same placements, and each later loss and value equals the undisturbed
run's. Also the placements that a sequence-parallel layer and a replicated bias have, and into one process or FSDP2.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import unbroken
from sharded.models import full, raw

MODULE = "cases.test_b119_tensor_parallel"
PLAN = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "up": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    "up.linear": ColwiseParallel(),
    "down": RowwiseParallel(output_layouts=Replicate()),
}


class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


class Block(nn.Module):
    """Of a transformer, as far as the sorts of layers go; 10 features and 7 words, unevenly over two ranks."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.embedding = nn.Embedding(8, 8)
        self.norm = nn.LayerNorm(8)
        self.up = Up()
        self.down = nn.Linear(10, 7)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.norm(self.embedding(words))))


def part(rank, world_size, directory, seed, until):
    """Restore, and train up to a step: per step the loss, and all values at the restore and at the end."""
    model: nn.Module = Block(seed)
    if world_size > 1:
        model = parallelize_module(model, init_device_mesh("cpu", (world_size,)), PLAN)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = {}
    state = {"model": model, "optimizer": optimizer}
    with unbroken.Checkpointer(directory, state, on_error="raise") as ckpt:
        ckpt.restore()
        restored = content(model, optimizer)
        while ckpt.global_step < until:
            words = torch.randint(8, (3, 4), generator=torch.Generator().manual_seed(ckpt.global_step))
            loss = model(words).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[ckpt.global_step + 1] = full(loss).item()
            ckpt.step()
        ckpt.save()
    return losses, restored, content(model, optimizer)


def content(model, optimizer):
    """Placements and gathered values of every weight and moment."""
    told = {}
    for name, parameter in model.named_parameters():
        for key, item in {"": parameter, **optimizer.state.get(parameter, {})}.items():
            told[f"{name}/{key}"] = (str(getattr(item, "placements", "")), raw(full(item)))
    return told


def test_a_tensor_parallel_job_goes_on_like_the_undisturbed_one(ranks, tmp_path):
    straight = ranks.run_all_well(f"{MODULE}:part", 2, str(tmp_path / "straight"), 1, 4)
    ranks.run_all_well(f"{MODULE}:part", 2, str(tmp_path / "run"), 1, 2)
    resumed = ranks.run_all_well(f"{MODULE}:part", 2, str(tmp_path / "run"), 9, 4)
    for (losses, _, at_end), (losses_after, _, resumed_at_end) in zip(straight, resumed, strict=True):
        assert losses_after == {step: losses[step] for step in (3, 4)}
        assert resumed_at_end == at_end
    placements = {placement for placement, _ in straight[0][2].values()}
    assert placements == {"", "(Shard(dim=0),)", "(Shard(dim=1),)", "(Replicate(),)"}
    (_, alone, _), *_ = ranks.run_all_well(f"{MODULE}:part", 1, str(tmp_path / "run"), 5, 4)
    assert {name: value for name, (_, value) in alone.items()} == {
        name: value for name, (_, value) in straight[0][2].items()
    }
