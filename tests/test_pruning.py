"""Pruning keeps the rules of retention, and never leaves a run without a checkpoint that can be used."""

from __future__ import annotations

import shutil

import pytest

from two_rank_run import make_run, restore
from unbroken import generations
from unbroken.errors import NoUsableCheckpoint, UnbrokenError
from unbroken.manifest import decode
from unbroken.policy import Keep
from unbroken.pruning import plan_pruning, prune
from unbroken.retention import sweep
from unbroken.store.local import LocalStore


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("made") / "run"
    make_run(path)
    return path


@pytest.fixture
def run(made, tmp_path):
    return shutil.copytree(made, tmp_path / "run")


def plan(run, keep, abandoned=False):
    return plan_pruning(LocalStore(run), Keep(last=keep), abandoned, lambda count: None)


def pruned(run, keep, abandoned=False):
    assert prune(LocalStore(run), plan(run, keep, abandoned)) == []
    return sorted(str(path.relative_to(run)) for path in run.glob("step-*/manifest*"))


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_the_newest_of_the_current_history_stay_and_an_abandoned_one_is_left_alone(run):
    assert pruned(run, 2) == ["step-3/manifest.g0001.json", "step-4/manifest.json", "step-5/manifest.json"]
    assert {path.name for path in (run / "step-3").glob("*.safetensors")} == {
        "g0001-rank-00000.safetensors",
        "g0001-rank-00001.safetensors",
    }
    assert not (run / "step-1").exists()
    assert restore(run)[0].manifest.step == 5


def test_abandoned_ones_go_too_if_asked_for(run):
    assert pruned(run, 3, abandoned=True) == ["step-3/manifest.json", "step-4/manifest.json", "step-5/manifest.json"]
    assert not list((run / "step-3").glob("g0001*"))


def test_an_abandoned_one_that_a_running_job_may_move_aside_is_spared(run):
    """The job deletes nothing of it, but renames its manifest when it saves that step: a deletion could hit its own."""
    generations.begin(LocalStore(run), decode((run / "step-2/manifest.json").read_bytes(), ""), 2)
    found = plan(run, 1, abandoned=True)
    assert [kept.manifest.step for kept in found.spared] == [5, 4, 3, 3]
    assert [kept.manifest.step for kept in found.checkpoints] == [1]


def test_a_damaged_one_does_not_count_as_kept_and_is_left_alone(run):
    flip(run / "step-5/g0003-rank-00001.safetensors")
    found = plan(run, 2)
    assert [kept.manifest.step for kept in found.kept] == [4, 3]
    assert [fault.file for fault in found.damaged] == ["step-5/g0003-rank-00001.safetensors"]
    assert [kept.manifest.step for kept in found.checkpoints] == [2, 1]


def test_nothing_is_deleted_if_nothing_usable_would_stay(run):
    for file in run.glob("step-*/*-rank-00001.safetensors"):
        flip(file)
    before = sorted(run.rglob("*"))
    with pytest.raises(NoUsableCheckpoint, match=r"nothing is deleted.*do not match their digest"):
        plan(run, 1)
    assert sorted(run.rglob("*")) == before


def test_nothing_is_deleted_while_it_is_unknown_which_history_is_the_current_one(run):
    """The lost record is that of a rollback to step 1: by what else lies there, step 1 is just old."""
    generations.begin(LocalStore(run), decode((run / "step-1/manifest.json").read_bytes(), ""), 2)
    (run / "generations/0004.json").write_bytes(b"{")
    with pytest.raises(UnbrokenError, match=r"nothing is deleted: generations/0004.json"):
        plan(run, 1)


def test_nothing_is_deleted_if_the_job_was_started_again_meanwhile(run):
    found = plan(run, 1)
    generations.begin(LocalStore(run), decode((run / "step-1/manifest.json").read_bytes(), ""), 2)
    with pytest.raises(UnbrokenError, match="started again meanwhile"):
        prune(LocalStore(run), found)
    assert (run / "step-1/manifest.json").exists()


def test_a_directory_with_an_unreadable_manifest_is_never_touched(run):
    (run / "step-1/manifest.json").write_bytes(b"{")
    pruned(run, 1, abandoned=True)
    assert len(list((run / "step-1").iterdir())) == 3


def test_what_dead_saves_left_goes_and_what_may_be_a_save_in_progress_stays(run):
    (run / "step-9").mkdir()
    for name in ("step-9/g0002-rank-00000.safetensors", "step-9/g0003-rank-00000.safetensors", "step-9/.tmp-ab"):
        (run / name).write_bytes(b"x")
    (run / "step-4/.tmp-cd").write_bytes(b"x")
    (run / "step-4/notes.txt").write_bytes(b"x")
    pruned(run, 5)
    assert {path.name for path in (run / "step-9").iterdir()} == {"g0003-rank-00000.safetensors", ".tmp-ab"}
    assert not (run / "step-4/.tmp-cd").exists()
    assert (run / "step-4/notes.txt").exists(), "not ours"


def test_the_order_is_that_of_recorded_steps_not_of_names_or_times(run):
    (run / "step-1").rename(run / "step-100")
    assert "step-100/manifest.json" in pruned(run, 1), "a renamed directory has no place in the order"


def test_a_checkpoint_that_the_job_deletes_meanwhile_is_neither_kept_nor_damaged(run):
    store = LocalStore(run)

    def meanwhile(count):
        shutil.rmtree(run / "step-5", ignore_errors=True)

    found = plan_pruning(store, Keep(last=1), False, meanwhile)
    assert found.damaged == []
    assert [kept.manifest.step for kept in found.kept] == [4]


def test_an_empty_run_has_nothing_to_prune(tmp_path):
    assert plan(tmp_path, 1).checkpoints == []
    assert prune(LocalStore(tmp_path), plan(tmp_path, 1)) == []


def test_the_sweep_of_a_running_job_leaves_another_history_in_the_same_directory(run):
    """It deleted the directory of step 3, and with it the only checkpoint of that step of generation 1."""
    sweep(LocalStore(run), generations.read(LocalStore(run), 3), Keep(last=1))
    assert sorted(str(path.relative_to(run)) for path in run.glob("step-*/manifest*")) == [
        "step-3/manifest.g0001.json",
        "step-5/manifest.json",
    ]
