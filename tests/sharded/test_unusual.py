"""Sharded tensors that are rare or wrong: scalars, empty ones, meshes in odd orders, ranks that lack something."""

import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import unbroken
from processes import Raised
from sharded.models import Net, raw
from unbroken.errors import StateMismatch

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


class Normed(nn.Module):
    """Statistics that nothing keeps equal, beside sharded weights."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.inner(x))


def train_normed(rank, world_size, directory, resume):
    """What a refused restore says, and whether anything live changed."""
    torch.manual_seed(resume)
    model = fully_shard(Normed())
    optimizer = torch.optim.Adam(model.parameters())
    with unbroken.Checkpointer(directory, {"model": model, "optimizer": optimizer}, on_error="raise") as ckpt:
        if resume:
            before = [raw(local(tensor)) for tensor in model.state_dict().values()]
            with pytest.raises(StateMismatch) as told:
                ckpt.restore()
            return str(told.value), before == [raw(local(tensor)) for tensor in model.state_dict().values()]
        model(torch.randn(8, 4, generator=torch.Generator().manual_seed(rank))).sum().backward()
        optimizer.step()
        ckpt.step()
        ckpt.save()
    return None


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def test_a_restore_that_is_refused_for_what_ranks_had_of_their_own_changes_nothing(ranks, tmp_path):
    ranks.run_all_well(f"{MODULE}:train_normed", 4, str(tmp_path), False)
    for text, unchanged in ranks.run_all_well(f"{MODULE}:train_normed", 2, str(tmp_path), True):
        assert "model/norm.running_mean was each rank's own on ranks 0-3" in text and "Nothing was changed" in text
        assert unchanged


def train_with_rate(rank, world_size, directory, resume, flat):
    """FSDP1 with a learning rate that is a tensor; few elements, so that ranks hold nothing of some parameters."""
    torch.manual_seed(resume)
    model = FullyShardedDataParallel(
        Net(1 + resume).requires_grad_(), use_orig_params=not flat, device_id=torch.device("cpu")
    )
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=torch.tensor(0.1))
    with unbroken.Checkpointer(directory, {"model": model, "optimizer": optimizer}, on_error="raise") as ckpt:
        if resume:
            ckpt.restore()
        else:
            step_net(model, optimizer)
            optimizer.param_groups[0]["lr"].fill_(0.25)
            ckpt.step()
            ckpt.save()
        step_net(model, optimizer)
    return float(optimizer.param_groups[0]["lr"]), [raw(p.detach()) for p in model.parameters()]


def step_net(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(4, 6)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("flat", [False, True])
def test_a_learning_rate_tensor_is_every_ranks_also_of_those_that_hold_nothing_of_a_parameter(ranks, tmp_path, flat):
    straight = ranks.run_all_well(f"{MODULE}:train_with_rate", 4, str(tmp_path), False, flat)
    assert {rate for rate, _ in straight} == {0.25}
    assert ranks.run_all_well(f"{MODULE}:train_with_rate", 4, str(tmp_path), True, flat) == straight
    assert {r for r, _ in ranks.run_all_well(f"{MODULE}:train_with_rate", 3, str(tmp_path), True, not flat)} == {0.25}


def restore_some(rank, world_size, directory, lacking, strict):
    model = fully_shard(Net(rank))
    trained = [p for name, p in model.named_parameters() if p.requires_grad]
    if rank == 1 and lacking == "parameter":
        trained = trained[1:]
    state = {"model": model, "optimizer": torch.optim.Adam(trained)}
    if rank == 1 and lacking == "optimizer":
        del state["optimizer"]
    with unbroken.Checkpointer(directory, state) as ckpt:
        ckpt.restore(strict=strict)


def save_some(rank, world_size, directory):
    model = fully_shard(Net(1))
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
    step_net(model, optimizer)
    save_once(rank, directory, {"model": model, "optimizer": optimizer})


@pytest.mark.parametrize("lacking", ["parameter", "optimizer"])
def test_a_shard_that_one_rank_has_not_registered_is_refused_by_all_at_the_restore(ranks, tmp_path, lacking):
    ranks.run_all_well(f"{MODULE}:save_some", 4, str(tmp_path))
    for result in ranks.run(f"{MODULE}:restore_some", 4, str(tmp_path), lacking, True):
        assert isinstance(result, Raised) and result.kind == "StateMismatch", result
        assert "lies on ranks 0-3, and is not registered on rank(s) 1" in result.text
    ranks.run_all_well(f"{MODULE}:restore_some", 4, str(tmp_path), lacking, False)


def compose(rank, world_size, directory):
    """What is told of DDP's form that leaves no wrapper."""
    from torch.distributed._composable import replicate

    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("unbroken.state.buckets").addHandler(handler)
    try:
        unbroken.Checkpointer(directory, {"model": replicate(nn.Linear(2, 2))}).close()
        unbroken.Checkpointer(directory, {"model": fully_shard(nn.Linear(2, 2))}).close()
    finally:
        logging.getLogger("unbroken.state.buckets").removeHandler(handler)
    return told


def test_ddps_composable_form_is_told_to_be_inexact(ranks, tmp_path):
    for told in ranks.run_all_well(f"{MODULE}:compose", 2, str(tmp_path)):
        assert len(told) == 1 and "use DistributedDataParallel instead" in told[0]


def outlive_the_group(rank, world_size, directory):
    """A model whose process group is gone, kept alive beside a job that keeps a ledger, and registered in another."""
    group = dist.new_group()
    gone = DistributedDataParallel(nn.Linear(2, 2), process_group=group)
    optimizer = torch.optim.SGD(gone.parameters(), 0.1)
    gone(torch.ones(1, 2)).sum().backward()
    dist.destroy_process_group(group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNBROKEN_LEDGER", f"{directory}/ledger")
        with unbroken.Checkpointer(f"{directory}/run", {"weight": torch.ones(1)}, on_error="raise") as ckpt:
            ckpt.step(loss=1.0)
            ckpt.save()
    assert optimizer.param_groups
    save_once(rank, f"{directory}/other", {"model": gone})


def test_a_model_whose_process_group_is_gone_harms_no_other_job_and_is_refused_by_name(ranks, tmp_path):
    for result in ranks.run(f"{MODULE}:outlive_the_group", 2, str(tmp_path)):
        assert isinstance(result, Raised) and result.kind == "UsageError", result
        assert "the process group of a DistributedDataParallel is gone" in result.text
