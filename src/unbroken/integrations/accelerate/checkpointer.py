"""A checkpointer of what `accelerator.prepare` returned."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch.utils.data import DataLoader

from unbroken.checkpointer import Checkpointer
from unbroken.errors import UsageError
from unbroken.integrations.accelerate.loader import Position
from unbroken.integrations.accelerate.private import (
    OF_A_LOADER,
    OF_A_SCHEDULER,
    OF_AN_ACCELERATOR,
    OF_AN_OPTIMIZER,
    check,
)
from unbroken.integrations.accelerate.settings import refuse, refuse_stateful
from unbroken.integrations.pace import keep_pace, keeps_pace_with_ranks
from unbroken.integrations.workers import ending_with_each_pass


def checkpointer(
    accelerator: Any, path: str | Path, state: Mapping[str, object], **options: Any
) -> AcceleratedCheckpointer:
    """A Checkpointer of what `accelerator.prepare` returned, and of anything else; to be made right after it.

        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        state = {"model": model, "optimizer": optimizer, "loader": loader, "scheduler": scheduler}
        ckpt = checkpointer(accelerator, "runs/x", state, every=unbroken.Every(steps=100))
        ckpt.restore()

    path     the run directory, shared by all nodes
    state    names -> objects, as for `Checkpointer`; Accelerate's wrappers are taken off
    options  the Checkpointer's: `every`, `keep`, `on_error`, …

    Saved are also the scaler, what was registered with `register_for_checkpointing`, and where in an accumulation
    window the Accelerator is. The samples of a step follow from seed and epoch (`unbroken.resumable`), also on another
    number of ranks.

    Raises UsageError for what cannot be resumed exactly, naming the setting.
    """
    check(accelerator, OF_AN_ACCELERATOR)
    refuse(accelerator)
    added: dict[str, Any] = {f"registered{at}": each for at, each in enumerate(accelerator._custom_objects)}
    added["accelerator"] = _Phase(accelerator)
    if accelerator.scaler is not None:
        added["scaler"] = accelerator.scaler
    twice = sorted(added.keys() & state.keys())
    if twice:
        raise UsageError(f"state={{{twice[0]!r}: …}}: the Accelerator's own {twice[0]} is saved by that name")
    refuse_stateful(accelerator, list(state.values()))
    found = {name: _unwrapped(name, value, accelerator) for name, value in state.items()}
    for loader in accelerator._dataloaders:
        if not any(loader is value for value in state.values()):
            ending_with_each_pass(loader)
    added["accelerator"].schedulers = [value for value in state.values() if keeps_pace_with_ranks(value)]
    return AcceleratedCheckpointer(accelerator, path, {**found, **added}, **options)


def _unwrapped(name: str, value: Any, accelerator: Any) -> object:
    if isinstance(value, AcceleratedOptimizer):
        check(value, OF_AN_OPTIMIZER)
        return value.optimizer
    if isinstance(value, AcceleratedScheduler):
        check(value, OF_A_SCHEDULER)
        return value.scheduler
    if any(value is prepared for prepared in accelerator._dataloaders):
        check(value, OF_A_LOADER)
        if "Dispatcher" in type(value).__name__:
            raise UsageError(
                f"{name} cannot be resumed exactly with dispatch_batches=True, the default for iterable data sets: "
                "give the Accelerator DataLoaderConfiguration(dispatch_batches=False)"
            )
        return Position(value, accelerator)
    if isinstance(value, DataLoader):
        raise UsageError(f"{name} is a DataLoader: give it to accelerator.prepare first, or to unbroken.resumable")
    if accelerator.distributed_type.value in ("MULTI_CPU", "MULTI_GPU") and value in accelerator._models:
        raise UsageError(f"{name} is not what accelerator.prepare returned: give that, which is wrapped for the ranks")
    return value


class AcceleratedCheckpointer(Checkpointer):
    """A Checkpointer whose `step` knows from the Accelerator whether gradients are being accumulated."""

    def __init__(self, accelerator: Any, path: str | Path, state: Mapping[str, object], **options: Any) -> None:
        """See `checkpointer`."""
        super().__init__(path, state, **options)
        self._accelerator = accelerator

    def step(self, *, loss: Any = None, accumulating: bool | None = None, gradients: bool = False) -> None:
        """As `Checkpointer.step`; to be called after `optimizer.step()`, in each micro-step too.

        accumulating  not `accelerator.sync_gradients`, if it is not given
        """
        if accumulating is None:
            accumulating = not self._accelerator.sync_gradients
        super().step(loss=loss, accumulating=accumulating, gradients=gradients)


class _Phase:
    """Where in an accumulation window the Accelerator is, and how many steps a prepared scheduler makes at once: one
    for each rank that the run began with, since rates follow from the samples that were had."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._scheduler_steps = int(accelerator.num_processes)
        self.schedulers: list[Any] = []
        """Those that Accelerate lets make a step for each rank."""

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._accelerator.step, "scheduler_steps": self._scheduler_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._accelerator.step = state["step"]
        self._scheduler_steps = state["scheduler_steps"]
        if self._scheduler_steps != self._accelerator.num_processes:
            for scheduler in self.schedulers:
                keep_pace(scheduler, self._scheduler_steps)
