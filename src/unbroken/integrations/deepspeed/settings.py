"""Engines with which no exact resume is possible."""

from __future__ import annotations

from typing import Any

from unbroken.errors import UsageError


def refuse(engine: Any) -> None:
    """Raise UsageError for the first such setting, with what to do instead."""
    wrapper = engine.optimizer
    problems = (
        (wrapper is None, "without an optimizer: there is nothing to resume; give one to deepspeed.initialize"),
        (type(engine).__name__ == "PipelineEngine", "that is a PipelineEngine: use ZeRO with data parallelism"),
        (engine.has_moe_layers, "with mixture-of-experts layers: experts are not supported yet"),
        (engine.mpu is not None, "with a model-parallel unit (mpu): only data parallelism is supported"),
        (
            engine.training_dataloader is not None,
            "with training_data: DeepSpeed's loader has no position; make a DataLoader and register "
            "unbroken.resumable(loader) in `state`",
        ),
        (
            getattr(wrapper, "swap_optimizer", False) or getattr(wrapper, "params_in_nvme_and_cpu", False),
            "offloading to NVMe: use the CPU",
        ),
        (
            not engine.managed_gradient_accumulation(),
            "managed_gradient_accumulation=false: leave it out, so that the engine knows where a window ends",
        ),
    )
    for wrong, text in problems:
        if wrong:
            raise UsageError(f"this engine cannot be resumed exactly {text}")
