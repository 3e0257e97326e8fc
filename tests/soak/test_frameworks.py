"""The examples of frameworks, struck again and again: ledgers and final weights equal those of the undisturbed run."""

import pytest

from soak.test_soak import EXAMPLES, assert_clean, tell
from unbroken.prove.launch import OUT, Command
from unbroken.prove.run import Settings, prove

NAMES = ("transformers_trainer", "lightning_trainer", "accelerate_loop", "fabric_loop")
EVERY = 7


def struck(directory, name, nproc, kinds, trials, steps, more=(), launcher="torchrun", deadline_s=300.0):
    script = (str(EXAMPLES / f"{name}.py"), "--out", OUT, "--steps", str(steps), "--every", str(EVERY), *more)
    return prove(Settings(Command(script, nproc, launcher), 1, kinds, trials, 5, directory, deadline_s))


@pytest.mark.slow  # its short twins are in tests/integrations
@pytest.mark.parametrize("nproc", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_twenty_kills_change_nothing(tmp_path, name, nproc):
    report = struck(tmp_path, name, nproc, ("rank", "all", "save"), 14, 60)
    tell(f"{name} on {nproc}", report)
    assert_clean(report, EVERY)
    assert sum(len(trial.strikes) for trial in report.trials) >= 20


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [2, 4])
@pytest.mark.parametrize("stage", range(4))
def test_ten_kills_of_each_stage_of_deepspeed_change_nothing(tmp_path, stage, nproc):
    pytest.importorskip("deepspeed")
    report = struck(tmp_path, "deepspeed_zero", nproc, ("rank", "all", "save"), 6, 40, ("--stage", str(stage)))
    tell(f"ZeRO-{stage} on {nproc}", report)
    assert_clean(report, EVERY)
    assert sum(len(trial.strikes) for trial in report.trials) >= 10


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [2, 4])
def test_ten_kills_under_ray_change_nothing(tmp_path, nproc):
    pytest.importorskip("ray")
    report = struck(
        tmp_path, "ray_train", nproc, ("rank", "all", "save"), 6, 40, ("--nproc", str(nproc)), "none", 600.0
    )
    tell(f"Ray Train on {nproc}", report)
    assert_clean(report, EVERY)
    assert sum(len(trial.strikes) for trial in report.trials) >= 10
