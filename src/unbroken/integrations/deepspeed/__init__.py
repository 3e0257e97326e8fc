"""DeepSpeed: `checkpointer(engine, "runs/x", {…}, every=…)` for an engine of any ZeRO stage."""

from unbroken.integrations.deepspeed.checkpointer import EngineCheckpointer, checkpointer

__all__ = ["EngineCheckpointer", "checkpointer"]
