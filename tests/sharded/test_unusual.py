"""Sharded tensors that are rare or wrong: scalars, empty ones, meshes in odd orders, ranks that lack something."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import unbroken
from processes import Raised
from sharded.models import raw

MODULE = "sharded.test_unusual"


class Scaled(nn.Module):
    """A scalar parameter and an empty one beside an ordinary one; the scalar is replicated, the others sharded."""

    def __init__(self, mesh, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def parameter(placement, *shape):
            return nn.Parameter(distribute_tensor(torch.rand(shape, generator=generator), mesh, [placement]))

        self.weight = parameter(Shard(0), 5, 3)
        self.scale = parameter(Replicate())
        self.empty = parameter(Shard(0), 5, 0)

    def forward(self):
        return (self.weight * self.scale).sum() + self.empty.sum()


def train_scaled(rank, world_size, directory, resume):
    model = Scaled(init_device_mesh("cpu", (world_size,)), seed=2 if resume else 1)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    with unbroken.Checkpointer(directory, {"model": model, "optimizer": optimizer}, on_error="raise") as ckpt:
        if resume:
            ckpt.restore()
        else:
            step_scaled(model, optimizer)
            ckpt.step()
            ckpt.save()
        step_scaled(model, optimizer)
    found = {name: raw(p.full_tensor()) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        for key, item in optimizer.state[p].items():
            found[f"{name}/{key}"] = type(item).__name__, raw(item.full_tensor() if isinstance(item, DTensor) else item)
    return found


def step_scaled(model, optimizer):
    optimizer.zero_grad()
    model().full_tensor().backward()
    optimizer.step()


def test_scalars_and_empty_tensors_go_on_bit_for_bit_with_state_of_the_same_kind(ranks, tmp_path):
    straight = ranks.run_all_well(f"{MODULE}:train_scaled", 4, str(tmp_path), False)
    assert straight[0]["scale/exp_avg"][0] == "DTensor" and straight[0]["scale/step"][0] == "Tensor"
    assert ranks.run_all_well(f"{MODULE}:train_scaled", 4, str(tmp_path), True) == straight
    other = ranks.run_all_well(f"{MODULE}:train_scaled", 3, str(tmp_path), True)[0]
    assert other == straight[0]


def save_once(rank, directory, state):
    with unbroken.Checkpointer(directory, state) as ckpt:
        ckpt.step()
        ckpt.save()
        # A rank that went on alone would wait here for the others until the group's timeout.
        dist.all_reduce(torch.ones(1))


def save_turned(rank, world_size, directory, ranks_of_mesh):
    model = nn.Linear(4, 4)
    fully_shard(
        model, mesh=DeviceMesh("cpu", ranks_of_mesh, mesh_dim_names=("a", "b")[: torch.tensor(ranks_of_mesh).dim()])
    )
    save_once(rank, directory, {"model": model})


@pytest.mark.parametrize("ranks_of_mesh", [[2, 0, 3, 1], [[3, 1], [0, 2]]])
def test_a_mesh_that_fsdp_cuts_otherwise_than_it_says_is_refused(ranks, tmp_path, ranks_of_mesh):
    for result in ranks.run(f"{MODULE}:save_turned", 4, str(tmp_path), ranks_of_mesh):
        assert isinstance(result, Raised) and result.kind == "UnsupportedValue", result
        assert "model/weight is a DTensor of a mesh whose ranks do not ascend" in result.text
        assert "plain dense" not in result.text


def save_outside(rank, world_size, directory):
    weight = DTensor.from_local(
        torch.ones(2, 2),
        DeviceMesh("cpu", [0, 1, 2]),
        [Shard(0)],
        run_check=False,
        shape=torch.Size((6, 2)),
        stride=(2, 1),
    )
    save_once(rank, directory, {"weight": weight})


def test_what_one_rank_cannot_store_at_the_first_save_ends_that_save_on_every_rank(ranks, tmp_path):
    *others, outside = ranks.run(f"{MODULE}:save_outside", 4, str(tmp_path))
    assert outside.kind == "UnsupportedValue" and "of a mesh that this rank is not in" in outside.text
    for result in others:
        assert isinstance(result, Raised) and result.kind == "UsageError", result
        assert "rank 3: " in result.text and "of a mesh that this rank is not in" in result.text


def save_optimizer_on_some(rank, world_size, directory):
    model = fully_shard(nn.Linear(4, 4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    with unbroken.Checkpointer(
        directory, {"model": model, **({"optimizer": optimizer} if rank < 2 else {})}, on_error="raise"
    ) as ckpt:
        ckpt.step()
        ckpt.save()
        ckpt.wait()


def test_ranks_that_lack_a_shard_are_named(ranks, tmp_path):
    for result in ranks.run(f"{MODULE}:save_optimizer_on_some", 4, str(tmp_path)):
        assert isinstance(result, Raised) and result.kind == "SaveFailed", result
        assert (
            "optimizer/state/model/bias/exp_avg is sharded over ranks 0-3, and not registered on rank(s) 2-3"
            in result.text
        )


def save_early_optimizer(rank, world_size, directory):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    save_once(rank, directory, {"model": fully_shard(model), "optimizer": optimizer})


def test_an_optimizer_that_was_made_before_the_model_was_sharded_is_told_so(ranks, tmp_path):
    for result in ranks.run(f"{MODULE}:save_early_optimizer", 2, str(tmp_path)):
        assert isinstance(result, Raised) and result.kind == "UsageError", result
        assert "make the optimizer after the model was sharded" in result.text
