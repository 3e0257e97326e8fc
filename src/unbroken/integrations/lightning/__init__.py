"""Lightning's Trainer: `Trainer(callbacks=[UnbrokenCheckpoint("runs/x", every=…)])`, and `fit` resumes, bit for bit."""

from unbroken.integrations.extras import needs
from unbroken.integrations.lightning.private import AT_LEAST

needs("lightning", "lightning", AT_LEAST)

from unbroken.integrations.lightning.callback import UnbrokenCheckpoint

__all__ = ["UnbrokenCheckpoint"]
