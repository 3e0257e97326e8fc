"""`unbroken prove` on scripts that forget a part of their state: real processes, real kills. The proof must fail.

Short twin: tests/prove/test_forgetful.py.
"""

from pathlib import Path

import pytest

from unbroken.prove.launch import OUT, Command
from unbroken.prove.run import Settings, prove

SCRIPT = str(Path(__file__).parents[1] / "prove" / "forgetful.py")


def trial_of(directory, forget, nproc):
    command = Command((SCRIPT, "--out", OUT, "--forget", forget), nproc)
    report = prove(Settings(command, 1, ("rank",), 1, 0, directory, deadline_s=120.0))
    assert len(report.trials) == 1
    return report.trials[0]


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [1, 2])
def test_a_script_that_forgets_nothing_passes(tmp_path, nproc):
    assert trial_of(tmp_path, "nothing", nproc).passed


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize(
    ("forget", "named"),
    [
        ("scheduler", "unregistered scheduler `scheduler` (CosineAnnealingLR)"),
        ("scaler", "unregistered scaler `scaler` (GradScaler)"),
        ("ema", "unregistered module `ema` (AveragedModel)"),
        ("generator", "unregistered generator `noise` (Generator)"),
    ],
)
def test_an_object_that_was_not_registered_is_named(tmp_path, forget, named, nproc):
    trial = trial_of(tmp_path, forget, nproc)
    assert trial.difference.step == trial.strikes[0].restored + 1
    assert trial.difference.not_restored == (named,)
    assert not trial.nondeterministic


@pytest.mark.slow
@pytest.mark.parametrize(
    ("forget", "part"),
    [("loader", "samples"), ("plain loader", "samples"), ("rank rng", "rng"), ("window", "accumulation")],
)
def test_what_differs_first_is_named(tmp_path, forget, part):
    trial = trial_of(tmp_path, forget, 2)
    assert trial.difference.step == trial.strikes[0].restored + 1
    assert trial.difference.parts[0] == part
    assert not trial.nondeterministic


@pytest.mark.slow
def test_a_generator_without_a_seed_is_not_blamed_on_resuming(tmp_path):
    trial = trial_of(tmp_path, "seed", 1)
    assert not trial.passed
    assert trial.nondeterministic
