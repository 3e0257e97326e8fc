"""The private names of Accelerate that the integration leans on, all of them.

Known to hold for accelerate 1.15; `check` looks for each, so that another version is refused with a clear message
instead of going wrong.
"""

from __future__ import annotations

from typing import Any

from unbroken.errors import UsageError

AT_LEAST = "1.1.0"
TESTED = "1.15.0"

OF_AN_ACCELERATOR = ("_models", "_dataloaders", "_custom_objects", "rng_types", "step", "split_batches", "state")
OF_A_LOADER = ("base_dataloader", "iteration")
OF_AN_OPTIMIZER = ("optimizer",)
OF_A_SCHEDULER = ("scheduler", "split_batches", "step_with_optimizer")
"""Attributes, by what `accelerator.prepare` returned them of."""


def check(found: Any, attributes: tuple[str, ...]) -> None:
    """Raise UsageError, naming the attribute, if an object of Accelerate's lacks one."""
    for attribute in attributes:
        if not hasattr(found, attribute):
            raise UsageError(
                f"{type(found).__name__}.{attribute} is not as unbroken knows it from accelerate {TESTED}: a newer "
                f"unbroken may know this version, or install accelerate {TESTED}"
            )
