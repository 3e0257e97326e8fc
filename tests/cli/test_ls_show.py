"""`ls` and `show` on real run directories: what they tell must be what the next start would find."""

import json
import shutil
from datetime import UTC, datetime

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import unbroken
from unbroken.cli.ls import age_text
from unbroken.cli.main import app
from unbroken.cli.output import printable, size_text
from unbroken.errors import DamagedCheckpoint

WIDEST = 80


def call(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def train(path, *steps, restore=True):
    """Start a job, save after each of `steps`."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with unbroken.Checkpointer(path, {"model": model, "optimizer": optimizer}, keep=None) as ckpt:
        if restore:
            ckpt.restore()
        while ckpt.global_step < max(steps):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            ckpt.step()
            if ckpt.global_step in steps:
                ckpt.save()
                ckpt.wait()


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "straight"
    train(path, 2, 4)
    return path


@pytest.fixture
def run(straight, tmp_path):
    return shutil.copytree(straight, tmp_path / "run")


def cut_a_tensor_file(run, step):
    file = next((run / f"step-{step}").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])


def states(run):
    result = call("ls", run, "--json")
    return {entry["step"]: entry["state"] for entry in json.loads(result.stdout)["checkpoints"]}, result.exit_code


def test_ls_lists_the_newest_first(run):
    result = call("ls", run)
    assert result.exit_code == 0
    header, newest, oldest = (line.split() for line in result.stdout.splitlines())
    assert header == ["step", "generation", "world", "size", "size", "age", "state"]
    assert (newest[:3], newest[-1]) == (["4", "1", "1"], "good")
    assert (oldest[0], oldest[-1]) == ("2", "good")


def test_ls_tells_machines_the_same(run):
    found = json.loads(call("ls", run, "--json").stdout)
    assert found["generation"] == 1
    newest = found["checkpoints"][0]
    assert newest["directory"] == "step-4"
    assert newest["bytes"] == sum(path.stat().st_size for path in (run / "step-4").glob("*.safetensors"))
    assert newest["complete"] and newest["on_lineage"]


def test_a_save_that_never_committed_is_unfinished(run):
    (run / "step-4" / "manifest.json").unlink()
    assert states(run) == ({4: "unfinished", 2: "good"}, 0)


def test_a_damaged_checkpoint_is_a_fault(run):
    cut_a_tensor_file(run, 4)
    assert states(run) == ({4: "damaged", 2: "good"}, 1)
    assert "bytes instead of" in call("ls", run).stdout


def test_an_abandoned_history_is_told_apart(run):
    """The job went on from step 2, as step 4 could not be used then, and became good again (a disk came back)."""
    hidden = (run / "step-4").rename(run.parent / "hidden")
    train(run, 3)
    hidden.rename(run / "step-4")
    assert states(run) == ({4: "abandoned", 3: "good", 2: "good"}, 0)
    assert "step 3, saved" in call("show", run).stdout


def test_an_empty_run_has_no_checkpoint(tmp_path):
    result = call("ls", tmp_path)
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path} holds no checkpoint\n")


def test_tables_fit_eighty_columns(run):
    for command in ("ls", "show"):
        lines = call(command, run).stdout.splitlines()
        table = [line for line in lines if str(run) not in line]
        assert max(map(len, table)) <= WIDEST


def test_show_names_tensors_values_and_the_environment(run):
    text = call("show", run).stdout
    assert "step 4, saved" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["model/weight", "float32", "[2,", "3]", "24", "B"] in rows
    assert ["optimizer/state/model/bias/momentum_buffer", "float32", "[2]", "8", "B"] in rows
    assert any(row[:1] == ["rng/torch"] for row in rows)
    assert any(row[:1] == ["torch"] and torch.__version__ in row[1] for row in rows)


def test_show_prints_the_whole_manifest_for_machines(run):
    shown = json.loads(call("show", run, "--step", "2", "--json").stdout)
    assert shown["step"] == 2
    assert shown["tensors"]["model/weight"]["shape"] == [2, 3]


def test_a_damaged_step_is_a_fault_and_one_that_is_not_there_is_wrong_use(run):
    cut_a_tensor_file(run, 4)
    with pytest.raises(DamagedCheckpoint, match=r"step 4 in .* cannot be used: .* bytes instead of") as damaged:
        raise call("show", run, "--step", "4").exception
    assert damaged.value.exit_code == 1
    with pytest.raises(unbroken.UsageError, match=r"holds no checkpoint of step 3; it holds steps 2$"):
        raise call("show", run, "--step", "3").exception


def test_a_single_checkpoint_is_no_run_directory(run):
    with pytest.raises(unbroken.UsageError, match="is a single checkpoint; give the run directory above it"):
        raise call("ls", run / "step-4").exception


def test_looking_changes_nothing(run):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    call("ls", run)
    call("show", run)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_names_from_a_hostile_directory_cannot_steer_the_terminal():
    assert printable("a\x1b[2Jb\nc\x9b") == "a\\x1b[2Jb\\nc\\x9b"
    assert printable("h.0.weight ü") == "h.0.weight ü"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_600, "1 MB"),
        (1_230_000_000, "1.23 GB"),
        (5 * 10**15, "5e+03 TB"),
    ],
)
def test_sizes_have_three_digits(count, text):
    assert size_text(count) == text


@pytest.mark.parametrize(
    ("saved_at", "text"),
    [
        ("2026-12-01T11:59:30+00:00", "30 s"),
        ("2026-12-01T11:30:00+00:00", "30 min"),
        ("2026-12-01T02:00:00+00:00", "10 h"),
        ("2026-11-01T12:00:00+00:00", "30 d"),
        ("2026-12-01T12:00:05+00:00", "0 s"),
        ("yesterday", "?"),
        ("2026-12-01T12:00:00", "?"),
    ],
)
def test_ages_have_one_unit(saved_at, text):
    assert age_text(saved_at, datetime(2026, 12, 1, 12, tzinfo=UTC)) == text
