"""Real DTensors from one set of placements to another: equal to the gathered original, and to what DCP restores."""

import random
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import unbroken
from sharded.models import raw

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def random_plan(seed):
    """Shapes, dtypes and two placements for each of a few tensors."""
    draw = random.Random(seed)
    before, after = draw.choice([(4,), (2, 2)]), draw.choice([(4,), (2, 2)])
    tensors = []
    for _ in range(3):
        shape = tuple(draw.randint(1, 9) for _ in range(draw.randint(1, 3)))
        placements = [
            [draw.choice([Replicate(), *(Shard(dim) for dim in range(len(shape)))]) for _ in mesh]
            for mesh in (before, after)
        ]
        tensors.append((shape, draw.choice(DTYPES), *placements))
    return before, after, tensors


def whole(seed, index, shape, dtype):
    generator = torch.Generator().manual_seed(100 * seed + index)
    return torch.randn(shape, generator=generator).to(dtype)


def spread(mesh, tensors, which, make):
    """A module whose parameters are DTensors."""
    module = nn.Module()
    for index, (shape, dtype, *placements) in enumerate(tensors):
        spread_tensor = distribute_tensor(make(index, shape, dtype), mesh, placements[which])
        module.register_parameter(f"t{index}", nn.Parameter(spread_tensor))
    return module


def round_trip(rank, world_size, directory, seed):
    """Which tensors are not as they were: ours, and DCP's."""
    before, after, tensors = random_plan(seed)
    original = spread(init_device_mesh("cpu", before), tensors, 0, lambda *of: whole(seed, *of))
    with unbroken.Checkpointer(f"{directory}/ours", {"model": original}, on_error="raise") as ckpt:
        ckpt.step()
        ckpt.save()
    mesh = init_device_mesh("cpu", after)
    ours, theirs = (spread(mesh, tensors, 1, lambda _, shape, dtype: torch.zeros(shape, dtype=dtype)) for _ in range(2))
    with unbroken.Checkpointer(f"{directory}/ours", {"model": ours}) as ckpt:
        ckpt.restore()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(original.state_dict(), checkpoint_id=f"{directory}/dcp")
        state = theirs.state_dict()
        dcp.load(state, checkpoint_id=f"{directory}/dcp")
    wrong = []
    for index, (shape, dtype, *_) in enumerate(tensors):
        expected = raw(whole(seed, index, shape, dtype))
        found = {"ours": getattr(ours, f"t{index}"), "dcp": state[f"t{index}"]}
        wrong += [(name, index) for name, tensor in found.items() if raw(tensor.full_tensor()) != expected]
    return wrong


@pytest.mark.parametrize("plans", [range(6), pytest.param(range(6, 60), marks=pytest.mark.slow)])
def test_dtensors_of_any_placements_restore_as_with_dcp(ranks, tmp_path, plans):
    for seed in plans:
        results = ranks.run_all_well("sharded.test_against_dcp:round_trip", 4, str(tmp_path / str(seed)), seed)
        assert results == [[]] * 4, random_plan(seed)
