"""When to save and what to keep."""

from __future__ import annotations

import math
from dataclasses import dataclass

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
