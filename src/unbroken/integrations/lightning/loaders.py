"""The training loaders of a Lightning Trainer, put onto ones that know their position.

Lightning asks its source for loaders and gives each a DistributedSampler; it leaves alone what is no DataLoader. So the
source is made to give loaders that deal their samples already.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

from unbroken.data.loader import ResumableLoader, resumable
from unbroken.errors import UsageError
from unbroken.integrations.ahead import Ahead
from unbroken.integrations.dealing import deal
from unbroken.integrations.world import size_as_saved


class Loaders:
    """Those of one Trainer, in the order in which it has them."""

    def __init__(self, trainer: Any, path: str | Path) -> None:
        self._trainer = trainer
        self._path = path
        self._made: list[ResumableLoader | _Unsized] = []
        self._restored: list[int] = []
        """Epochs that they were in when a checkpoint was restored."""

    def take_over(self) -> None:
        """Let the Trainer's source give resumable loaders from now on."""
        source = self._trainer.fit_loop._data_source
        original = source.dataloader
        source.dataloader = lambda: self._resumable(original())

    def by_name(self) -> dict[str, object]:
        """What is to be saved: `loader`, or `loader0`, `loader1`, …"""
        names = _names(len(self._made))
        return {
            name: loader.ahead if isinstance(loader, _Unsized) else loader
            for name, loader in zip(names, self._made, strict=True)
        }

    def leave_epoch(self) -> None:
        """The next pass is of the next epoch; to be called where one goes on that has no batches left."""
        for loader, epoch in zip(self._made, self._restored, strict=True):
            if loader.epoch == epoch:  # else somebody has asked it for a batch already
                for _ in iter(loader):
                    break

    def were_restored(self) -> None:
        """Remember in which epochs they are."""
        self._restored = [loader.epoch for loader in self._made]

    def _resumable(self, found: Any) -> Any:
        flat = CombinedLoader(found) if not isinstance(found, CombinedLoader) else found
        plain = flat.flattened
        self._made = [self._make(each, name) for each, name in zip(plain, _names(len(plain)), strict=True)]
        if isinstance(found, DataLoader | ResumableLoader):
            return self._made[0]
        flat.flattened = list(self._made)
        return flat if isinstance(found, CombinedLoader) else flat.iterables

    def _make(self, loader: Any, name: str) -> ResumableLoader | _Unsized:
        trainer = self._trainer
        if not isinstance(loader, DataLoader | ResumableLoader):
            raise UsageError(f"a training loader is a {type(loader).__name__}: give Lightning torch DataLoaders")
        seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))
        if isinstance(loader, ResumableLoader):
            made = loader
        elif isinstance(loader.dataset, IterableDataset):
            return _Unsized(resumable(loader, seed=seed))
        else:
            dealing: dict[str, int] = trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
            world = dealing["num_replicas"] if trainer._accelerator_connector.use_distributed_sampler else 1
            made = resumable(deal(loader, dealing["rank"] if world > 1 else 0, world, seed), seed=seed)
        size_as_saved(made, self._path, trainer.world_size, name)
        return made


class _Unsized:
    """A loader without a length, which Lightning reads one batch ahead of the loop."""

    def __init__(self, loader: ResumableLoader) -> None:
        self.ahead = Ahead(loader)

    def __iter__(self) -> Any:
        return iter(self.ahead)

    @property
    def epoch(self) -> int:
        """The one under way, or the one that comes next."""
        return self.ahead.loader.epoch

    @property
    def dataset(self) -> Any:
        """Lightning looks whether it has a length."""
        return self.ahead.loader.dataset


def _names(count: int) -> list[str]:
    return ["loader"] if count == 1 else [f"loader{at}" for at in range(count)]
