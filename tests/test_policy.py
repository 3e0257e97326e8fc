import math

import pytest

from unbroken.errors import UsageError
from unbroken.policy import Every, Keep, Schedule, young_daly_s


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize("bad", [{}, {"steps": 0}, {"steps": -5}, {"minutes": 0}, {"steps": 1.5}])
def test_every_refuses_what_makes_no_sense(bad):
    with pytest.raises(UsageError):
        Every(**bad)


def test_keep_refuses_to_keep_nothing():
    with pytest.raises(UsageError, match="at least one"):
        Keep(last=0)


def test_by_steps_only_multiples_are_due():
    schedule = Schedule(Every(steps=10))
    assert [step for step in range(1, 41) if schedule.due(step)] == [10, 20, 30, 40]
    assert not schedule.due_by_clock()


def test_by_minutes_the_clock_starts_anew_at_each_save():
    clock = Clock()
    schedule = Schedule(Every(minutes=2), clock)
    clock.now = 119
    assert not schedule.due_by_clock()
    clock.now = 120
    assert schedule.due_by_clock()
    schedule.saved(cost_s=1)
    assert not schedule.due_by_clock()
    clock.now = 240
    assert schedule.due_by_clock()


def test_none_is_never_due():
    clock = Clock()
    schedule = Schedule(None, clock)
    clock.now = 1e9
    assert not schedule.due(100)
    assert not schedule.due_by_clock()


def test_auto_follows_young_and_daly():
    clock = Clock()
    schedule = Schedule("auto", clock)
    schedule.begin(failures=4, age_s=4 * 5000)
    clock.now = 120
    assert schedule.due_by_clock()
    schedule.saved(cost_s=1)
    assert young_daly_s(1, 5000) == 100
    clock.now = 120 + 99
    assert not schedule.due_by_clock()
    clock.now = 120 + 100
    assert schedule.due_by_clock()


def test_young_daly_is_finite_for_a_free_save():
    assert 0 < young_daly_s(0, 0) < math.inf
