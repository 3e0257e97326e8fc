"""The code on docs/loading.md does what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch import nn

import unbroken
from sharded.models import Net, raw

PAGE = Path(__file__).parents[1] / "docs/loading.md"
SINGLE, SEVERAL = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def content(model):
    return {name: raw(tensor) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("code", [SINGLE, SEVERAL])
def test_a_run_of_one_process_is_loaded(tmp_path, monkeypatch, code):
    monkeypatch.chdir(tmp_path)
    saved = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    with unbroken.Checkpointer("runs/gpt", {"model": saved}, on_error="raise") as ckpt:
        for _ in range(40):
            ckpt.step()
        ckpt.save()
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    exec(code, {"model": model})
    assert content(model) == content(saved)


@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "two_dimensional", "fsdp1"])
def test_a_run_of_several_ranks_is_loaded(ranks, tmp_path, monkeypatch, layout):
    monkeypatch.chdir(tmp_path)
    expected, *_ = ranks.run_all_well("test_export:save_layout", 4, str(tmp_path / "runs/gpt"), layout)
    (tmp_path / "runs/gpt/step-2").rename(tmp_path / "runs/gpt/step-40")
    model = Net(5)
    exec(SEVERAL, {"model": model})
    assert content(model) == {name: value for name, value in expected.items() if "/" not in name}


def test_it_is_as_short_as_it_says():
    assert len([line for line in SINGLE.splitlines() if line]) <= 5
