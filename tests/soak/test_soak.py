"""The examples, killed again and again: final weights and ledgers equal, and never more lost than promised.

A proof of its own would do for a user; here the number of kills is fixed and what they cost is held too.
"""

from pathlib import Path

import pytest

from unbroken.prove.launch import OUT, Command
from unbroken.prove.run import Report, Settings, prove

EXAMPLES = Path(__file__).parents[2] / "examples"
KILLS_EACH = 17
"""Times two examples and three world sizes: more than a hundred."""
TRIALS = 12
"""One to three kills each; those of one example and size share an undisturbed run."""
KINDS = ("rank", "node", "all")


def run(directory, example, nodes, nproc, kinds, trials, steps, every, seed=0) -> Report:
    script = (str(EXAMPLES / f"{example}.py"), "--out", OUT, "--steps", str(steps), "--every", str(every))
    return prove(Settings(Command(script, nproc), nodes, kinds, list(trials), seed, directory, deadline_s=300.0))


def assert_clean(report: Report, every: int) -> None:
    """The run equals the undisturbed one in everything, and no strike cost more than the steps since the last save."""
    for trial in report.trials:
        assert trial.passed, f"{trial.difference or trial.problem}\n{trial.output}"
        assert trial.strikes
        for strike in trial.strikes:
            assert (strike.steps_lost or 0) <= every, strike
    assert {"samples", "rng", "loss", "model", "optimizer", "loader", "final"} <= set(report.compared)


def test_an_example_on_four_ranks_that_lost_one_is_not_changed(tmp_path):
    report = run(tmp_path, "ddp", nodes=1, nproc=4, kinds=("rank",), trials=[1], steps=24, every=5, seed=4)
    assert_clean(report, every=5)
    assert report.trials[0].strikes[0].restored > 0


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "nproc"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("example", ["ddp", "digits"])
def test_a_hundred_kills_change_nothing(tmp_path, example, nodes, nproc):
    report = run(tmp_path, example, nodes, nproc, KINDS, range(1, TRIALS + 1), steps=40, every=5)
    lost = sorted(strike.steps_lost or 0 for trial in report.trials for strike in trial.strikes)
    print(
        f"{example} on {nodes} x {nproc}: {len(lost)} kills, steps lost {lost}, {'PASS' if report.passed else 'FAIL'}"
    )
    assert len(lost) >= KILLS_EACH
    assert_clean(report, every=5)


@pytest.mark.slow
def test_everything_at_once_on_four_ranks_is_not_changed(tmp_path):
    command = Command((str(Path(__file__).with_name("everything.py")), OUT), 4)
    report = prove(Settings(command, 1, ("rank", "all"), [1, 2, 3], 5, tmp_path, deadline_s=300.0))
    for trial in report.trials:
        assert trial.passed, f"{trial.difference or trial.problem}\n{trial.output}"
    assert any(strike.restored for trial in report.trials for strike in trial.strikes)
