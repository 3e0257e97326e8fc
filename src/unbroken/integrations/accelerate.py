"""Accelerate: `checkpointer(accelerator, "runs/x", every=…)` saves what was prepared, and restores it bit for bit.

A prepared loader stays the object that it is. Inside, in place of the DataLoader whose batches Accelerate deals to the
ranks, it has one with an exact position that deals samples. A prepared loader fetches one batch ahead of the loop, so
the position that is saved is that of what the loop has had.

Private names of Accelerate that this leans on (tested with 1.15): `Accelerator._models`, `_optimizers`, `_schedulers`,
`_dataloaders`, `_custom_objects`, `step`, `rng_types`; of a loader `base_dataloader` and `iteration`.
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
from unbroken.restored import Restored

log = logging.getLogger(__name__)

AT_LEAST = "1.1.0"


def checkpointer(
    accelerator: Any, path: str | Path, *, state: Mapping[str, object] | None = None, **options: Any
) -> AcceleratedCheckpointer:
    """A Checkpointer of everything that `accelerator.prepare` was given; to be made right after it.

        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        ckpt = checkpointer(accelerator, "runs/x", every=unbroken.Every(steps=100))
        ckpt.restore()

    path     the run directory, shared by all nodes
    state    further objects to save, by name
    options  the Checkpointer's: `every`, `keep`, `on_error`, …

    Saved are models, optimizers, schedulers, loaders with their positions, the scaler, what was registered with
    `register_for_checkpointing`, and where in an accumulation window the Accelerator is. The samples of a step follow
    from seed and epoch (`unbroken.resumable`), also at another number of ranks.

    Raises UsageError for a setting with which no exact resume is possible, naming it.
    """
    needs("accelerate", "accelerate", AT_LEAST)
    _refuse(accelerator)
    loaders = [_Position(loader, accelerator) for loader in accelerator._dataloaders]
    found: dict[str, object] = {
        **_named("model", accelerator._models),
        **_named("optimizer", [getattr(each, "optimizer", each) for each in accelerator._optimizers]),
        **_named("scheduler", [getattr(each, "scheduler", each) for each in accelerator._schedulers]),
        **_named("loader", loaders),
        **_named("registered", accelerator._custom_objects),
        "accelerator": _Phase(accelerator),
    }
    if accelerator.scaler is not None:
        found["scaler"] = accelerator.scaler
    twice = sorted(found.keys() & (state or {}).keys())
    if twice:
        raise UsageError(f"state={{{twice[0]!r}: …}}: what was prepared is saved by that name")
    return AcceleratedCheckpointer(accelerator, path, {**found, **(state or {})}, **options)


class AcceleratedCheckpointer(Checkpointer):
    """A Checkpointer whose `step` knows from the Accelerator whether gradients are being accumulated."""

    def __init__(self, accelerator: Any, path: str | Path, state: Mapping[str, object], **options: Any) -> None:
        """See `checkpointer`."""
        super().__init__(path, state, **options)
        self._accelerator = accelerator

    def step(self, *, loss: Any = None, accumulating: bool | None = None) -> None:
        """As `Checkpointer.step`; to be called after `optimizer.step()`, in each micro-step too.

        accumulating  not `accelerator.sync_gradients`, if it is not given
        """
        if accumulating is None:
            accumulating = not self._accelerator.sync_gradients
        super().step(loss=loss, accumulating=accumulating)

    def restore(self, *, strict: bool = True) -> Restored | None:
        """As `Checkpointer.restore`."""
        restored = super().restore(strict=strict)
        self._warn_of_schedulers()
        return restored

    def _warn_of_schedulers(self) -> None:
        """A prepared scheduler makes a step for each rank: on another number of ranks it goes at another pace."""
        before, now = self._objects["accelerator"].ranks, self._accelerator.num_processes  # type: ignore[attr-defined]
        paced = any(getattr(each, "step_with_optimizer", False) for each in self._accelerator._schedulers)
        if before not in (None, now) and paced and not self._accelerator.split_batches:
            log.warning(
                "prepared schedulers make %d steps where they made %d before, one for each rank: give the Accelerator "
                "step_scheduler_with_optimizer=False, or leave the scheduler unprepared",
                now,
                before,
            )


class _Phase:
    """Where in an accumulation window the Accelerator is."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self.ranks: int | None = None
        """How many there were when what was restored was saved."""

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._accelerator.step, "ranks": self._accelerator.num_processes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._accelerator.step = state["step"]
        self.ranks = state["ranks"]


class _Position(Ahead):
    """Where a prepared loader is. It counts its passes by itself."""

    def __init__(self, prepared: Any, accelerator: Any) -> None:
        super().__init__(_loader_of(prepared, accelerator))
        self._prepared = prepared
        self._iteration = -1
        prepared.base_dataloader = _Inside(prepared.base_dataloader, self)

    def __iter__(self) -> Iterator[Any]:
        self._iteration = self._prepared.iteration
        return super().__iter__()

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


def _named(kind: str, objects: list[Any]) -> dict[str, object]:
    """`loader`, or `loader0`, `loader1`, … in the order in which they were prepared."""
    return {kind if len(objects) == 1 else f"{kind}{at}": each for at, each in enumerate(objects)}


def _refuse(accelerator: Any) -> None:
    """Raise UsageError for what makes an exact resume impossible."""
    rng_types = [str(getattr(each, "value", each)) for each in accelerator.rng_types or ()]
    dispatching = any("Dispatcher" in type(each).__name__ for each in accelerator._dataloaders)
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
        (dispatching, "dispatch_batches=True, the default for iterable data sets: give dispatch_batches=False"),
        (accelerator.split_batches, "split_batches=True: give the batch size per rank instead"),
    )
    for wrong, text in problems:
        if wrong:
            raise UsageError(f"this Accelerator cannot be resumed exactly: {text}")
    asked = getattr(accelerator.state, "fsdp_plugin", None) is not None
    if asked and not any("FSDP" in type(part).__name__ for model in accelerator._models for part in model.modules()):
        log.warning("FSDP was asked for, and %s runs", type(accelerator._models[0]).__name__)
