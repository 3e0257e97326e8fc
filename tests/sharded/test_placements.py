"""DTensors that are not placed as their parameter is: gradients inside a window, moments of a custom optimizer."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import unbroken
from cases.test_b119_tensor_parallel import PLAN, Block, content
from processes import Raised
from sharded.models import full, make_job, raw
from unbroken.manifest import MANIFEST, decode, encode

MODULE = "sharded.test_placements"
WINDOW = 4
SAVED_AFTER = 6
"""Micro-batches: in the middle of the second window."""


def build(world_size, layout, seed):
    """A transformer's block, tensor parallel, and with FSDP2 around it in `two_dimensional`."""
    model = Block(seed)
    if layout == "tensor_parallel":
        parallelize_module(model, init_device_mesh("cpu", (world_size,)), PLAN)
    elif layout == "two_dimensional":
        mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], PLAN)
        fully_shard(model, mesh=mesh["dp"])
    elif layout == "fsdp2":
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def accumulate(rank, world_size, directory, layout, resume):
    """Three windows, with a checkpoint inside the second; losses, gradients and the end of what is after it."""
    model, optimizer = build(world_size, layout, 9 if resume else 1)
    told = []
    with unbroken.Checkpointer(directory, {"model": model, "optimizer": optimizer}, on_error="raise") as ckpt:
        ckpt.restore()
        for micro in range(SAVED_AFTER if resume else 0, 3 * WINDOW):
            if micro == SAVED_AFTER:
                told = [gradients(model)]
            # Ranks of one tensor parallel group read the same.
            data = torch.Generator().manual_seed(100 * micro + (rank // 2))
            loss = model(torch.randint(8, (3, 4), generator=data)).square().mean()
            loss.backward()
            last = micro % WINDOW == WINDOW - 1
            if last:
                optimizer.step()
                optimizer.zero_grad()
            told.append((full(loss).item(), gradients(model)))
            ckpt.step(accumulating=not last)
            if micro == SAVED_AFTER - 1:
                ckpt.save()
    return told, content(model, optimizer)


def gradients(model):
    """Placement and what this rank holds, of each."""
    return {
        name: (
            str(getattr(p.grad, "placements", "")),
            raw(p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad),
        )
        for name, p in model.named_parameters()
        if p.grad is not None
    }


@pytest.mark.parametrize(("layout", "world_size"), [("tensor_parallel", 2), ("two_dimensional", 4)])
def test_a_window_goes_on_with_the_gradients_and_placements_that_it_had(ranks, tmp_path, layout, world_size):
    straight = ranks.run_all_well(f"{MODULE}:accumulate", world_size, str(tmp_path), layout, False)
    assert ranks.run_all_well(f"{MODULE}:accumulate", world_size, str(tmp_path), layout, True) == straight
    placements = {placement for placement, _ in straight[0][0][0].values()}
    assert ("(Partial(sum),)" in placements) == (layout == "tensor_parallel"), placements


@pytest.mark.parametrize(("layout", "other"), [("tensor_parallel", "fsdp2"), ("replicas", "fsdp2")])
def test_sums_of_one_rank_alone_are_not_taken_for_shards_of_the_whole(ranks, tmp_path, layout, other):
    ranks.run_all_well(f"{MODULE}:accumulate", 2, str(tmp_path), layout, False)
    for result in ranks.run(f"{MODULE}:accumulate", 2, str(tmp_path), other, True):
        assert isinstance(result, Raised) and result.kind == "StateMismatch", result
        assert "is what this rank had summed alone, and cannot be had in another layout" in result.text


class Whole(torch.optim.Optimizer):
    """Keeps a whole moment beside each shard, the same on every rank, and one that is cut like the parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in (p for group in self.param_groups for p in group["params"]):
            state = self.state[parameter]
            whole = parameter.redistribute(placements=[Replicate()])
            state.setdefault("whole", torch.zeros_like(whole)).add_(whole)
            state.setdefault("part", torch.zeros_like(parameter)).add_(parameter)
            parameter.mul_(0.5)


def keep_whole(rank, world_size, directory, again):
    """Placement and gathered values of each moment after one step, or as restored."""
    model = make_job("fsdp2", seed=2 if again else 1).model
    optimizer = Whole(model.parameters(), {})
    with unbroken.Checkpointer(directory, {"model": model, "optimizer": optimizer}, on_error="raise") as ckpt:
        if again:
            ckpt.restore()
        else:
            optimizer.step()
            ckpt.step()
            ckpt.save()
    return [(key, i.placements, raw(i.full_tensor())) for s in optimizer.state.values() for key, i in s.items()]


def test_a_moment_comes_back_placed_as_it_was_and_not_as_its_parameter(ranks, tmp_path):
    saved = ranks.run_all_well(f"{MODULE}:keep_whole", 4, str(tmp_path), False)
    assert {(key, placements) for key, placements, _ in saved[0]} == {("whole", (Replicate(),)), ("part", (Shard(0),))}
    for world_size in (4, 3):
        restored = ranks.run_all_well(f"{MODULE}:keep_whole", world_size, str(tmp_path), True)
        assert restored == saved[:1] * world_size


def test_a_checkpoint_that_tells_no_placements_is_read_as_before(ranks, tmp_path):
    saved = ranks.run_all_well(f"{MODULE}:keep_whole", 4, str(tmp_path), False)
    path = tmp_path / "step-1" / MANIFEST
    manifest = decode(path.read_bytes(), "")
    for record in manifest.values["optimizer"]:
        for state in record.value["state"].values():
            assert state.pop("placements").keys() == {"whole"}
    path.write_bytes(encode(manifest))
    for restored in ranks.run_all_well(f"{MODULE}:keep_whole", 4, str(tmp_path), True):
        assert [(key, value) for key, _, value in restored] == [(key, value) for key, _, value in saved[0]]
        assert {placements for _, placements, _ in restored} == {(Shard(0),)}
