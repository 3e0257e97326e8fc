"""The examples, struck again and again: final weights and ledgers equal, and never more lost than promised.

A proof of its own would do for a user; here the number of faults is fixed and what they cost is held too.
"""

from collections import defaultdict
from pathlib import Path

import pytest

from unbroken.prove.faults import KINDS, RESTORE_POINTS, SAVE_POINTS
from unbroken.prove.launch import OUT, Command
from unbroken.prove.run import Report, Settings, prove

EXAMPLES = Path(__file__).parents[2] / "examples"
KILLS = ("rank", "node", "all")
KILLS_EACH = 17
"""Times two examples and three world sizes: more than a hundred."""
TRIALS = 12
"""One to three kills each; those of one example and size share an undisturbed run."""
EVERY = 5
MOST_LOST = {"sigterm": 0, "bit-flip": 2 * EVERY, "truncate": 2 * EVERY}
"""Steps, by kind; all others cost at most those since the last save."""
SIZES = [(1, 1), (2, 1), (2, 2)]


def run(directory, example, nodes, nproc, kinds, trials, steps, every, seed=0) -> Report:
    script = (str(EXAMPLES / f"{example}.py"), "--out", OUT, "--steps", str(steps), "--every", str(every))
    return prove(Settings(Command(script, nproc), nodes, kinds, trials, seed, directory, deadline_s=300.0))


def assert_clean(report: Report, every: int) -> None:
    """The run equals the undisturbed one in everything, and no strike cost more than the steps since the last save."""
    for trial in report.trials:
        assert trial.passed, f"{trial.difference or trial.problem}\n{trial.output}"
        assert trial.strikes
        disk_was_full = False
        for strike in trial.strikes:
            # A save that failed for want of space costs the steps since the one before it; so does its damage.
            most = 2 * every if disk_was_full else MOST_LOST.get(strike.fault.kind, every)
            assert (strike.steps_lost or 0) <= most, strike
            disk_was_full = strike.fault.kind == "disk-full"
    assert {"samples", "rng", "loss", "model", "optimizer", "loader", "final"} <= set(report.compared)


def tell(title: str, report: Report) -> None:
    """A line for each kind of fault: how many struck, and the steps that each cost."""
    lost = defaultdict(list)
    for trial in report.trials:
        for strike in trial.strikes:
            lost[strike.fault.kind].append(strike.steps_lost)
    for kind, steps in lost.items():
        print(f"{title}: {kind}: {len(steps)} struck, steps lost {steps}, {'PASS' if report.passed else 'FAIL'}")


@pytest.mark.slow  # its short twins are tests/cases/test_b001_… on four ranks and test_sharded_examples.py
def test_an_example_on_four_ranks_that_lost_one_is_not_changed(tmp_path):
    report = run(tmp_path, "ddp", nodes=1, nproc=4, kinds=("rank",), trials=1, steps=24, every=5, seed=4)
    assert_clean(report, every=5)
    assert report.trials[0].strikes[0].restored > 0


@pytest.mark.slow  # its short twin is tests/prove/test_run.py
@pytest.mark.parametrize(("kinds", "seed"), [(("save", "restore", "disk-full"), 1), (("sigterm", "bit-flip"), 2)])
def test_an_example_that_meets_several_kinds_of_faults_in_one_run_is_not_changed(tmp_path, kinds, seed):
    report = run(tmp_path, "ddp", nodes=1, nproc=1, kinds=kinds, trials=1, steps=24, every=4, seed=seed)
    assert_clean(report, every=4)
    assert {strike.fault.kind for strike in report.trials[0].strikes} >= set(kinds)


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "nproc"), SIZES)
@pytest.mark.parametrize("example", ["ddp", "digits"])
def test_a_hundred_kills_change_nothing(tmp_path, example, nodes, nproc):
    report = run(tmp_path, example, nodes, nproc, KILLS, TRIALS, steps=40, every=EVERY)
    tell(f"{example} on {nodes} x {nproc}", report)
    assert sum(len(trial.strikes) for trial in report.trials) >= KILLS_EACH
    assert_clean(report, EVERY)


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "nproc"), SIZES)
@pytest.mark.parametrize("example", ["ddp", "digits"])
def test_faults_of_every_kind_change_nothing(tmp_path, example, nodes, nproc):
    seed = 100 * len(example) + 10 * nodes + nproc  # other moments and points for each
    report = run(tmp_path, example, nodes, nproc, list(KINDS), 2 * len(KINDS), steps=40, every=EVERY, seed=seed)
    tell(f"{example} on {nodes} x {nproc}, every kind", report)
    assert {strike.fault.kind for trial in report.trials for strike in trial.strikes} == set(KINDS)
    assert_clean(report, EVERY)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "points"), [("save", SAVE_POINTS), ("restore", RESTORE_POINTS)])
def test_a_worker_killed_at_every_point_of_a_save_and_of_a_restore_changes_nothing(tmp_path, kind, points):
    report = run(tmp_path, "ddp", 1, 2, (kind,), len(points), steps=24, every=4, seed=3)
    tell(f"ddp on 1 x 2, every point of a {kind}", report)
    struck = {strike.how for trial in report.trials for strike in trial.strikes if strike.fault.kind == kind}
    assert struck == set(points)
    assert_clean(report, 4)


@pytest.mark.slow
def test_everything_at_once_on_four_ranks_is_not_changed(tmp_path):
    command = Command((str(Path(__file__).with_name("everything.py")), OUT), 4)
    report = prove(Settings(command, 1, ("rank", "all"), 3, 5, tmp_path, deadline_s=300.0))
    tell("everything on 1 x 4", report)
    for trial in report.trials:
        assert trial.passed, f"{trial.difference or trial.problem}\n{trial.output}"
    assert any(strike.restored for trial in report.trials for strike in trial.strikes)
