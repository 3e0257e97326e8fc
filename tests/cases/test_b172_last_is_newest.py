"""B172: `last.ckpt` was a link to the best checkpoint, and who resumed "last" went back to that."""

import pytest

pytest.importorskip("lightning")

from lightning.pytorch.callbacks import ModelCheckpoint

from integrations.lightning_jobs import Job, run

JOB = Job(every=3, trainer={"max_epochs": 3, "accumulate_grad_batches": 1, "val_check_interval": 1.0})
"""Epochs of 12 batches."""


def own(tmp_path):
    """Lightning's own, of which the first is the best: the highest loss counts."""
    return ModelCheckpoint(tmp_path / "own", monitor="val_loss", mode="max", save_last="link", save_top_k=1)


def test_a_job_goes_on_from_the_newest_state_whatever_the_best_is(tmp_path):
    job = Job(**{**vars(JOB), "trainer": {**JOB.trainer, "enable_checkpointing": True}})
    straight = run(tmp_path / "straight", job, callbacks=[own(tmp_path / "a")])
    run(tmp_path / "run", job, batch=35, callbacks=[own(tmp_path / "b")])
    resumed = run(tmp_path / "run", job, callbacks=[own(tmp_path / "b")])
    assert min(resumed.batches) in (30, 33)
    assert (resumed.weights, resumed.place) == (straight.weights, straight.place)
