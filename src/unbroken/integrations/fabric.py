"""Lightning Fabric: a Checkpointer for what went through `fabric.setup` and `fabric.setup_dataloaders`.

    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    ckpt = checkpointer(fabric, "runs/x", {"model": model, "optimizer": optimizer, "loader": loader}, every=…)

Fabric's wrappers hold no state: what they wrap is registered, so that a checkpoint does not depend on the strategy.
Its loaders are made resumable in place, so that the script goes on iterating what it has. What only Fabric knows of,
the scaler of its precision plugin and its callbacks, is added. Everything else is the Checkpointer's.
Importing this module lets `fabric.setup_dataloaders` take loaders that are resumable already.

What is used of Fabric beyond its public surface: the imports below that begin with an underscore, and the attributes
that `_Internals` names.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch._dynamo import OptimizedModule
from torch.amp.grad_scaler import GradScaler
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from unbroken.checkpointer import Checkpointer
from unbroken.data import ResumableLoader, resumable
from unbroken.errors import UsageError
from unbroken.integrations.extras import needs
from unbroken.state.objects import is_stateful

AT_LEAST = "2.6"

needs("lightning", "lightning", AT_LEAST)

from lightning.fabric import Fabric  # noqa: E402  # after the check
from lightning.fabric.strategies.deepspeed import DeepSpeedStrategy  # noqa: E402
from lightning.fabric.strategies.xla import XLAStrategy  # noqa: E402
from lightning.fabric.utilities.data import _update_dataloader  # noqa: E402
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper  # noqa: E402
from lightning.fabric.wrappers import _FabricDataLoader, _FabricModule, _FabricOptimizer  # noqa: E402

SCALER = "scaler"
"""Under this name the scaler of the precision plugin is saved."""
CALLBACK = "callback"
"""Under `callback.<class>` a callback of `Fabric(callbacks=…)` is saved that has a state."""


def checkpointer(fabric: Fabric, path: str | Path, state: Mapping[str, object], **options: Any) -> Checkpointer:
    """A Checkpointer of objects that Fabric has set up.

    fabric   after `launch()`
    path     the run directory, shared by all nodes
    state    names -> what `fabric.setup` and `fabric.setup_dataloaders` returned, schedulers, and whatever else a
             Checkpointer takes. Loaders become resumable in place: go on iterating them
    options  those of `unbroken.Checkpointer`: every, keep, on_error, strict, …

    Raises UsageError for what cannot be resumed exactly under Fabric, and as the Checkpointer does.
    """
    _check_strategy(fabric)
    registered = {name: _registered(fabric, name, value) for name, value in state.items()}
    return Checkpointer(path, registered | _what_fabric_holds(fabric, registered), **options)


class ResumableFabricLoader(_FabricDataLoader):
    """What `fabric.setup_dataloaders` gave, over a loader with an exact position.

    `epoch`, `micro_batches`, `batch_size`, … are those of the `ResumableLoader`.
    """

    @property
    def batch_size(self) -> int | None:
        """Samples per batch on this rank, as it is now; Fabric's own attribute is a copy of what was configured."""
        size: int | None = self._dataloader.batch_size
        return size

    def __getattr__(self, name: str) -> Any:
        if name == "_dataloader":  # not yet set: do not look for it in itself
            raise AttributeError(name)
        return getattr(self._dataloader, name)


class _Internals:
    """Attributes of Fabric's objects that are not public. `tests/integrations/test_fabric.py` fails if they change."""

    @staticmethod
    def forward_module(module: _FabricModule) -> nn.Module:
        """What the strategy made of a module: in DDP, compiled, sharded, or as it was."""
        return module._forward_module

    @staticmethod
    def module_inside(module: _FabricModule) -> nn.Module:
        """What `fabric.setup` was given."""
        return module._original_module

    @staticmethod
    def loader_of(loader: _FabricDataLoader) -> Any:
        """What iterates."""
        return loader._dataloader

    @staticmethod
    def put_loader(loader: _FabricDataLoader, inner: ResumableLoader) -> None:
        """Let it iterate something else; the next `iter()` does."""
        loader.__class__ = ResumableFabricLoader
        loader._dataloader = inner  # type: ignore[assignment]  # it asks for no more than iter() and len()

    @staticmethod
    def callbacks_of(fabric: Fabric) -> list[object]:
        """Those given to `Fabric(callbacks=…)`, and every LightningModule that was set up."""
        return list(fabric._callbacks)

    @staticmethod
    def sampler_inside(sampler: DistributedSamplerWrapper) -> Any:
        """The user's sampler, whose items Fabric deals to the ranks."""
        dealt: Any = sampler.dataset
        return dealt._sampler

    @staticmethod
    def deal(fabric: Fabric, loader: DataLoader[Any], ranks: int, rank: int, seed: int) -> DataLoader[Any]:
        """The loader with the DistributedSampler that Fabric gives to each of several ranks."""
        sampler = fabric._get_distributed_sampler(loader, num_replicas=ranks, rank=rank, seed=seed)
        return _update_dataloader(loader, sampler)


def _check_strategy(fabric: Fabric) -> None:
    if not isinstance(fabric, Fabric):
        raise UsageError(f"checkpointer() takes a lightning.fabric.Fabric, not a {type(fabric).__name__}")
    if isinstance(fabric.strategy, DeepSpeedStrategy | XLAStrategy):
        raise UsageError(
            f"{type(fabric.strategy).__name__} keeps optimizer state where unbroken does not find it; use "
            'strategy="ddp", "fsdp" or ModelParallelStrategy'
        )
    if fabric.world_size > 1 and not dist.is_initialized():
        raise UsageError("checkpointer() comes after fabric.launch(), fabric.setup() and fabric.setup_dataloaders()")


def _registered(fabric: Fabric, name: str, value: object) -> object:
    """What is saved of an object: itself, or what is inside Fabric's wrapper."""
    if isinstance(value, _FabricDataLoader):
        return _made_resumable(fabric, value)
    if isinstance(value, _FabricOptimizer):
        return value.optimizer
    if value is fabric.strategy.precision:
        return _scaler_of(fabric) or value
    inner = value._orig_mod if isinstance(value, OptimizedModule) else value  # torch.compile after fabric.setup
    if isinstance(inner, _FabricModule):
        return _Internals.forward_module(inner)
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
        if type(found) is _FabricModule and _Internals.module_inside(found) is module is not found:
            raise UsageError(f"{name} is the module inside of what fabric.setup() returned: register what it returned")


def _what_fabric_holds(fabric: Fabric, registered: Mapping[str, object]) -> dict[str, object]:
    """State that no variable of the script leads to."""
    known = {id(value) for value in registered.values()}
    held: dict[str, object] = {}
    scaler = _scaler_of(fabric)
    if scaler is not None and id(scaler) not in known:
        held[SCALER] = scaler
    for callback in _Internals.callbacks_of(fabric):
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


def _made_resumable(fabric: Fabric, loader: _FabricDataLoader, like: ResumableLoader | None = None) -> ResumableLoader:
    """Let Fabric's loader iterate a resumable one, with the settings of `like`; that one."""
    inner = _Internals.loader_of(loader)
    if isinstance(inner, ResumableLoader):
        return inner
    make = resumable if like is None else like.over
    if type(getattr(inner, "sampler", None)) is DistributedSamplerWrapper:
        # Where `resumable` looks for the generators and the history of a sampler inside another.
        inner.sampler.sampler = _Internals.sampler_inside(inner.sampler)
    found = make(inner)
    if getattr(fabric.strategy, "distributed_sampler_kwargs", None) is None and _is_dealt_on_several(inner):
        # On one device Fabric leaves the sampler alone. Dealt to one rank, the order is the one that several ranks
        # share, so that the run may go on with more of them, or have come from more.
        dealt = _Internals.deal(fabric, inner, 1, 0, found.seed)
        found = make(dealt)
    _Internals.put_loader(loader, found)
    return found


def _is_dealt_on_several(loader: DataLoader[Any]) -> bool:
    """Whether Fabric's DistributedSampler gives each sample of an epoch once, as the loader's own sampler does."""
    if type(loader) is not DataLoader or loader.batch_size is None:
        return False
    sampler = loader.sampler
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    return type(sampler) is SequentialSampler


def _take_resumable_loaders_too() -> None:
    """Let `fabric.setup_dataloaders` take what `unbroken.resumable` gave: by itself it takes DataLoaders only."""
    set_up = Fabric.setup_dataloaders

    @functools.wraps(set_up)
    def setup_dataloaders(self: Fabric, *dataloaders: Any, **options: Any) -> Any:
        plain = [given.wrapped if isinstance(given, ResumableLoader) else given for given in dataloaders]
        made = set_up(self, *plain, **options)
        for given, loader in zip(dataloaders, [made] if len(dataloaders) == 1 else made, strict=True):
            if isinstance(given, ResumableLoader):
                _made_resumable(self, loader, like=given)
        return made

    Fabric.setup_dataloaders = setup_dataloaders  # type: ignore[method-assign]


_take_resumable_loaders_too()
