"""Writing gives way to the steps of optimizers, and is never stopped by them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import pytest
import torch
from torch.optim import optimizer as torchs

from unbroken import pacing
from unbroken.pacing import Pace

WAIT_S = 20.0


@pytest.fixture
def pace() -> Iterator[Pace]:
    pace = Pace()
    pace.start()
    yield pace
    pace.stop()


@pytest.fixture
def optimizer() -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)


def never() -> bool:
    """No hurry."""
    return False


class Clock:
    """Seconds as the test wants them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(pacing.time, "monotonic", lambda: self.now)


class Waits(threading.Event):
    """An event that records for how long it is waited, and lets time pass."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.set()
        self.clock, self.waits = clock, []

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout)
        self.clock.now += timeout
        return False


def test_nothing_is_written_while_an_optimizer_steps_and_the_rest_right_after(pace, optimizer, monkeypatch):
    clock = Clock(monkeypatch)
    waiting, wait = threading.Event(), pace._free.wait

    def seen(timeout):
        waiting.set()
        return wait(timeout)

    monkeypatch.setattr(pace._free, "wait", seen)
    written: list[int] = []
    parts = pace.giving_way(range(4), never)
    written += itertools.islice(parts, 2)
    clock.now = 1000.0
    thread = threading.Thread(target=lambda: written.extend(parts))

    def closure() -> torch.Tensor:
        thread.start()
        assert waiting.wait(WAIT_S)
        assert written == [0, 1]
        return torch.zeros(())

    optimizer.step(closure)
    thread.join(WAIT_S)
    assert written == [0, 1, 2, 3]


def test_a_write_takes_at_most_twice_its_time_in_a_step_that_never_ends(pace, optimizer, monkeypatch):
    clock = Clock(monkeypatch)
    pace._free = Waits(clock)

    def work() -> Iterator[int]:
        for part in range(50):
            clock.now += 1.0
            yield part

    def closure() -> torch.Tensor:
        assert list(pace.giving_way(work(), never)) == list(range(50))
        return torch.zeros(())

    optimizer.step(closure)
    assert pace._free.waits == [1.0] * 50
    assert clock.now == 100.0


def test_who_is_in_a_hurry_does_not_wait(pace, optimizer, monkeypatch):
    clock = Clock(monkeypatch)
    pace._free = Waits(clock)
    late = iter([False, True, True, False])

    def work() -> Iterator[int]:
        for part in range(4):
            clock.now += 1.0
            yield part

    def closure() -> torch.Tensor:
        assert list(pace.giving_way(work(), lambda: next(late))) == [0, 1, 2, 3]
        return torch.zeros(())

    optimizer.step(closure)
    assert len(pace._free.waits) == 2


def test_a_step_that_raises_costs_time_but_no_part(pace, optimizer):
    def closure() -> torch.Tensor:
        raise RuntimeError("out of memory, say")

    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step(closure)
    assert list(pace.giving_way(range(100), never)) == list(range(100))


def test_steps_cost_nothing_after_the_end(optimizer):
    before = [len(hooks) for hooks in _hooks()]
    pace = Pace()
    pace.start()
    assert [len(hooks) for hooks in _hooks()] == [count + 1 for count in before]
    pace.stop()
    assert [len(hooks) for hooks in _hooks()] == before
    optimizer.step()


def _hooks() -> list[dict]:
    return [torchs._global_optimizer_pre_hooks, torchs._global_optimizer_post_hooks]
