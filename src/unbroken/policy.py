"""When to save and what to keep."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from unbroken.errors import UsageError

AUTO_FIRST_S = 120.0
"""With `every="auto"`: the interval until a save's cost is known."""


@dataclass(frozen=True, slots=True)
class Every:
    """When to save: every so many optimizer steps, or every so many minutes, or whichever comes first of both.

    Every(steps=100), Every(minutes=10). By minutes, rank 0's clock decides and all ranks save at the same step.
    Raises UsageError if neither is given or one is not positive.
    """

    steps: int | None = None
    """Optimizer steps between saves."""
    minutes: float | None = None
    """Minutes between saves."""

    def __post_init__(self) -> None:
        given = [value for value in (self.steps, self.minutes) if value is not None]
        if not given or any(value <= 0 for value in given):
            raise UsageError(
                "Every() needs steps= or minutes=, greater than zero; to save only by hand give every=None"
            )
        if self.steps is not None and int(self.steps) != self.steps:
            raise UsageError(f"Every(steps={self.steps}): steps is a whole number")


@dataclass(frozen=True, slots=True)
class Keep:
    """What retention leaves: the newest `last` checkpoints of the current history. At least one always stays."""

    last: int = 3

    def __post_init__(self) -> None:
        if self.last < 1:
            raise UsageError(f"Keep(last={self.last}): at least one checkpoint must stay; to keep all give keep=None")


def young_daly_s(cost_s: float, mean_time_between_failures_s: float) -> float:
    """The interval between saves, in seconds, that loses least time: sqrt(2 * cost * MTBF).

    cost_s  what one save costs the training loop, in seconds
    Source: Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974; Daly 2006.
    """
    return math.sqrt(2 * max(cost_s, 1e-3) * max(mean_time_between_failures_s, 1.0))


class Schedule:
    """Whether a save is due, by steps or by the clock. Used by the training thread.

    By steps every rank finds out alone. By the clock only rank 0's counts, and all ranks are asked to meet.
    """

    def __init__(self, every: Every | Literal["auto"] | None, now: Callable[[], float] = time.monotonic) -> None:
        """`now` gives seconds from a clock that never goes back."""
        self._now = now
        self._steps = every.steps if isinstance(every, Every) else None
        self._auto = every == "auto"
        self._interval_s = AUTO_FIRST_S if self._auto else math.inf
        if isinstance(every, Every) and every.minutes is not None:
            self._interval_s = every.minutes * 60
        self._mean_time_between_failures_s = 86400.0
        self._last_s = now()

    def begin(self, failures: int, age_s: float) -> None:
        """Tell how often the job had to be started again and how long ago it was started first, in seconds."""
        if failures > 0:
            self._mean_time_between_failures_s = age_s / failures
        self._last_s = self._now()

    def due(self, step: int) -> bool:
        """True if a save is due after optimizer step `step`, whatever the clock says."""
        return self._steps is not None and step % self._steps == 0

    def due_by_clock(self) -> bool:
        """True if enough time has passed since the last save."""
        return self._interval_s < math.inf and self._now() - self._last_s >= self._interval_s

    def saved(self, cost_s: float) -> None:
        """A save was taken, and the training loop stood still for `cost_s` seconds."""
        self._last_s = self._now()
        if self._auto:
            self._interval_s = young_daly_s(cost_s, self._mean_time_between_failures_s)


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user chose."""

    keep: Keep | None
    deadline_s: float
    write_deadline_s: float
    check_replicas: Literal["first", "always", "never"] = "always"
    snapshot: Literal["overlap", "block"] = "overlap"
    slots: int = 2

    def __post_init__(self) -> None:
        if self.keep is not None and not isinstance(self.keep, Keep):
            raise UsageError(f"keep={self.keep!r}: give Keep(last=…), or None to keep every checkpoint")
        if self.check_replicas not in ("first", "always", "never"):
            raise UsageError(f'check_replicas={self.check_replicas!r}: give "first", "always" or "never"')
        if self.snapshot not in ("overlap", "block"):
            raise UsageError(f'snapshot={self.snapshot!r}: give "overlap" or "block"')
        if not isinstance(self.slots, int) or self.slots < 1:
            raise UsageError(f"slots={self.slots!r}: give how many saves may be under way, at least 1")
