"""`prune` and `rollback` as commands, and what the next start of the job makes of what they leave."""

from __future__ import annotations

import json
import shutil

import pytest
from typer.testing import CliRunner

import unbroken
from toy import make_job, run_to, train
from two_rank_run import make_run, restore
from unbroken.cli.main import app
from unbroken.store.local import LocalStore
from unbroken.verification import verify_run


def call(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("made") / "run"
    return path, make_run(path)


@pytest.fixture
def run(made, tmp_path):
    return shutil.copytree(made[0], tmp_path / "run")


def states(run):
    found = json.loads(call("ls", run, "--json").stdout)["checkpoints"]
    return [(entry["step"], entry["generation"], entry["state"]) for entry in found]


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_after_a_rollback_the_next_start_restores_that_step_and_newer_ones_are_abandoned(run, made):
    result = call("rollback", run, "--step", "2")
    assert result.exit_code == 0, result.output
    assert "the next start restores step 2 of generation 1; this is generation 4" in result.stdout
    assert "abandoned, not deleted: step 5, 4, 3, 3" in result.stdout
    assert states(run) == [
        (5, 3, "abandoned"),
        (4, 2, "abandoned"),
        (3, 2, "abandoned"),
        (3, 1, "abandoned"),
        (2, 1, "good"),
        (1, 1, "good"),
    ]
    recovered, held = restore(run)
    assert (recovered.manifest.step, held) == (2, made[1][1, 2])


def test_a_rollback_can_return_to_an_abandoned_history_and_to_one_of_several(run, made):
    assert call("rollback", run, "--step", "3").exit_code == 0, "the one on the current lineage is meant"
    assert restore(run)[1] == made[1][2, 3]
    assert call("rollback", run, "--step", "3", "--generation", "1").exit_code == 0
    assert restore(run)[1] == made[1][1, 3]
    assert call("rollback", run, "--step", "5").exit_code == 0
    assert restore(run)[1] == made[1][3, 5]


def test_among_several_abandoned_ones_the_generation_must_be_given(run):
    call("rollback", run, "--step", "2")
    with pytest.raises(unbroken.UsageError, match="step 3 was saved by generations 2, 1, all abandoned"):
        raise call("rollback", run, "--step", "3").exception


def test_a_damaged_checkpoint_is_not_rolled_back_to(run):
    flip(run / "step-2/g0001-rank-00001.safetensors")
    with pytest.raises(unbroken.DamagedCheckpoint, match=r"nothing was changed: step-2/g0001-rank-00001.safetensors"):
        raise call("rollback", run, "--step", "2").exception
    assert not (run / "generations/0004.json").exists()


def test_a_step_that_is_not_there_is_wrong_use(run):
    for arguments in (["--step", "9"], ["--step", "2", "--generation", "2"]):
        with pytest.raises(unbroken.UsageError, match="holds no checkpoint of step"):
            raise call("rollback", run, *arguments).exception


def test_a_rollback_tells_machines_the_same(run):
    found = json.loads(call("rollback", run, "--step", "4", "--json").stdout)
    assert (found["generation"], found["step"], found["from_generation"]) == (4, 4, 2)
    assert found["abandoned"] == ["step-5", "step-3"]


def test_a_running_job_finds_itself_taken_over_and_the_next_start_goes_on_from_the_rollback(tmp_path):
    run = tmp_path / "run"
    straight = run_to(tmp_path / "straight", 6)
    job = make_job(run, 0, 1, every=unbroken.Every(steps=1), keep=None)
    job.ckpt.restore()
    train(job, 4)
    assert call("rollback", run, "--step", "2").exit_code == 0
    train(job, 5)
    with pytest.raises(unbroken.TakenOver, match="generation 2 has taken over"):
        job.ckpt.wait()
    job.ckpt.close()
    again = make_job(run, 0, 1, seed=7, every=unbroken.Every(steps=1), keep=None)
    assert again.ckpt.restore().step == 2
    train(again, 6).ckpt.close()
    assert again.weights() == straight.weights()
    assert {step: again.losses[step] for step in (3, 4, 5, 6)} == {step: straight.losses[step] for step in (3, 4, 5, 6)}
    assert not verify_run(LocalStore(run), lambda count: None).faults


def test_a_dry_run_says_what_would_go_and_deletes_nothing(run):
    before = sorted(run.rglob("*"))
    result = call("prune", run, "--keep", "2", "--abandoned", "--dry-run")
    assert result.exit_code == 0, result.output
    shown = [line.partition(",")[0] for line in result.stdout.splitlines()]
    assert shown == [
        "keeps step 5 of generation 3",
        "keeps step 4 of generation 2",
        "would delete step 3 of generation 2",
        "would delete step 3 of generation 1",
        "would delete step 2 of generation 1",
        "would delete step 1 of generation 1",
    ]
    assert sorted(run.rglob("*")) == before


def test_prune_deletes_and_the_run_restores_as_before(run, made):
    found = json.loads(call("prune", run, "--keep", "1", "--abandoned", "--json").stdout)
    assert [entry["step"] for entry in found["kept"]] == [5]
    assert [entry["step"] for entry in found["deleted"]] == [4, 3, 3, 2, 1]
    assert found["problems"] == []
    assert {path.name for path in run.iterdir()} == {"generations", "step-5"}
    assert restore(run)[1] == made[1][3, 5]


def test_prune_refuses_if_nothing_usable_would_stay(run):
    for file in run.glob("step-*/*-rank-00000.safetensors"):
        flip(file)
    error = call("prune", run, "--keep", "1").exception
    assert isinstance(error, unbroken.NoUsableCheckpoint)


def test_prune_beside_a_running_job_disturbs_none_of_its_saves(tmp_path):
    run = tmp_path / "run"
    run_to(run, 3, keep=None)
    job = make_job(run, 0, 1, every=unbroken.Every(steps=1), keep=None)
    job.ckpt.restore()
    for until in (4, 5, 6):
        train(job, until)
        assert call("prune", run, "--keep", "1").exit_code == 0
    job.ckpt.close()
    assert make_job(run, 0, 1).ckpt.restore().step == 6


def test_keeping_none_is_wrong_use(run):
    assert call("prune", run, "--keep", "0").exit_code == 2
    assert call("prune", run).exit_code == 2
