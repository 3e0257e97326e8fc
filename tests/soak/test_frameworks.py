"""The examples of frameworks, struck again and again: ledgers and final weights equal those of the undisturbed run."""

import pytest

from soak.test_soak import EXAMPLES, assert_clean, tell
from unbroken.prove.launch import OUT, Command
from unbroken.prove.run import Settings, prove

NAMES = ("transformers_trainer", "lightning_trainer", "accelerate_loop", "fabric_loop")
EVERY = 7


def struck(directory, name, nproc, kinds, trials, steps):
    script = (str(EXAMPLES / f"{name}.py"), "--out", OUT, "--steps", str(steps), "--every", str(EVERY))
    return prove(Settings(Command(script, nproc), 1, kinds, trials, 5, directory, deadline_s=300.0))


@pytest.mark.slow  # its short twins are in tests/integrations
@pytest.mark.parametrize("nproc", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_twenty_kills_change_nothing(tmp_path, name, nproc):
    report = struck(tmp_path, name, nproc, ("rank", "all", "save"), 14, 60)
    tell(f"{name} on {nproc}", report)
    assert_clean(report, EVERY)
    assert sum(len(trial.strikes) for trial in report.trials) >= 20
