"""B100: nodes had disks of their own; the resumed job found half of the files, or loaded a mix with a loss spike.

Right: all ranks agree that they see one directory before anything else happens. If they do not, every rank gets an
error within seconds that says which rank sees what. Also B102 (ranks swapped nodes), B108 (paths that differ by one
character), and a stale copy with a higher step.
"""

from __future__ import annotations

import shutil

import pytest

import unbroken
from processes import Raised
from toy import make_job, train
from unbroken import directory

MODULE = "cases.test_b100_not_one_directory"


def write(rank, world_size, path):
    job = make_job(path, rank, world_size, every=unbroken.Every(steps=2))
    job.ckpt.restore()
    train(job, 4).ckpt.close()


def restore_from(rank, world_size, paths):
    directory.APPEAR_S = 0.5
    job = make_job(paths[rank], rank, world_size)
    return job.ckpt.restore()


@pytest.fixture
def written(ranks, tmp_path):
    ranks.run_all_well(f"{MODULE}:write", 2, str(tmp_path / "run"))
    return tmp_path / "run"


def refused(ranks, paths, tmp_path):
    before = sorted(str(path) for path in tmp_path.rglob("step-*/*"))
    results = ranks.run(f"{MODULE}:restore_from", len(paths), [str(path) for path in paths])
    for result in results:
        assert isinstance(result, Raised), result
        assert result.kind == "DirectoryProblem", result.trace
        assert "not the same on all ranks" in result.text
        assert "give a directory that all nodes share" in result.text
    assert sorted(str(path) for path in tmp_path.rglob("step-*/*")) == before, "nothing on disk is lost"
    return results[0].text


def test_b100_each_node_has_its_own_files_only(ranks, written, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(written, other)
    for node, lacks in ((written, 1), (other, 0)):
        for path in node.glob(f"step-*/g0001-rank-0000{lacks}.safetensors"):
            path.unlink()
    assert "up to step 4" in refused(ranks, [written, other], tmp_path)


def test_b102_swapped_nodes_and_a_stale_higher_step(ranks, written, tmp_path):
    stale = tmp_path / "stale"
    shutil.copytree(written, stale)
    shutil.move(stale / "step-4", stale / "step-9")
    assert "up to step 9" in refused(ranks, [written, stale], tmp_path)


def test_b108_paths_that_differ_by_one_character(ranks, tmp_path):
    text = refused(ranks, [tmp_path / "run-2026-01-01", tmp_path / "run-2026-01-02"], tmp_path)
    assert f"{tmp_path}/run-2026-01-02, which does not exist" in text


def test_a_missing_file_in_the_shared_directory_is_named_on_all_ranks(ranks, written):
    for step in (2, 4):
        (written / f"step-{step}/g0001-rank-00001.safetensors").unlink()
    for result in ranks.run(f"{MODULE}:restore_from", 2, [str(written)] * 2):
        assert result.kind == "NoUsableCheckpoint"
        assert "step-4/g0001-rank-00001.safetensors is missing" in result.text
