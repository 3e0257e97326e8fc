"""From any parallel layout to any other: every value is equal bit for bit, and each rank reads its part only."""

import shutil

import pytest

import unbroken
from sharded.models import make_job

SAVED = [
    ("ddp", 4),
    ("fsdp2", 4),
    ("hsdp", 4),
    ("two_dimensional", 4),
    ("fsdp1", 4),
    ("hybrid_fsdp1", 4),
    ("single", 1),
]
RESTORED = [*SAVED, ("fsdp2", 3), ("fsdp2", 2), ("fsdp1", 3), ("two_dimensional", 2)]


def save(rank, world_size, directory, layout):
    """Two steps, a checkpoint, and what it must hold."""
    job = make_job(layout, seed=1)
    with unbroken.Checkpointer(directory, job.state, on_error="raise") as ckpt:
        for seed in (0, 1):
            job.step(seed)
            ckpt.step()
        ckpt.save()
    return job.content()


def restore(rank, world_size, directory, layout):
    """What other objects hold after a restore, and whether they go on training."""
    job = make_job(layout, seed=2)
    with unbroken.Checkpointer(directory, job.state) as ckpt:
        assert ckpt.restore().step == 2
        content = job.content()
        job.step(2)
    return content


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """Checkpoints by layout, with the values that they hold."""
    found = {}
    for layout, world_size in SAVED:
        directory = tmp_path_factory.mktemp(layout) / "run"
        results = ranks.run_all_well("sharded.test_layouts:save", world_size, str(directory), layout)
        assert all(result == results[0] for result in results)
        found[layout] = directory, results[0]
    return found


@pytest.mark.parametrize(("layout", "world_size"), RESTORED)
def test_a_checkpoint_of_any_layout_restores_into_this_one(ranks, saved, tmp_path, layout, world_size):
    for source, (directory, content) in saved.items():
        copy = shutil.copytree(directory, tmp_path / source)
        results = ranks.run_all_well("sharded.test_layouts:restore", world_size, str(copy), layout)
        for result in results:
            common = content.keys() & result.keys()
            assert common == content.keys() or "fsdp1" in (layout, source) or "hybrid_fsdp1" in (layout, source)
            assert [name for name in common if content[name] != result[name]] == [], f"{source} -> {layout}"
