"""DeepSpeed: `checkpointer(engine, "runs/x", {…}, every=…)` for an engine of any ZeRO stage."""

from unbroken.integrations.deepspeed.private import AT_LEAST
from unbroken.integrations.extras import needs

needs("deepspeed", "deepspeed", AT_LEAST)

from unbroken.integrations.deepspeed.checkpointer import EngineCheckpointer, checkpointer

__all__ = ["EngineCheckpointer", "checkpointer"]
