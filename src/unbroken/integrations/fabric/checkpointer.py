"""A checkpointer of what went through `fabric.setup` and `fabric.setup_dataloaders`.

    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    ckpt = checkpointer(fabric, "runs/x", {"model": model, "optimizer": optimizer, "loader": loader}, every=…)

Fabric's wrappers hold no state: what they wrap is registered, so that a checkpoint does not depend on the strategy.
Its loaders are made resumable in place, so that the script goes on iterating what it has. What only Fabric knows of,
the scaler of its precision plugin and its callbacks, is added. Everything else is the Checkpointer's.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies.deepspeed import DeepSpeedStrategy
from lightning.fabric.strategies.xla import XLAStrategy
from lightning.fabric.wrappers import _FabricDataLoader, _FabricModule, _FabricOptimizer
from torch import nn
from torch._dynamo import OptimizedModule
from torch.amp.grad_scaler import GradScaler

from unbroken.checkpointer import Checkpointer
from unbroken.data.cursor import WhenRanksChange
from unbroken.errors import UsageError
from unbroken.integrations.fabric.loader import made_resumable
from unbroken.integrations.fabric.private import OF_A_MODULE, OF_FABRIC, check
from unbroken.state.objects import is_stateful

SCALER = "scaler"
"""Under this name the scaler of the precision plugin is saved."""
CALLBACK = "callback"
"""Under `callback.<class>` a callback of `Fabric(callbacks=…)` is saved that has a state."""


def checkpointer(
    fabric: Fabric,
    path: str | Path,
    state: Mapping[str, object],
    *,
    when_ranks_change: WhenRanksChange = "batch",
    **options: Any,
) -> Checkpointer:
    """A Checkpointer of objects that Fabric has set up.

    fabric   after `launch()`
    path     the run directory, shared by all nodes
    state    names -> what `fabric.setup` and `fabric.setup_dataloaders` returned, schedulers, and whatever else a
             Checkpointer takes. Loaders become resumable in place: go on iterating them
    when_ranks_change  as in `unbroken.resumable`, for the loaders
    options  those of `unbroken.Checkpointer`: every, keep, on_error, strict, …

    Raises UsageError for what cannot be resumed exactly under Fabric, and as the Checkpointer does.
    """
    _check_strategy(fabric)
    registered = {name: _registered(fabric, name, value, when_ranks_change) for name, value in state.items()}
    return Checkpointer(path, registered | _what_fabric_holds(fabric, registered), **options)


def _check_strategy(fabric: Fabric) -> None:
    if not isinstance(fabric, Fabric):
        raise UsageError(f"checkpointer() takes a lightning.fabric.Fabric, not a {type(fabric).__name__}")
    check(fabric, OF_FABRIC)
    if isinstance(fabric.strategy, DeepSpeedStrategy | XLAStrategy):
        raise UsageError(
            f"{type(fabric.strategy).__name__} keeps optimizer state where unbroken does not find it; use "
            'strategy="ddp", "fsdp" or ModelParallelStrategy'
        )
    if fabric.world_size > 1 and not dist.is_initialized():
        raise UsageError("checkpointer() comes after fabric.launch(), fabric.setup() and fabric.setup_dataloaders()")


def _registered(fabric: Fabric, name: str, value: object, when_ranks_change: WhenRanksChange) -> object:
    """What is saved of an object: itself, or what is inside Fabric's wrapper."""
    if isinstance(value, _FabricDataLoader):
        return made_resumable(fabric, value, when_ranks_change)
    if isinstance(value, _FabricOptimizer):
        return value.optimizer
    if value is fabric.strategy.precision:
        return _scaler_of(fabric) or value
    inner = value._orig_mod if isinstance(value, OptimizedModule) else value  # torch.compile after fabric.setup
    if isinstance(inner, _FabricModule):
        check(inner, OF_A_MODULE)
        return inner._forward_module
    if isinstance(value, nn.Module):
        _refuse_what_is_wrapped(name, value)
    if isinstance(value, int | float | str):  # as in the state of `fabric.save`
        raise UsageError(
            f"{name} is a {type(value).__name__}, which cannot be restored in place: ask ckpt.global_step, "
            "ckpt.micro_step and loader.epoch instead, or register a tensor"
        )
    return value


def _refuse_what_is_wrapped(name: str, module: nn.Module) -> None:
    """The module inside says nothing of DDP around it, whose layout of gradients decides their last bits."""
    for found in gc.get_objects():
        if type(found) is _FabricModule and found._original_module is module is not found:
            raise UsageError(f"{name} is the module inside of what fabric.setup() returned: register what it returned")


def _what_fabric_holds(fabric: Fabric, registered: Mapping[str, object]) -> dict[str, object]:
    """State that no variable of the script leads to."""
    known = {id(value) for value in registered.values()}
    held: dict[str, object] = {}
    scaler = _scaler_of(fabric)
    if scaler is not None and id(scaler) not in known:
        held[SCALER] = scaler
    for callback in fabric._callbacks:
        if is_stateful(callback) and not isinstance(callback, nn.Module) and id(callback) not in known:
            name = f"{CALLBACK}.{type(callback).__name__}"
            count = sum(other.partition("-")[0] == name for other in held)
            held[f"{name}-{count + 1}" if count else name] = callback
    taken = sorted(held.keys() & registered.keys())
    if taken:
        raise UsageError(f"{taken[0]!r} is what the state of Fabric's own {taken[0]} is called: use another name")
    return held


def _scaler_of(fabric: Fabric) -> GradScaler | None:
    """The scaler of the precision plugin, with precision="16-mixed"."""
    scaler = getattr(fabric.strategy.precision, "scaler", None)
    return scaler if isinstance(scaler, GradScaler) else None
