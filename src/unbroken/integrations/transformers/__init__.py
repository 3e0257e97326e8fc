"""Transformers' Trainer: `attach(trainer, "runs/x", every=…)`, and `trainer.train()` resumes by itself, bit for bit."""

from unbroken.integrations.transformers.attach import attach

__all__ = ["attach"]
