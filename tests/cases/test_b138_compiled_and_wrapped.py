"""B137: an adapter's checkpoint had keys with `_orig_mod.`, the resume matched none and trained fresh adapters.
B138: names differed between eager and compiled, and between DDP outside and inside of it; one project went on from
random weights.

Right: one name, however the model is wrapped: each of the four restores what each of the others saved. What is under
names that do not match is an error. (One process, whole models: `test_around_restoring.py`.)
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unbroken
from sharded.models import raw

MODULE = "cases.test_b138_compiled_and_wrapped"


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


WRAPPED = {
    "eager": DistributedDataParallel,
    "ddp-of-compiled": lambda model: DistributedDataParallel(compiled(model)),
    "compiled-ddp": lambda model: compiled(DistributedDataParallel(model)),
    "compiled-part": lambda model: DistributedDataParallel(with_compiled_part(model)),
}


def with_compiled_part(model: nn.Sequential) -> nn.Sequential:
    model[1] = compiled(model[1])
    return model


def values(parameters, optimizer):
    return [raw(item) for p in parameters for item in (p, *optimizer.state[p].values())]


def part(rank, world_size, directory, kind, seed):
    """Restore, or else make a state and save it; every value in the order of the tree."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))
    parameters = list(model.parameters())
    wrapped = WRAPPED[kind](model)
    optimizer = torch.optim.Adam(wrapped.parameters(), 0.1)
    with unbroken.Checkpointer(directory, {"model": wrapped, "optimizer": optimizer}, on_error="raise") as ckpt:
        if ckpt.restore() is None:
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            ckpt.step()
            ckpt.save()
    return values(parameters, optimizer)


@pytest.mark.parametrize("saved_as", WRAPPED)
def test_each_way_of_wrapping_restores_what_the_others_saved(ranks, tmp_path, saved_as):
    saved = ranks.run_all_well(f"{MODULE}:part", 2, str(tmp_path), saved_as, 1)
    assert len(saved[0]) == 4 * 4 and saved[0] == saved[1]
    for live in WRAPPED:
        assert ranks.run_all_well(f"{MODULE}:part", 2, str(tmp_path), live, 2) == saved, live


class Adapter(nn.Module):
    """A frozen layer with a small one beside it."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.down = nn.Linear(4, 2, bias=False)
        self.up = nn.Linear(2, 4, bias=False)


def put(path, module):
    """Restore into an adapter that is registered as `adapter`, or save it."""
    with unbroken.Checkpointer(path, {"adapter": module}) as ckpt:
        if ckpt.restore() is None:
            ckpt.save()


@pytest.mark.parametrize("compile_saved", [True, False])
def test_b137_an_adapter_that_was_compiled_is_found_and_no_other_passes_in_silence(tmp_path, compile_saved):
    saved, live = Adapter(1), Adapter(2)
    put(tmp_path, compiled(saved) if compile_saved else saved)
    put(tmp_path, live if compile_saved else compiled(live))
    for name, value in saved.state_dict().items():
        assert torch.equal(value, live.state_dict()[name]), name
    with pytest.raises(unbroken.StateMismatch, match=r"missing in the checkpoint: 4 \(adapter/_orig_mod\.base\.weight"):
        put(tmp_path, nn.ModuleDict({"_orig_mod": Adapter(3)}))
