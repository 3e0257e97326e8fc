"""Ray Train: `checkpointer("/shared/runs/x", {…}, every=…)` inside the train function."""

from unbroken.integrations.extras import needs
from unbroken.integrations.ray.private import AT_LEAST, check_imported

needs("ray", "ray", AT_LEAST)
check_imported()

from unbroken.integrations.ray.checkpointer import RayCheckpointer, checkpointer
from unbroken.integrations.ray.pointers import Pointer, pointer_of
from unbroken.integrations.ray.records import mend_records

__all__ = ["Pointer", "RayCheckpointer", "checkpointer", "mend_records", "pointer_of"]
