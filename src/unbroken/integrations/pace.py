"""The pace of learning rates where Accelerate goes on with another number of ranks.

A scheduler that Accelerate prepared makes as many steps as there are ranks each time the optimizer makes one. With
another number of ranks and the same global batch, rates would run ahead, or lag: so the number of steps is kept.
"""

from __future__ import annotations

from typing import Any


class Repeated:
    """A scheduler that makes several steps at once."""

    def __init__(self, scheduler: Any, times: int) -> None:
        self.__dict__.update(_scheduler=scheduler, _times=times)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Several steps, but none past the end of a OneCycleLR, as Accelerate does."""
        for _ in range(self._times):
            total = getattr(self._scheduler, "total_steps", None)
            if total is None or self._scheduler._step_count <= total:
                self._scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._scheduler, name, value)


def keeps_pace_with_ranks(value: object) -> bool:
    """Whether this is a prepared scheduler that makes a step for each rank."""
    return bool(getattr(value, "step_with_optimizer", False)) and not getattr(value, "split_batches", True)


def keep_pace(prepared: Any, steps: int) -> None:
    """Let a prepared scheduler make so many steps each time the optimizer makes one, whatever the number of ranks."""
    # With `split_batches` Accelerate makes one step of whatever is inside.
    prepared.scheduler, prepared.split_batches = Repeated(prepared.scheduler, steps), True
