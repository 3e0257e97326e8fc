"""Lightning's Trainer: `Trainer(callbacks=[UnbrokenCheckpoint("runs/x", every=…)])`, and `fit` resumes, bit for bit."""

from unbroken.integrations.lightning.callback import UnbrokenCheckpoint

__all__ = ["UnbrokenCheckpoint"]
