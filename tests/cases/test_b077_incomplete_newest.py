"""B077: auto-resume took the newest directory although it was incomplete, and crashed.

Right: it falls back to the older complete one with a warning, also for a zero-length or cut record, for a missing or
cut file, and when one rank's file only is bad. Four ranks, and all must fall back together.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import unbroken
from toy import make_job, train

MODULE = "cases.test_b077_incomplete_newest"


def write(rank, world_size, path):
    job = make_job(path, rank, world_size, every=unbroken.Every(steps=2))
    job.ckpt.restore()
    train(job, 4).ckpt.close()


def resume(rank, world_size, path):
    job = make_job(path, rank, world_size, seed=3)
    restored = job.ckpt.restore()
    train(job, 6).ckpt.close()
    return restored.step, restored.skipped, job.weights()


@pytest.fixture(scope="module")
def written(ranks, tmp_path_factory):
    path = tmp_path_factory.mktemp("b077") / "run"
    ranks.run_all_well(f"{MODULE}:write", 4, str(path))
    return path


DAMAGES = {
    "zero-length manifest": lambda newest: (newest / "manifest.json").write_bytes(b""),
    "bad JSON": lambda newest: (newest / "manifest.json").write_text("{"),
    "no manifest": lambda newest: (newest / "manifest.json").unlink(),
    "a file missing": lambda newest: (newest / "g0001-rank-00002.safetensors").unlink(),
    "a file cut": lambda newest: cut(newest / "g0001-rank-00003.safetensors"),
    "one bit of one rank's own part": lambda newest: flip(newest / "g0001-rank-00001.safetensors"),
}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("damage", DAMAGES)
def test_all_ranks_fall_back_to_the_complete_one_and_end_alike(ranks, written, tmp_path, damage):
    path = tmp_path / "run"
    shutil.copytree(written, path)
    DAMAGES[damage](path / "step-4")
    results = ranks.run_all_well(f"{MODULE}:resume", 4, str(path))
    assert [step for step, _, _ in results] == [2, 2, 2, 2]
    intact = ranks.run_all_well(f"{MODULE}:resume", 4, str(written))
    assert [weights for _, _, weights in results] == [weights for _, _, weights in intact]
    shutil.rmtree(written / "step-6", ignore_errors=True)
    if damage != "no manifest":
        assert all("step-4" in skipped[0] for _, skipped, _ in results), "all ranks know what was passed over"
