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


@pytest.mark.parametrize(("command", "example"), [("export", "runs/gpt weights"), ("import", "checkpoint.pt runs/gpt")])
def test_the_help_fits_and_has_an_example(command, example):
    lines = call(command, "--help").output.splitlines()
    assert any(f"unbroken {command} {example}" in line for line in lines)
    assert max(map(len, lines)) <= WIDEST


def test_what_was_exported_can_be_imported_and_goes_on(run, tmp_path):
    for to in ("torch", "dcp"):
        call("export", run, tmp_path / to, "--to", to)
        result = call("import", tmp_path / to, tmp_path / f"{to}-run", "--step", "9")
        assert result.exit_code == 0, result.output
        expected = f"imported model, optimizer as step 9 of {tmp_path / f'{to}-run'}: 2 tensors, 32 B\n"
        assert result.stdout == expected
        assert call("verify", tmp_path / f"{to}-run").exit_code == 0
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with unbroken.Checkpointer(tmp_path / f"{to}-run", {"model": model, "optimizer": optimizer}) as ckpt:
            assert ckpt.restore().step == ckpt.global_step == 9
        assert model.weight.unique().item() == 2 and optimizer.param_groups[0]["lr"] == 0.5


def test_an_import_is_told_to_machines_with_what_was_left_out(tmp_path):
    torch.save({"net_state_dict": {"module.w": torch.ones(2)}, "epoch": 3, "best": {"loss": 0.5}}, tmp_path / "all.pt")
    result = call("import", tmp_path / "all.pt", tmp_path / "run", "--skip", "best", "--json")
    assert json.loads(result.stdout) == {
        "run": str(tmp_path / "run"),
        "format": "torch",
        "step": 0,
        "generation": 1,
        "names": ["net"],
        "tensors": 1,
        "bytes": 8,
        "notes": [
            "left out: epoch is no state dict",
            "net: the names are taken without module.; --prefix '' keeps them",
        ],
    }


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tie", "a"], "is no pair of names"),
        (["--from", "dcp"], "holds no .metadata"),
        (["--step", "-1"], "-1 is no step"),
        (["--skip", "model"], "holds nothing that can be imported"),
        (["--name", "rng"], "use another name"),
    ],
)
def test_wrong_use_of_import_is_told_and_leaves_nothing(tmp_path, arguments, says):
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    error = call("import", tmp_path / "w.pt", tmp_path / "run", *arguments).exception
    assert isinstance(error, unbroken.UsageError) and says in str(error)
    assert [path.name for path in tmp_path.iterdir()] == ["w.pt"]


def test_a_damaged_source_exits_with_one(tmp_path):
    (tmp_path / "w.pt").write_bytes(b"PK\x03\x04 and nothing more")
    error = call("import", tmp_path / "w.pt", tmp_path / "run").exception
    assert isinstance(error, unbroken.DamagedCheckpoint) and error.exit_code == 1
