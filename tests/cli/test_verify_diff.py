"""`verify` and `diff` as commands; what they find is tried in test_verification.py and test_comparison.py."""

from __future__ import annotations

import json
import shutil

import pytest
from typer.testing import CliRunner

import unbroken
from two_rank_run import make_run
from unbroken.cli.main import app

WIDEST = 80


def call(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("made") / "run"
    make_run(path)
    return path


@pytest.fixture
def run(made, tmp_path):
    return shutil.copytree(made, tmp_path / "run")


def flip(path, index=-1):
    data = bytearray(path.read_bytes())
    data[index] ^= 1
    path.write_bytes(data)


def test_a_whole_run_exits_with_zero_and_says_what_a_start_would_restore(run):
    result = call("verify", run)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["step", "generation", "size", "state"]
    assert [[*line.split()[:2], line.split()[-1]] for line in lines[1:7]] == [
        ["5", "3", "good"],
        ["4", "2", "good"],
        ["3", "2", "good"],
        ["3", "1", "abandoned"],
        ["2", "1", "good"],
        ["1", "1", "good"],
    ]
    assert lines[7:] == ["a start would restore step 5 of generation 3"]
    assert max(map(len, lines)) <= WIDEST


def test_faults_exit_with_one_and_are_told_to_machines_as_to_people(run):
    flip(run / "step-5/g0003-rank-00001.safetensors")
    (run / "step-2/manifest.json").unlink()
    result = call("verify", run)
    assert result.exit_code == 1
    assert "step-5/g0003-rank-00001.safetensors, bytes 0-" in result.stdout
    assert "(rank-00001/own, rank-00001/rng/numpy/state/key, " in result.stdout and "more)" in result.stdout
    assert "never committed, or being saved now: step-2" in result.stdout
    assert "a start would restore step 4 of generation 2" in result.stdout
    found = json.loads(call("verify", run, "--json").stdout)
    (fault,) = found["faults"]
    assert fault["file"] == "step-5/g0003-rank-00001.safetensors"
    assert {"rank-00001/own", "weights[70:140,0:2000]"} <= set(fault["tensors"])
    assert (found["restores"], found["unfinished"], found["refusal"]) == ("step-4", ["step-2"], None)
    assert [checkpoint["usable"] for checkpoint in found["checkpoints"]] == [False, True, True, True, True]


def test_one_step_can_be_verified_and_one_that_is_not_there_is_wrong_use(run):
    flip(run / "step-5/g0003-rank-00001.safetensors")
    assert call("verify", run, "--step", "4").exit_code == 0
    assert call("verify", run, "--step", "5").exit_code == 1
    with pytest.raises(unbroken.UsageError, match="holds no checkpoint of step 7; it holds steps 5, 4, 3, 3, 2, 1"):
        raise call("verify", run, "--step", "7").exception


def test_a_damaged_manifest_can_be_verified_by_its_step(run):
    (run / "step-5/manifest.json").write_bytes(b"{")
    result = call("verify", run, "--step", "5")
    assert result.exit_code == 1
    assert "step-5/manifest.json is cut or damaged" in result.stdout


def test_a_run_equals_its_copy(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    result = call("diff", run, copy)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("equal: ") and "of step 5" in result.stdout
    assert json.loads(call("diff", run, copy, "--json").stdout)["equal"] is True


@pytest.mark.parametrize("a", ["@4", "/step-4", "/step-4/manifest.json"])
@pytest.mark.parametrize("b", ["", "@5", "/step-5/"])
def test_a_checkpoint_can_be_named_in_several_ways(run, a, b):
    result = call("diff", f"{run}{a}", f"{run}{b}", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert (found["a"]["step"], found["b"]["step"]) == (4, 5)


def test_the_manifest_of_an_abandoned_history_can_be_named(run):
    found = json.loads(call("diff", run / "step-3", run / "step-3/manifest.g0001.json", "--json").stdout)
    assert (found["a"]["generation"], found["b"]["generation"]) == (2, 1)
    by_name = {item["name"]: item for item in found["tensors"]}
    assert by_name["weights"]["differing"] == by_name["weights"]["elements"] == 280_000
    assert by_name["weights"]["ranks"] is None
    assert [item["ranks"] for item in found["tensors"] if item["name"] == "own"] == [[0], [1]]
    paths = {item["path"]: (item["a"], item["b"]) for item in found["values"]}
    assert paths["box/state/history/items/1"] == (2, 1)


def test_differences_are_a_table_that_fits(run):
    result = call("diff", f"{run}@4", f"{run}@5")
    lines = result.stdout.splitlines()
    assert lines[0] == "step: 4 and 5"
    assert ["weights", "all", "280000", "280000"] in [line.split()[:4] for line in lines]
    assert max(map(len, lines)) <= WIDEST


@pytest.mark.parametrize("path", ["nothing", "run@9", "run@x", "run/step-9", "run/step-5/manifest.g0009.json"])
def test_what_is_not_there_is_wrong_use(run, path):
    error = call("diff", run, run.parent / path).exception
    assert isinstance(error, unbroken.UsageError)


def test_a_damaged_byte_is_an_error_not_a_difference(run):
    flip(run / "step-5/g0003-rank-00001.safetensors")
    error = call("diff", run, f"{run}@4").exception
    assert isinstance(error, unbroken.DamagedCheckpoint)
    assert "do not match their digest" in str(error)


def test_verify_and_diff_change_nothing(run):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    call("verify", run)
    call("diff", run, f"{run}@4")
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
