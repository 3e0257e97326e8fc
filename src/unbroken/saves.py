"""What was saved and what became of it, as the training thread knows it.

Outcomes are the same on every rank, since the coordinator decides them; ranks may hear of one at different steps.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from unbroken.commit import Outcome, SaveId
from unbroken.errors import SaveFailed, TakenOver, UnbrokenError

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Saves:
    """The newest save and its outcome. Used by the training thread."""

    newest: SaveId | None = None
    """The save that was begun last."""
    failure: UnbrokenError | None = None
    """Why the newest save whose outcome is known did not commit; None if it did."""
    taken_over: bool = False
    """True once a newer start of the job owns the directory: nothing may be saved any more."""
    committed: SaveId | None = None
    """The newest save known to be durable."""
    _outcome: Outcome | None = None
    _left: SaveId | None = None

    def leave(self, save: SaveId) -> None:
        """The training thread left the begun save by an exception: to save this step again is another attempt."""
        self._left = save

    def begin(self, step: int, micro_step: int) -> SaveId | None:
        """Name the save of this moment; None if it was saved already, is being saved, or may not be saved."""
        last = self.newest
        if self.taken_over:
            return None
        attempt = 0
        if last is not None and (last.step, last.micro_step) == (step, micro_step):
            if not self._failed(last):
                return None
            attempt = last.attempt + 1
        self.newest = SaveId(step, micro_step, attempt)
        return self.newest

    def learn(self, outcome: Outcome) -> UnbrokenError | None:
        """Take note of an outcome; the error to report if the save did not commit."""
        self._outcome = outcome
        if outcome.committed:
            self.failure = None
            self.committed = SaveId(outcome.step, outcome.micro_step, 0)
        elif outcome.taken_over_by:
            self.taken_over = True
            self.failure = TakenOver(f"{outcome.reason}; this job saves no more: end it")
        else:
            self.failure = SaveFailed(
                f"step {outcome.step} was not saved: {outcome.reason}; "
                "older checkpoints are intact and the next save tries again"
            )
        return self.failure

    def _failed(self, save: SaveId) -> bool:
        outcome = self._outcome
        return save == self._left or (
            outcome is not None
            and (outcome.step, outcome.micro_step) == (save.step, save.micro_step)
            and not outcome.committed
        )
