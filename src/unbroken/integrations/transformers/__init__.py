"""Transformers' Trainer: `attach(trainer, "runs/x", every=…)`, and `trainer.train()` resumes by itself, bit for bit."""

from unbroken.integrations.extras import needs
from unbroken.integrations.transformers.trainer import AT_LEAST

needs("transformers", "transformers", AT_LEAST)

from unbroken.integrations.transformers.attach import attach

__all__ = ["attach"]
