"""Lightning Fabric: `checkpointer(fabric, "runs/x", {…}, every=…)` for objects that Fabric has set up.

Private names of Fabric that this leans on (tested with 2.6.6): of what it wraps `_forward_module`, `optimizer` and
`_dataloader`; of itself `_strategy.precision`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from unbroken.checkpointer import Checkpointer
from unbroken.data.loader import ResumableLoader, resumable
from unbroken.errors import UsageError
from unbroken.integrations.dealing import deal
from unbroken.integrations.extras import needs

log = logging.getLogger(__name__)

AT_LEAST = "2.5"


def checkpointer(fabric: Any, path: str | Path, state: Mapping[str, object], **options: Any) -> Checkpointer:
    """A Checkpointer of what went through `fabric.setup` and `fabric.setup_dataloaders`, and of anything else.

        model, optimizer = fabric.setup(model, optimizer)
        loader = fabric.setup_dataloaders(loader)
        ckpt = checkpointer(fabric, "runs/x", {"model": model, "optimizer": optimizer, "loader": loader}, every=…)
        ckpt.restore()

    path     the run directory, shared by all nodes
    state    names -> objects, as for `Checkpointer`; Fabric's wrappers are taken off
    options  the Checkpointer's: `every`, `keep`, `on_error`, …

    The precision plugin's state (a grad scaler), which `fabric.save` forgets, is saved too, as `precision`. A loader
    that Fabric has set up stays the object that it is, and has an exact position from now on (`unbroken.resumable`).

    Raises UsageError for what cannot be resumed exactly.
    """
    needs("lightning", "lightning", AT_LEAST)
    found = {name: _unwrapped(name, value) for name, value in state.items()}
    precision = fabric._strategy.precision
    if precision.state_dict():
        if "precision" in found:
            raise UsageError('state={"precision": …}: the precision plugin is saved by that name')
        found["precision"] = precision
    return Checkpointer(path, found, **options)


def _unwrapped(name: str, value: object) -> object:
    from lightning.fabric.wrappers import _FabricDataLoader, _FabricModule, _FabricOptimizer, _unwrap_compiled

    bare = _unwrap_compiled(value)[0]
    if isinstance(bare, _FabricModule):
        return bare._forward_module
    if isinstance(value, _FabricOptimizer):
        return value.optimizer
    if isinstance(value, _FabricDataLoader):
        return _resumable(value)
    if isinstance(value, DataLoader):
        raise UsageError(f"{name} is a DataLoader: give it to fabric.setup_dataloaders first, or to unbroken.resumable")
    return value


def _resumable(wrapper: Any) -> ResumableLoader:
    """What stands inside Fabric's wrapper of a loader from now on."""
    loader = wrapper._dataloader
    if isinstance(loader, ResumableLoader):
        return loader
    seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))
    if not isinstance(loader.dataset, IterableDataset):
        loader = deal(loader, 0, 1, seed)  # on several ranks Fabric has made it deal, if that was wanted
    wrapper._dataloader = resumable(loader, seed=seed)
    return wrapper._dataloader  # type: ignore[no-any-return]
