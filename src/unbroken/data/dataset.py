"""A map-style data set whose every sample is seeded by (seed, epoch, index), in whichever process it is fetched.

The inner loader sends a `BatchKey` where torch sends indices, and gets a whole batch back. All global streams are
seeded before each sample and before collating, so a worker's history does not matter: not how many workers there are,
nor whether they persist, nor what was prefetched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch.utils.data import Dataset, Subset

from unbroken.data.seeding import Purpose, mix, number_of, seed_all


class BatchKey(NamedTuple):
    """What to fetch, and what its randomness depends on. Travels to workers."""

    seed: int
    epoch: int
    indices: list[Any]
    positions: range | None
    """Positions of the samples in the epoch, if its order may hold a sample twice."""
    batched: bool
    """False for batch_size=None: the one sample is the batch."""


class SeededDataset(Dataset[Any]):
    """The user's data set, fetched by batch. Picklable if the data set and the collate function are."""

    def __init__(self, dataset: Any, collate_fn: Callable[[Any], Any]) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn

    def __getitem__(self, key: BatchKey) -> Any:
        """The batch of `key`. Leaves the global streams moved: the caller preserves them in the main process."""
        seeds = [
            mix(Purpose.SAMPLE, key.seed, key.epoch, number_of(index), position)
            for index, position in zip(key.indices, key.positions or [0] * len(key.indices), strict=True)
        ]
        batch_seed = mix(Purpose.BATCH, key.seed, key.epoch, *seeds)
        data = self._fetch(key, seeds, batch_seed)
        seed_all(mix(Purpose.BATCH, batch_seed))
        return self.collate_fn(data)

    def _fetch(self, key: BatchKey, seeds: list[int], batch_seed: int) -> Any:
        if not key.batched:
            seed_all(seeds[0])
            return self.dataset[key.indices[0]]
        if fetches_batches(self.dataset):
            # It draws for the whole batch in an order of its own, so its randomness is the batch's.
            seed_all(batch_seed)
            return self.dataset.__getitems__(key.indices)
        samples = []
        for index, seed in zip(key.indices, seeds, strict=True):
            seed_all(seed)
            samples.append(self.dataset[index])
        return samples


def fetches_batches(dataset: Any) -> bool:
    """Whether the data set fetches several samples at once. torch's Subset only passes the call on."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return bool(getattr(dataset, "__getitems__", None))
