"""The private names of Lightning Fabric that the integration leans on, all of them.

Known to hold for lightning 2.6; `check` looks for each, so that another version is refused with a clear message instead
of going wrong.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from unbroken.integrations.known import check_attributes

AT_LEAST = "2.6"
TESTED = "2.6.6"

IMPORTED = {
    "lightning.fabric.utilities.data": ("_update_dataloader",),
    "lightning.fabric.wrappers": ("_FabricDataLoader", "_FabricModule", "_FabricOptimizer"),
}
"""By module."""
OF_FABRIC = ("_callbacks", "_get_distributed_sampler")
OF_A_MODULE = ("_forward_module", "_original_module")
OF_A_LOADER = ("_dataloader",)
OF_A_DEALT_SAMPLER = ("_sampler",)
"""Of the data set inside Fabric's DistributedSamplerWrapper: the user's sampler."""


def check(found: Any, attributes: Sequence[str]) -> None:
    """Raise UsageError, naming the attribute, if an object of Fabric's lacks one."""
    check_attributes(found, attributes, "lightning", TESTED)


def check_imported() -> None:
    """The same for what is imported."""
    for module, names in IMPORTED.items():
        check(importlib.import_module(module), names)
