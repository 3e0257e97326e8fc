"""The order of an epoch for torch's own samplers, as a function of (seed, epoch).

`known_order` reads a sampler and gives an `Order`, or None for one whose order cannot be told without iterating it
(`samplers.py` does that). An order knows every position of an epoch at once, so resuming costs the same anywhere in it.
The samplers themselves are never iterated or changed, except those whose draw is theirs alone (`SubsetRandomSampler`,
`WeightedRandomSampler`), which run on isolated random streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from unbroken.data.seeding import Isolated, Purpose, mix

Drawn = range | np.ndarray[Any, Any] | list[Any]
"""The samples of an epoch by position."""


@dataclass(frozen=True, slots=True)
class Order:
    """How the epochs of one sampler are ordered."""

    kind: str
    """The sampler and what of its settings shapes the order; two runs must agree on it."""
    length: Callable[[], int]
    """Positions in an epoch, over all ranks, without padding."""
    draw: Callable[[int, int], Drawn]
    """(seed, epoch) to the order."""
    repeats: bool = False
    """One epoch may hold a sample twice. Then its randomness depends on its position as well, so that an oversampled
    class is augmented anew each time."""
    shuffled: bool = True
    distributed: bool = False
    """The ranks share an epoch; otherwise each reads all of it."""
    rank: int = 0
    world: int = 1
    drop_last: bool = False
    """Ranks leave out the samples that do not fill a round of all ranks, instead of padding."""


def take(drawn: Drawn, positions: range) -> list[Any]:
    """The samples at `positions`; positions past the end go on from the start, as DistributedSampler pads."""
    length = len(drawn)
    if isinstance(drawn, np.ndarray):
        wanted = np.arange(positions.start, positions.stop, positions.step)
        picked: list[Any] = drawn[wanted % length].tolist()
        return picked
    return [drawn[position % length] for position in positions]


def known_order(sampler: Iterable[Any]) -> Order | None:
    """The order of a sampler that is exactly one of torch's own classes, else None.

    A subclass may override anything, so it is not known.
    """
    kind = type(sampler)
    if kind is SequentialSampler:
        return _sequential(sampler)
    if kind is RandomSampler or (kind.__name__, kind.__module__.partition(".")[0]) == ("RandomSampler", "torchdata"):
        return _random(sampler)
    if kind is DistributedSampler:
        return _distributed(sampler)
    if kind is SubsetRandomSampler or kind is WeightedRandomSampler:
        return _drawn_by_sampler(sampler)
    return None


def _sequential(sampler: Any) -> Order:
    return Order(
        kind="SequentialSampler",
        length=lambda: len(sampler.data_source),
        draw=lambda seed, epoch: range(len(sampler.data_source)),
        shuffled=False,
    )


def _random(sampler: Any) -> Order:
    def draw(seed: int, epoch: int) -> Drawn:
        generator = torch.Generator().manual_seed(mix(Purpose.ORDER, seed, epoch))
        choices, wanted = len(sampler.data_source), sampler.num_samples
        if sampler.replacement:
            return torch.randint(choices, (wanted,), generator=generator).numpy()
        rounds = [torch.randperm(choices, generator=generator) for _ in range(-(-wanted // choices))]
        return torch.cat(rounds)[:wanted].numpy()

    repeats = bool(sampler.replacement) or sampler.num_samples > len(sampler.data_source)
    return Order(
        kind=f"RandomSampler(replacement={bool(sampler.replacement)})",
        length=lambda: int(sampler.num_samples),
        draw=draw,
        repeats=repeats,
    )


def _distributed(sampler: Any) -> Order:
    def draw(seed: int, epoch: int) -> Drawn:
        if not sampler.shuffle:
            return range(len(sampler.dataset))
        # As DistributedSampler.__iter__: a job that adopts us keeps the order it had.
        generator = torch.Generator().manual_seed(seed + epoch)
        return torch.randperm(len(sampler.dataset), generator=generator).numpy()

    return Order(
        kind=f"DistributedSampler(shuffle={bool(sampler.shuffle)})",
        length=lambda: len(sampler.dataset),
        draw=draw,
        shuffled=bool(sampler.shuffle),
        distributed=True,
        rank=sampler.rank,
        world=sampler.num_replicas,
        drop_last=sampler.drop_last,
    )


def _drawn_by_sampler(sampler: Any) -> Order:
    def draw(seed: int, epoch: int) -> Drawn:
        generators = [sampler.generator] if isinstance(sampler.generator, torch.Generator) else []
        with Isolated(mix(Purpose.ORDER, seed, epoch), generators):
            return _compact(list(sampler))

    return Order(kind=type(sampler).__name__, length=lambda: len(sampler), draw=draw, repeats=True)


def _compact(indices: Sequence[Any]) -> Drawn:
    """Plain ints as an array, an eighth of the memory; anything else as it is."""
    if all(type(index) is int for index in indices):
        return np.array(indices, dtype=np.int64)
    return list(indices)
