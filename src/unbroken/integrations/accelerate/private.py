"""The private names of Accelerate that the integration leans on, all of them.

Known to hold for accelerate 1.15; `check` looks for each, so that another version is refused with a clear message
instead of going wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unbroken.integrations.known import check_attributes

AT_LEAST = "1.1.0"
TESTED = "1.15.0"

OF_AN_ACCELERATOR = ("_models", "_dataloaders", "_custom_objects", "rng_types", "step", "split_batches", "state")
OF_A_LOADER = ("base_dataloader", "iteration")
OF_AN_OPTIMIZER = ("optimizer",)
OF_A_SCHEDULER = ("scheduler", "split_batches", "step_with_optimizer")
"""Attributes, by what `accelerator.prepare` returned them of."""


def check(found: Any, attributes: Sequence[str]) -> None:
    """Raise UsageError, naming the attribute, if an object of the framework lacks one."""
    check_attributes(found, attributes, "accelerate", TESTED)
