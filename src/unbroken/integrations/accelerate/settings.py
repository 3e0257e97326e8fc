"""Settings of an Accelerator with which no exact resume is possible."""

from __future__ import annotations

import logging
from typing import Any

from unbroken.errors import UsageError

log = logging.getLogger(__name__)


def refuse(accelerator: Any) -> None:
    """Raise UsageError for what makes an exact resume impossible."""
    rng_types = [str(getattr(each, "value", each)) for each in accelerator.rng_types or ()]
    problems = (
        (not accelerator._models, "nothing was prepared: call accelerator.prepare(…) first"),
        (
            accelerator.distributed_type.value == "DEEPSPEED",
            "DeepSpeed: its engine is not supported here yet",
        ),
        (
            set(rng_types) - {"generator"} != set(),
            f"rng_types={rng_types}: random numbers are exchanged where an epoch goes on; leave rng_types out",
        ),
        (accelerator.split_batches, "split_batches=True: give the batch size per rank instead"),
    )
    for wrong, text in problems:
        if wrong:
            raise UsageError(f"this Accelerator cannot be resumed exactly: {text}")
    asked = getattr(accelerator.state, "fsdp_plugin", None) is not None
    if asked and not any("FSDP" in type(part).__name__ for model in accelerator._models for part in model.modules()):
        log.warning("FSDP was asked for, and %s runs", type(accelerator._models[0]).__name__)


def refuse_stateful(accelerator: Any, given: list[object]) -> None:
    """torchdata's loader has its first iterator before it is asked for one, so its first pass in a process draws other
    random numbers than later ones."""
    for loader in accelerator._dataloaders:
        if getattr(loader, "use_stateful_dataloader", False) and not any(loader is value for value in given):
            raise UsageError(
                "use_stateful_dataloader=True: a prepared loader that is not in `state` draws other random numbers in "
                "a resumed process; give all of them, or leave use_stateful_dataloader out"
            )
