"""B113: what ranks 2 and 3 wrote stayed in directories of their own, and a resume with fewer ranks missed their shards.

Right: a commit makes sure that every rank's file lies beside the manifest; if not, the save fails on all ranks, says
whose file is missing, and the checkpoint before stays the newest. The next save that finds all of them counts.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import unbroken
from sharded.models import make_job
from unbroken import commit

MODULE = "cases.test_b113_parts_left_elsewhere"


def save(rank, world_size, directory, elsewhere):
    """Three saves; during the second, ranks 2 and 3 write into another directory. What it said, and all values."""
    job = make_job("fsdp2", seed=1)
    told, contents = [], []
    with pytest.MonkeyPatch.context() as patch, unbroken.Checkpointer(directory, job.state) as ckpt:
        patch.setattr(commit, "APPEAR_S", 0.3)
        assert ckpt.restore() is None
        store = ckpt._session.store
        for step in (1, 2, 3):
            job.step(step)
            contents.append(job.content())
            ckpt.step()
            store.root = Path(elsewhere if step == 2 and rank >= 2 else directory)
            ckpt.save()
            try:
                ckpt.wait()
                told.append("")
            except unbroken.SaveFailed as error:
                told.append(str(error))
    return told, contents


def restore(rank, world_size, directory):
    job = make_job("fsdp2", seed=2)
    with unbroken.Checkpointer(directory, job.state) as ckpt:
        return ckpt.restore().step, job.content()


def test_a_save_whose_parts_lie_elsewhere_fails_on_all_ranks_and_hides_nothing(ranks, tmp_path):
    run, elsewhere = tmp_path / "run", tmp_path / "node"
    elsewhere.mkdir()
    results = ranks.run_all_well(f"{MODULE}:save", 4, str(run), str(elsewhere))
    for told, _ in results:
        assert told[0] == told[2] == ""
        assert "rank(s) 2-3 wrote g0001-rank-00002.safetensors, which rank 0 does not find in" in told[1]
    assert not (run / "step-2/manifest.json").exists()
    assert ranks.run_all_well(f"{MODULE}:restore", 2, str(run)) == [(3, results[0][1][2])] * 2
    (run / "step-3/manifest.json").unlink()
    assert ranks.run_all_well(f"{MODULE}:restore", 2, str(run)) == [(1, results[0][1][0])] * 2
