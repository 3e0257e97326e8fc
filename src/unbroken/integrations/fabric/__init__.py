"""Lightning Fabric: `checkpointer(fabric, "runs/x", {…}, every=…)` for what `fabric.setup` returned."""

from unbroken.integrations.extras import needs
from unbroken.integrations.fabric.private import AT_LEAST, check_imported

needs("lightning", "lightning", AT_LEAST)
check_imported()

from unbroken.integrations.fabric.checkpointer import checkpointer
from unbroken.integrations.fabric.loader import ResumableFabricLoader

__all__ = ["ResumableFabricLoader", "checkpointer"]
