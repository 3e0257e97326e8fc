"""Lightning Fabric: `checkpointer(fabric, "runs/x", {"model": model, …}, every=…)`, for what Fabric has set up.

Fabric wraps modules, optimizers and loaders. What is saved is what they wrap, so that a checkpoint fits the script
without Fabric too. The private names of Fabric that are leant on stand in `NAMES`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from unbroken.checkpointer import Checkpointer
from unbroken.data.loader import resumable
from unbroken.errors import UsageError
from unbroken.integrations.extras import needs

AT_LEAST = "2.6"
TESTED = "2.6.6"
needs("lightning", "lightning", AT_LEAST)

from lightning.fabric import wrappers  # noqa: E402  # after the check, whose message says more
from lightning.fabric.strategies.deepspeed import DeepSpeedStrategy  # noqa: E402
from lightning.fabric.strategies.xla import XLAStrategy  # noqa: E402
from lightning.fabric.utilities import data  # noqa: E402

NAMES = (
    (wrappers, "_FabricModule"),
    (wrappers, "_FabricOptimizer"),
    (wrappers, "_FabricDataLoader"),
    (data, "_update_dataloader"),
)


def checkpointer(fabric: Any, path: str | Path, state: Mapping[str, object], **options: Any) -> Checkpointer:
    """A Checkpointer of a Fabric script.

        model, optimizer = fabric.setup(model, optimizer)
        loader = fabric.setup_dataloaders(loader)
        ckpt = checkpointer(fabric, "runs/x", {"model": model, "optimizer": optimizer, "loader": loader}, every=…)
        ckpt.restore()

    path     the run directory, shared by all nodes
    state    names -> what `fabric.setup` and `fabric.setup_dataloaders` gave, schedulers, and anything else that a
             Checkpointer takes
    options  the Checkpointer's: `every`, `keep`, `on_error`, …

    Loaders among them get an exact position, in place (`unbroken.resumable`, which must not come before: Fabric takes
    DataLoaders only); they have `epoch` then. The grad scaler of Fabric's precision is saved as `scaler`. Call it after
    `fabric.launch()`, before the first batch.

    Raises UsageError for a strategy with which no exact resume is possible, and what Checkpointer raises.
    """
    check()
    if isinstance(fabric.strategy, DeepSpeedStrategy | XLAStrategy):
        raise UsageError(
            f"a Fabric script cannot be resumed exactly with strategy={type(fabric.strategy).__name__}, which keeps "
            'copies of its own: use "ddp", FSDPStrategy or ModelParallelStrategy'
        )
    objects = {name: _saved(value, fabric) for name, value in state.items()}
    scaler = getattr(fabric.strategy.precision, "scaler", None)
    if scaler is not None and not any(value is scaler for value in objects.values()):
        if "scaler" in objects:
            raise UsageError('"scaler" is what the grad scaler of Fabric\'s precision is saved as: use another name')
        objects["scaler"] = scaler
    return Checkpointer(path, objects, **options)


def check() -> None:
    """Raise UsageError, naming what is missing, if this Fabric is not as the integration knows it."""
    for module, name in NAMES:
        if not hasattr(module, name):
            raise UsageError(
                f"{module.__name__}.{name} is not as unbroken knows it from lightning {TESTED}: a newer unbroken may "
                f"know this version, or install lightning {TESTED}"
            )


def _saved(value: Any, fabric: Any) -> object:
    """What of an object is saved: what Fabric's wrapper holds."""
    bare = getattr(value, "_orig_mod", value)  # compiled after Fabric wrapped it
    if isinstance(bare, wrappers._FabricModule):
        module: nn.Module = bare._forward_module
        return module
    if isinstance(value, wrappers._FabricOptimizer):
        optimizer: Optimizer = value.optimizer
        return optimizer
    if isinstance(value, wrappers._FabricDataLoader):
        if not isinstance(value, ResumableFabricLoader):
            loader: Any = value._dataloader
            own: Any = resumable(dealt_alone(loader) if fabric.world_size == 1 else loader)
            value._dataloader = own
            value.__class__ = ResumableFabricLoader  # the script has this object already
        return value._dataloader
    return value


class ResumableFabricLoader(wrappers._FabricDataLoader):
    """Fabric's loader, which moves batches to the device, over a `ResumableLoader`, whose attributes it has."""

    def __getattribute__(self, name: str) -> Any:
        # Fabric copies the attributes of the loader that it wraps: they would hide those that change.
        if name in ("batch_size", "epoch", "seed", "micro_batches"):
            return getattr(object.__getattribute__(self, "_dataloader"), name)
        return super().__getattribute__(name)


def dealt_alone(loader: DataLoader[Any], kinds: tuple[type, ...] = (RandomSampler, SequentialSampler)) -> Any:
    """A loader of a job of one rank, with the sampler that Lightning gives to several.

    Its order holds for any number of ranks, in the middle of an epoch too. Loaders with other samplers as they are.
    """
    sampler: Any = loader.sampler
    is_plain = type(sampler) in kinds and not getattr(sampler, "replacement", False)
    if not is_plain or getattr(sampler, "_num_samples", None) is not None or loader.batch_size is None:
        return loader
    generator = getattr(sampler, "generator", None)
    seed = torch.initial_seed() if generator is None else generator.initial_seed()
    seed = int(os.environ.get("PL_GLOBAL_SEED", seed))
    shuffle = type(sampler) is RandomSampler
    return data._update_dataloader(loader, DistributedSampler(loader.dataset, 1, 0, shuffle=shuffle, seed=seed))
