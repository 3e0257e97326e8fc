"""What `Checkpointer.restore` tells of the checkpoint that it restored."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Restored:
    """Where a job goes on from. Its `str()` is for people and logs: `restored step 40 from runs/gpt/step-40`."""

    step: int
    """Optimizer steps done: `Checkpointer.global_step` after the restore."""
    generation: int
    """The start of the job that wrote the checkpoint."""
    source: str
    """The checkpoint's directory."""
    skipped: tuple[str, ...] = ()
    """Newer checkpoints that were passed over, each with its reason, newest first."""
    micro_step: int = 0
    """Micro-steps done inside the accumulation window that follows: `Checkpointer.micro_step`."""

    def __str__(self) -> str:
        passed_over = f" (passed over: {'; '.join(self.skipped)})" if self.skipped else ""
        inside = f" + {self.micro_step} micro-steps" if self.micro_step else ""
        return f"restored step {self.step}{inside} from {self.source}{passed_over}"
