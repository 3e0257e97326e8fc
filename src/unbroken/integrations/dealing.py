"""A loader whose batches a framework would deal to the ranks, as one that deals its samples by itself.

Frameworks take a loader that every rank has alike and give each rank some of its batches. The global batch of a step
has the same samples here, each rank other ones of them; and the order of an epoch is a function of (seed, epoch), which
any number of ranks can go on in.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import chain, cycle, islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler, SequentialSampler

from unbroken.errors import UsageError


class Dealt(Sampler[Any]):
    """Every `world`-th sample of another sampler, which every rank iterates alike; padded from its start."""

    def __init__(self, sampler: Any, rank: int, world: int, drop_last: bool) -> None:
        self.sampler = sampler
        self.rank = rank
        self.num_replicas = world
        self.drop_last = drop_last

    def __len__(self) -> int:
        return len(self.sampler) // self.num_replicas if self.drop_last else -(-len(self.sampler) // self.num_replicas)

    def __iter__(self) -> Iterator[Any]:
        drawn = list(self.sampler)
        whole = len(drawn) // self.num_replicas * self.num_replicas
        if self.drop_last or not drawn:
            return iter(drawn[self.rank : whole : self.num_replicas])
        padded = chain(drawn, islice(cycle(drawn), -len(drawn) % self.num_replicas))
        return islice(padded, self.rank, None, self.num_replicas)


def deal(loader: DataLoader[Any], rank: int, world: int, seed: int) -> DataLoader[Any]:
    """A map-style loader of this rank's share; one that deals already as it is.

    Alone, too, in the same way: what one rank began, several may go on with.
    Raises UsageError for batches that a sampler of the user's own makes: how to deal those is not known.
    """
    sampler: Any = loader.sampler
    if isinstance(sampler, DistributedSampler) or hasattr(sampler, "num_replicas"):
        return loader
    if type(loader.batch_sampler) is not BatchSampler:
        if world == 1:
            return loader
        raise UsageError(
            f"batches of {type(loader.batch_sampler).__name__} cannot be dealt to {world} ranks: give the loader a "
            "sampler and a batch size instead, or a batch sampler that has num_replicas and deals by itself"
        )
    own: Any
    if type(sampler) is SequentialSampler or (type(sampler) is RandomSampler and _is_a_permutation(sampler)):
        shuffle = type(sampler) is RandomSampler
        own = DistributedSampler(loader.dataset, world, rank, shuffle, seed, loader.drop_last)
    elif world == 1:
        return loader
    else:
        own = Dealt(sampler, rank, world, loader.drop_last)
    return loader_like(loader, loader.dataset, batch_size=loader.batch_size, sampler=own, drop_last=loader.drop_last)


_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "pin_memory_device",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)


def loader_like(loader: DataLoader[Any], dataset: Any, **batches: Any) -> DataLoader[Any]:
    """A loader with the options of another.

    batches  what makes its batches: `batch_size`, `sampler`, `drop_last`, or `batch_sampler`
    """
    known = inspect.signature(DataLoader.__init__).parameters  # newer versions of torch drop some, and have others
    return DataLoader(dataset, **{name: getattr(loader, name) for name in _OPTIONS if name in known}, **batches)


def _is_a_permutation(sampler: RandomSampler) -> bool:
    return not sampler.replacement and sampler.num_samples == len(sampler.data_source)
