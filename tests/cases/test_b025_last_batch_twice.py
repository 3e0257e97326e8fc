"""B025, B026 and B169: where a resumed Trainer goes on.

B025: a checkpoint of step 10 had counted 9 batches, and batch 9 was trained twice. B026: a checkpoint of an epoch's end
began the finished epoch again; the remedy then skipped too much in mid-epoch. B169: a finished run with `max_steps`
that was started again did more steps.
"""

import pytest

pytest.importorskip("lightning")

from integrations.lightning_jobs import Job, run

JOB = Job(every=10, batch_norm=False, trainer={"max_steps": 20, "max_epochs": -1, "accumulate_grad_batches": 1})
"""Epochs of 12 batches."""


def test_the_first_batch_after_a_resume_is_the_next_one(tmp_path):
    straight = run(tmp_path / "straight", JOB)
    run(tmp_path / "run", JOB, batch=11)
    resumed = run(tmp_path / "run", JOB)
    assert sorted(resumed.batches) == list(range(10, 20))
    assert {number: straight.batches[number] for number in resumed.batches} == resumed.batches


@pytest.mark.parametrize(("every", "first"), [(12, 12), (2, 2)], ids=["an epoch's end", "15 % of an epoch"])
def test_each_checkpoint_goes_on_at_its_own_next_batch(tmp_path, every, first):
    job = Job(every=every, batch_norm=False, trainer={"max_epochs": 3, "accumulate_grad_batches": 1})
    straight = run(tmp_path / "straight", job)
    run(tmp_path / "run", job, batch=first + 1)
    resumed = run(tmp_path / "run", job)
    assert sorted(resumed.batches) == list(range(first, 36))
    assert (resumed.weights, resumed.place) == (straight.weights, straight.place)


def test_max_steps_is_exact_and_a_finished_run_does_none(tmp_path):
    job = Job(every=7, trainer={"max_steps": 25, "max_epochs": -1, "accumulate_grad_batches": 1})
    finished = run(tmp_path, job)
    assert len(finished.batches) == finished.place[0] == 25
    again = run(tmp_path, job)
    assert again.batches == {} and again.weights == finished.weights
