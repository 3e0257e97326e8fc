"""The plan of a trial: the same for the same seed, every kind at least once, and nobody out of range."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.faultpoints import BEGIN, COMMIT
from unbroken.prove.faults import INSIDE, KINDS, RESTORE_POINTS, SAVE_POINTS, Job, plan_trial

kinds = st.lists(st.sampled_from(sorted(KINDS)), min_size=1, unique=True)
JOB = Job(2, 4, 60)


@given(st.integers(), st.integers(1, 100), st.integers(1, 100), kinds, st.integers(1, 4), st.integers(0, 100))
def test_a_plan_is_within_the_job_and_repeats(seed, trial, trials, kinds, nodes, steps):
    job = Job(nodes, 2 * nodes, steps)
    plan = plan_trial(seed, trial, trials, kinds, job)
    assert plan[0].required
    for fault in plan:
        assert fault.kind in [*kinds, "all"]  # some kinds kill everything on their way
        assert fault.victim in {"node": range(nodes), "rank": range(2 * nodes), "sigterm": range(2 * nodes)}.get(
            fault.kind, [None] if fault.kind not in INSIDE else range(2 * nodes)
        )
        assert 0 <= fault.after_step < max(1, steps)
        assert 0 <= fault.delay < 4
        assert bool(fault.point) == (fault.kind in INSIDE)
        if fault.point in COMMIT or fault.point in BEGIN:
            assert fault.victim == 0, "no other rank passes it"
    assert plan == plan_trial(seed, trial, trials, kinds, job)


@given(st.integers(), kinds, st.integers(1, 12))
def test_every_kind_strikes_at_least_once_in_the_middle_of_the_run(seed, kinds, trials):
    plans = [plan_trial(seed, trial, trials, kinds, JOB) for trial in range(1, trials + 1)]
    required = [fault for plan in plans for fault in plan if fault.required]
    assert {fault.kind for fault in required} >= set(kinds)
    if trials <= len(kinds):
        assert all(20 <= fault.after_step <= 40 for fault in required if fault.kind != "restore")


@pytest.mark.parametrize(("kind", "points"), [("save", SAVE_POINTS), ("restore", RESTORE_POINTS)])
def test_as_many_trials_as_points_try_every_point(kind, points):
    plans = [plan_trial(3, trial, len(points), [kind], JOB) for trial in range(1, len(points) + 1)]
    tried = {next(fault.point for fault in plan if fault.kind == kind) for plan in plans}
    assert tried == set(points)


def test_a_restore_that_is_struck_has_something_to_restore_and_damage_something_to_fall_back_to():
    (first, second) = plan_trial(0, 1, 1, ["restore"], JOB)[:2]
    assert (first.kind, first.checkpoints, second.kind) == ("all", 1, "restore")
    assert plan_trial(0, 1, 1, ["bit-flip"], JOB)[0].checkpoints == 2


def test_other_seeds_and_trials_give_other_plans():
    plans = {tuple(plan_trial(seed, trial, 9, list(KINDS), JOB)) for seed in range(5) for trial in range(4, 9)}
    assert len(plans) == 25


@pytest.mark.parametrize("steps", [1, 60, 1000])
def test_a_fault_planned_earlier_and_earlier_strikes_while_the_job_starts(steps):
    fault = plan_trial(0, 1, 1, ["rank"], Job(1, 2, steps))[0]
    for _ in range(5):
        fault = fault.earlier()
    assert fault.after_step == 0
