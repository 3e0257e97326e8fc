"""Accelerate: `checkpointer(accelerator, "runs/x", {…}, every=…)` for objects that `accelerator.prepare` returned.

A prepared loader stays the object that it is. Inside, in place of the DataLoader whose batches Accelerate deals to the
ranks, it has one with an exact position that deals samples. A prepared loader fetches one batch ahead of the loop, so
the position that is saved is that of what the loop has had.

Private names of Accelerate that this leans on (tested with 1.15): `Accelerator._models`, `_custom_objects`, `step`,
`rng_types`; of what it wraps `optimizer`, `scheduler`, `split_batches`, `step_with_optimizer`, `base_dataloader` and
`iteration`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from unbroken.checkpointer import Checkpointer
from unbroken.data.loader import ResumableLoader, resumable
from unbroken.errors import UsageError
from unbroken.integrations.ahead import Ahead
from unbroken.integrations.dealing import deal
from unbroken.integrations.extras import needs
from unbroken.integrations.pace import keep_pace, keeps_pace_with_ranks

log = logging.getLogger(__name__)

AT_LEAST = "1.1.0"


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
    needs("accelerate", "accelerate", AT_LEAST)
    _refuse(accelerator)
    added: dict[str, Any] = {f"registered{at}": each for at, each in enumerate(accelerator._custom_objects)}
    added["accelerator"] = _Phase(accelerator)
    if accelerator.scaler is not None:
        added["scaler"] = accelerator.scaler
    twice = sorted(added.keys() & state.keys())
    if twice:
        raise UsageError(f"state={{{twice[0]!r}: …}}: the Accelerator's own {twice[0]} is saved by that name")
    _refuse_stateful(accelerator, list(state.values()))
    found = {name: _unwrapped(name, value, accelerator) for name, value in state.items()}
    added["accelerator"].schedulers = [value for value in state.values() if keeps_pace_with_ranks(value)]
    return AcceleratedCheckpointer(accelerator, path, {**found, **added}, **options)


def _refuse_stateful(accelerator: Any, given: list[object]) -> None:
    """torchdata's loader has its first iterator before it is asked for one, so its first pass in a process draws other
    random numbers than later ones."""
    for loader in accelerator._dataloaders:
        if getattr(loader, "use_stateful_dataloader", False) and not any(loader is value for value in given):
            raise UsageError(
                "use_stateful_dataloader=True: a prepared loader that is not in `state` draws other random numbers in "
                "a resumed process; give all of them, or leave use_stateful_dataloader out"
            )


def _unwrapped(name: str, value: Any, accelerator: Any) -> object:
    from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped]
    from accelerate.scheduler import AcceleratedScheduler  # type: ignore[import-untyped]

    if isinstance(value, AcceleratedOptimizer):
        return value.optimizer
    if isinstance(value, AcceleratedScheduler):
        return value.scheduler
    if hasattr(value, "base_dataloader"):
        if "Dispatcher" in type(value).__name__:
            raise UsageError(
                f"{name} cannot be resumed exactly with dispatch_batches=True, the default for iterable data sets: "
                "give the Accelerator DataLoaderConfiguration(dispatch_batches=False)"
            )
        return _Position(value, accelerator)
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
        super().step(loss=loss, accumulating=accumulating)


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


class _Position(Ahead):
    """Where a prepared loader is. It counts its passes by itself."""

    def __init__(self, prepared: Any, accelerator: Any) -> None:
        super().__init__(_loader_of(prepared, accelerator))
        self._prepared = prepared
        self._iteration = -1
        prepared.base_dataloader = _Inside(prepared.base_dataloader, self)

    def __iter__(self) -> Iterator[Any]:
        self._iteration = self._prepared.iteration
        is_empty = True
        for batch in super().__iter__():
            is_empty = False
            yield batch
        if is_empty:  # it went on at the end of an epoch; Accelerate does not count a pass without a batch
            self._prepared.iteration += 1

    def state_dict(self) -> dict[str, Any]:
        """Of what the loop has had; after the loop, the next epoch."""
        if self._iteration != self._prepared.iteration:
            self.pass_is_over()
        return {"position": super().state_dict(), "iteration": self._prepared.iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there at the next iter()."""
        super().load_state_dict(state["position"])
        self._prepared.iteration = state["iteration"]


class _Inside:
    """What stands inside a prepared loader in place of its DataLoader, and looks like that."""

    def __init__(self, base: Any, position: _Position) -> None:
        self._base, self._position = base, position

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._base)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._position)

    def __len__(self) -> int:
        return len(self._position.loader)

    def __getattr__(self, name: str) -> Any:
        if name in ("_base", "_position"):  # not yet set: do not look for them in themselves
            raise AttributeError(name)
        return getattr(self._base, name)


def _loader_of(prepared: Any, accelerator: Any) -> ResumableLoader:
    """One with a position, of the same samples in the same settings as a prepared one."""
    base = prepared.base_dataloader
    if isinstance(base.dataset, IterableDataset):
        return resumable(base)
    batches = base.batch_sampler
    inner = getattr(batches, "batch_sampler", batches)  # what Accelerate deals from, if it deals
    sampler = getattr(inner, "sampler", None)
    seed = _seed_of(sampler, accelerator)
    if type(inner) is BatchSampler and _is_seedable(sampler):
        sampler = RandomSampler(base.dataset)
    options: dict[str, Any] = {"batch_sampler": inner}
    if type(inner) is BatchSampler:
        options = {"batch_size": inner.batch_size, "sampler": sampler, "drop_last": inner.drop_last}
    plain: DataLoader[Any] = DataLoader(
        base.dataset,
        num_workers=base.num_workers,
        collate_fn=base.collate_fn,
        pin_memory=base.pin_memory,
        timeout=base.timeout,
        worker_init_fn=base.worker_init_fn,
        multiprocessing_context=base.multiprocessing_context,
        prefetch_factor=base.prefetch_factor,
        persistent_workers=base.persistent_workers,
        **options,
    )
    return resumable(deal(plain, accelerator.process_index, accelerator.num_processes, seed), seed=seed)


def _is_seedable(sampler: Any) -> bool:
    return type(sampler).__name__ == "SeedableRandomSampler" and isinstance(sampler, RandomSampler)


def _seed_of(sampler: Any, accelerator: Any) -> int:
    """Rank 0's, since every rank must have the same order."""
    import torch
    from accelerate.utils import broadcast_object_list  # type: ignore[import-untyped]

    generator = getattr(sampler, "generator", None)
    seed = generator.initial_seed() if isinstance(generator, torch.Generator) else torch.initial_seed()
    told = [int(getattr(sampler, "initial_seed", None) or seed)]
    if accelerator.num_processes > 1:
        broadcast_object_list(told)
    return told[0] % (1 << 63)


def _refuse(accelerator: Any) -> None:
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
