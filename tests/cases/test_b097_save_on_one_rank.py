"""B097: save() was called on rank 0 only; the job hung for half an hour after training was done.

Right: an error within seconds that names the rank that did not come, and training that goes on. Also B098 (the same
in another framework), B099 (waiting for storage in a training collective), B105 (ranks judge a failed save
differently).
"""

from __future__ import annotations

import errno

import torch

import unbroken
from toy import make_job, train

MODULE = "cases.test_b097_save_on_one_rank"


def save_on_rank_0(rank, world_size, path):
    job = make_job(path, rank, world_size, every=unbroken.Every(steps=2), deadline_s=2)
    job.ckpt.restore()
    train(job, 2)
    job.ckpt.wait()
    failure = ""
    job.ckpt.step()
    if rank == 0:
        job.ckpt.save()
        try:
            job.ckpt.wait()
        except unbroken.SaveFailed as error:
            failure = str(error)
    torch.distributed.barrier()
    job.ckpt.step()
    job.ckpt.close()
    return failure


def test_the_rank_that_did_not_come_is_named_and_the_next_save_works(ranks, tmp_path):
    failure, _ = ranks.run_all_well(f"{MODULE}:save_on_rank_0", 2, str(tmp_path))
    assert "rank(s) 1 did not enter the save of step 3 within 2 s" in failure
    assert not (tmp_path / "step-3/manifest.json").exists()
    assert (tmp_path / "step-4/manifest.json").exists()


def restore_on_rank_0(rank, world_size, path):
    if rank == 0:
        try:
            unbroken.Checkpointer(path, {"w": torch.zeros(1)}, deadline_s=1).restore()
        except unbroken.DeadlineExceeded as error:
            return str(error)
    return ""


def test_a_restore_on_one_rank_is_an_error_too(ranks, tmp_path):
    text, _ = ranks.run_all_well(f"{MODULE}:restore_on_rank_0", 2, str(tmp_path))
    assert "rank(s) 1 did not come to phase 'directory/seen' within 1 s" in text


def fail_on_rank_1(rank, world_size, path):
    job = make_job(path, rank, world_size, every=unbroken.Every(steps=1), on_error="raise")
    job.ckpt.restore()
    if rank == 1:
        job.ckpt._session.store.create_in_parts = refuse
    train(job, 1)
    try:
        job.ckpt.wait()
    except unbroken.SaveFailed as error:
        return str(error)
    return "no error"


def refuse(*_args):
    raise OSError(errno.EIO, "Input/output error")


def test_b105_a_write_that_fails_on_one_rank_fails_on_all_alike(ranks, tmp_path):
    first, second = ranks.run_all_well(f"{MODULE}:fail_on_rank_1", 2, str(tmp_path))
    assert first == second
    assert "rank 1: cannot write" in first
    assert "Input/output error" in first
