"""The plan of a trial: the same for the same seed, every kind at least once, and nobody out of range."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.prove.faults import KINDS, plan_trial

kinds = st.lists(st.sampled_from(sorted(KINDS)), min_size=1, unique=True)


@given(st.integers(), st.integers(1, 100), kinds, st.integers(1, 4), st.integers(1, 4), st.integers(0, 100))
def test_a_plan_is_within_the_job_and_repeats(seed, trial, kinds, nodes, nproc, steps):
    plan = plan_trial(seed, trial, kinds, nodes, nodes * nproc, steps)
    assert plan
    for fault in plan:
        assert fault.kind in kinds
        assert fault.victim in {"rank": range(nodes * nproc), "node": range(nodes), "all": [None]}[fault.kind]
        assert 0 <= fault.after_step < max(1, steps)
        assert 0 <= fault.delay < 1
    assert plan == plan_trial(seed, trial, kinds, nodes, nodes * nproc, steps)


@given(st.integers(), kinds)
def test_as_many_trials_as_kinds_try_every_kind_in_the_middle_of_the_run(seed, kinds):
    first = [plan_trial(seed, trial, kinds, 2, 4, 60)[0] for trial in range(1, len(kinds) + 1)]
    assert sorted(fault.kind for fault in first) == sorted(kinds)
    assert all(20 <= fault.after_step <= 40 for fault in first)


def test_other_seeds_and_trials_give_other_plans():
    plans = {tuple(plan_trial(seed, trial, list(KINDS), 2, 4, 60)) for seed in range(5) for trial in range(4, 9)}
    assert len(plans) == 25


@pytest.mark.parametrize("steps", [1, 60, 1000])
def test_a_fault_planned_earlier_and_earlier_strikes_while_the_job_starts(steps):
    fault = plan_trial(0, 1, ["rank"], 1, 2, steps)[0]
    for _ in range(5):
        fault = fault.earlier()
    assert fault.after_step == 0
