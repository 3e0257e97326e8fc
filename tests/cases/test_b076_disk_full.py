"""B076: the disk was full during a save; the next resume could not read the last file.

Right: the error is told on all ranks, the older checkpoint is untouched and chosen, and the space of the failed try is
given back. On a real small file system (a tmpfs of 4 MB); where that cannot be mounted, with a limit on file sizes,
which test_new_user.py has for everybody.
"""

from __future__ import annotations

import subprocess

import pytest
import torch

import unbroken


@pytest.fixture
def small_disk(tmp_path):
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", path], capture_output=True)
    if mounted.returncode:
        pytest.skip("cannot mount a tmpfs here; test_a_full_disk_costs_the_save_not_the_training covers the same")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def fill(rank, world_size, path):
    """Each rank's own tensor has 1.3 MB: the first save fits, the second does not fit beside it."""
    torch.manual_seed(rank)
    weights = torch.randn(330_000 * 2 // world_size)
    ckpt = unbroken.Checkpointer(path, {"weights": weights}, every=unbroken.Every(steps=1), keep=None)
    ckpt.restore()
    ckpt.step()
    ckpt.wait()
    first = weights.clone()
    weights += 1
    ckpt.step()
    failure = ""
    try:
        ckpt.wait()
    except unbroken.SaveFailed as error:
        failure = str(error)
    ckpt.close()
    return failure, first


def look(rank, world_size, path):
    weights = torch.zeros(330_000 * 2 // world_size)
    ckpt = unbroken.Checkpointer(path, {"weights": weights})
    restored = ckpt.restore()
    ckpt.close()
    return restored.step, weights


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_older_checkpoint_is_chosen_and_the_space_given_back(ranks, small_disk, world_size):
    module = "cases.test_b076_disk_full"
    results = ranks.run_all_well(f"{module}:fill", world_size, str(small_disk))
    for failure, _ in results:
        assert "No space left on device" in failure
        assert "older checkpoints are intact" in failure
    assert not list(small_disk.glob("step-2/*"))
    for (step, weights), (_, expected) in zip(
        ranks.run_all_well(f"{module}:look", world_size, str(small_disk)), results, strict=True
    ):
        assert step == 1
        assert torch.equal(weights, expected)
