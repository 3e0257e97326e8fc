"""Ray's notice that nodes will be taken away, as Ray wants it to be answered: save, and go on.

Ray takes the workers down itself and starts them elsewhere; a train function that ended early would count as done.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from unbroken.integrations.ray.private import preemption
from unbroken.preemption import Notice


@dataclass(slots=True)
class Drain(Notice):
    """What this worker was told of nodes that will be taken away. Used by the training thread."""

    told: Any = field(default_factory=preemption)
    """Where Ray puts it."""
    answered: Any = None
    """The notice after which a checkpoint was saved."""

    def install(self) -> None:
        """Leave signals to Ray: its train functions do not run on the main thread."""

    def uninstall(self) -> None:
        """Nothing was taken over."""

    def unanswered(self) -> bool:
        """Whether nodes will be taken away and nothing was saved since Ray said so. Reads an attribute."""
        info = self.told.preemption_info
        return info is not None and info != self.answered

    def answer(self) -> None:
        """A checkpoint is being saved now."""
        self.answered = self.told.preemption_info
