"""`export` and `import` as commands; what they write is tried in test_export.py and test_importing.py."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import unbroken
from unbroken.cli.main import app
from unbroken.cli.output import parse_size

WIDEST = 80


def call(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture
def run(tmp_path):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    path = tmp_path / "run"
    with unbroken.Checkpointer(path, {"model": model, "optimizer": optimizer}, on_error="raise") as ckpt:
        for step in (1, 2):
            nn.init.constant_(model.weight, step)
            ckpt.step()
            ckpt.save()
    return path


def flip_last_byte(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(("at", "step"), [("", 2), ("@1", 1), ("/step-1", 1), ("/step-1/manifest.json", 1)])
def test_a_checkpoint_is_named_as_for_other_commands(run, tmp_path, at, step):
    result = call("export", f"{run}{at}", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert result.stdout == f"exported model of step {step}: 2 tensors, 32 B, to {tmp_path / 'out'}\n"
    assert load_file(tmp_path / "out/model.safetensors")["weight"].unique().item() == step


def test_the_result_is_told_to_machines(run, tmp_path):
    found = json.loads(call("export", run, tmp_path / "out", "--max-shard-size", "10", "--json").stdout)
    assert (found["format"], found["step"], found["names"], found["tensors"]) == ("safetensors", "2", ["model"], 2)
    assert [file["name"] for file in found["files"]] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    assert all((tmp_path / "out" / file["name"]).stat().st_size == file["size"] for file in found["files"])


def test_all_or_some_of_the_state_goes_into_a_file_of_torch(run, tmp_path):
    assert call("export", run, tmp_path / "all.pt", "--to", "torch").exit_code == 0
    loaded = torch.load(tmp_path / "all.pt", weights_only=True)
    assert loaded.keys() == {"model", "optimizer"}
    assert loaded["optimizer"]["param_groups"][0]["lr"] == 0.5
    assert call("export", run, tmp_path / "some.pt", "--to", "torch", "--name", "model").exit_code == 0
    assert torch.load(tmp_path / "some.pt", weights_only=True).keys() == {"model"}


@pytest.mark.parametrize("to", ["safetensors", "torch", "dcp"])
def test_damage_is_an_error_and_leaves_nothing(run, tmp_path, to):
    flip_last_byte(next((run / "step-2").glob("*.safetensors")))
    result = call("export", run, tmp_path / "out", "--to", to)
    assert isinstance(result.exception, unbroken.DamagedCheckpoint) and result.exception.exit_code == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--name", "other"], "no module 'other'; it holds model"),
        (["--name", "a", "--name", "b"], "safetensors hold one module"),
        (["--name", "other", "--to", "dcp"], "holds no other; it holds model, optimizer"),
        (["--max-shard-size", "5 apples"], "'5 apples' is no size"),
        (["--rank", "1"], "there is no rank 1"),
    ],
)
def test_wrong_use_is_told_and_leaves_nothing(run, tmp_path, arguments, says):
    error = call("export", run, tmp_path / "out", *arguments).exception
    assert isinstance(error, unbroken.UsageError) and says in str(error)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5_000_000_000), ("2 KiB", 2048), ("1.5mb", 1_500_000), ("7", 7), ("3B", 3), ("2g", 2_000_000_000)],
)
def test_sizes_are_read_as_people_write_them(text, size):
    assert parse_size(text) == size


def test_the_help_fits_and_has_an_example():
    lines = call("export", "--help").output.splitlines()
    assert any("unbroken export runs/gpt" in line for line in lines)
    assert max(map(len, lines)) <= WIDEST
