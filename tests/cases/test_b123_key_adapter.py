"""B123: a model renamed its keys for the file; under DistributedDataParallel that was not found, and wrong names asked.

Right: names are those of the module tree, whatever `state_dict` calls them and whatever wraps it: what two ranks under
DDP saved is found by them and by one process without DDP, and the adapter's names are its own business.
"""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unbroken
from sharded.models import raw

MODULE = "cases.test_b123_key_adapter"


class Adapted(nn.Module):
    """Its `state_dict` has the names of another library."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.query = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_state_dict_post_hook(rename)
        self.register_load_state_dict_pre_hook(rename_back)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.query(x))


def rename(_module, state, prefix, _metadata):
    for name in [name for name in state if name.startswith(f"{prefix}query.")]:
        state[name.replace("query.", "self_attention.q.")] = state.pop(name)


def rename_back(_module, state, _prefix, *_more):
    for name in [name for name in state if "self_attention.q." in name]:
        state[name.replace("self_attention.q.", "query.")] = state.pop(name)


def part(rank, world_size, directory, seed, wrapped):
    """Restore, or else train a step and save; all values under the tree's names."""
    inner = Adapted(seed)
    model = DistributedDataParallel(inner) if wrapped else inner
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    with unbroken.Checkpointer(directory, {"model": model, "optimizer": optimizer}, on_error="raise") as ckpt:
        if ckpt.restore() is None:
            model(torch.randn(4, 3)).square().sum().backward()
            optimizer.step()
            ckpt.step()
            ckpt.save()
    assert "self_attention.q.weight" in inner.state_dict(), "the adapter is at work"
    values = {name: raw(tensor) for name, tensor in [*inner.named_parameters(), *inner.named_buffers()]}
    for name, parameter in inner.named_parameters():
        values |= {f"{name}/{key}": raw(item) for key, item in optimizer.state[parameter].items()}
    return values


@pytest.mark.parametrize("wrapped", [True, False])
def test_an_adapter_under_ddp_changes_no_name_and_loses_no_key(ranks, tmp_path, wrapped):
    saved = ranks.run_all_well(f"{MODULE}:part", 2, str(tmp_path), 1, True)
    manifest = json.loads((tmp_path / "step-1/manifest.json").read_bytes())["body"]
    assert {"model/query.weight", "optimizer/state/model/query.weight/exp_avg"} <= manifest["tensors"].keys()
    assert "self_attention" not in str(manifest)
    world_size = 2 if wrapped else 1
    assert ranks.run_all_well(f"{MODULE}:part", world_size, str(tmp_path), 2, wrapped) == saved[:world_size]
