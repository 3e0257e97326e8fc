"""Accelerate: `checkpointer(accelerator, "runs/x", {…}, every=…)` for objects that `accelerator.prepare` returned."""

from unbroken.integrations.accelerate.private import AT_LEAST
from unbroken.integrations.extras import needs

needs("accelerate", "accelerate", AT_LEAST)

from unbroken.integrations.accelerate.checkpointer import AcceleratedCheckpointer, checkpointer

__all__ = ["AcceleratedCheckpointer", "checkpointer"]
