"""B030: the validation after a resume in mid-epoch ran one batch only, and its loss was told as that of all."""

import pytest

pytest.importorskip("lightning")

import lightning as L

from integrations.lightning_jobs import Job, run

BATCHES = 6
"""Of a validation: 46 samples by 8."""


class Count(L.Callback):
    """Batches of each validation."""

    def __init__(self):
        self.validations = []

    def on_validation_epoch_start(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.validations.append(0)

    def on_validation_batch_end(self, trainer, pl_module, *more):
        if not trainer.sanity_checking:
            self.validations[-1] += 1


def test_each_validation_after_a_resume_takes_all_batches(tmp_path):
    job, counted = Job(trainer={"max_epochs": 2, "val_check_interval": 3}), [Count(), Count(), Count()]
    straight = run(tmp_path / "straight", job, callbacks=[counted[0]])
    run(tmp_path / "run", job, batch=8, callbacks=[counted[1]])
    resumed = run(tmp_path / "run", job, callbacks=[counted[2]])
    assert counted[0].validations == [BATCHES] * 8
    assert set(counted[1].validations) == set(counted[2].validations) == {BATCHES}
    assert len(counted[2].validations) in (6, 7), "at 9, 12 and every 3 batches of the second epoch, and perhaps at 6"
    assert resumed.metrics == straight.metrics
