"""The training loader of a Trainer, put onto one that knows its position.

The Trainer would hand its loader to Accelerate, which deals batches to the ranks and draws the order from random
streams as it goes. Ours deals samples, by (seed, epoch); the Trainer moves batches to the device itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from accelerate.data_loader import IterableDatasetShard
from torch.utils.data import DataLoader, IterableDataset

from unbroken.data.loader import ResumableLoader, resumable
from unbroken.errors import UsageError
from unbroken.integrations.dealing import deal, loader_like


def training_loader(trainer: Any, make: Callable[[], Any]) -> ResumableLoader:
    """The loader that `make`, the Trainer's own `get_train_dataloader`, makes, with an exact position.

    Raises UsageError for one that cannot have it.
    """
    with _unprepared(trainer.accelerator):
        made = make()
    if isinstance(made, ResumableLoader):
        return made
    if not isinstance(made, DataLoader):
        raise UsageError(f"the Trainer's training loader is a {type(made).__name__}, not a torch DataLoader")
    args = trainer.args
    seed = args.seed if args.data_seed is None else args.data_seed
    if isinstance(made.dataset, IterableDataset):
        return resumable(_share_of(made, args.process_index, args.world_size), seed=seed)
    return resumable(deal(made, args.process_index, args.world_size, seed), seed=seed)


def _share_of(loader: DataLoader[Any], rank: int, world: int) -> DataLoader[Any]:
    """The same of what is only iterated: each rank reads all, and keeps its part of each round of batches."""
    if world == 1 or loader.batch_size is None:
        return loader
    shard = IterableDatasetShard(loader.dataset, loader.batch_size, loader.drop_last, world, rank)
    return loader_like(loader, shard, batch_size=loader.batch_size, drop_last=loader.drop_last)


@contextmanager
def _unprepared(accelerator: Any) -> Iterator[None]:
    """Let `accelerator.prepare` leave loaders as they are."""
    accelerator.prepare = lambda *objects, **_: objects[0] if len(objects) == 1 else objects
    try:
        yield
    finally:
        del accelerator.prepare


class EpochLoader:
    """What the Trainer iterates: one pass an epoch, which it leaves after the last batch without asking for more."""

    def __init__(self, loader: ResumableLoader) -> None:
        self._loader = loader
        self._batches: Iterator[Any] = iter(())
        self._ahead: Iterator[Any] | None = None
        self._is_at_end = False

    @property
    def resumable(self) -> ResumableLoader:
        """The loader itself."""
        return self._loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self._is_at_end = False
        self._batches = self._ahead if self._ahead is not None else iter(self._loader)
        self._ahead = None
        return self._batches

    def has_more(self) -> bool:
        """Whether the epoch under way has another batch. Takes it, for the next pass."""
        batches = iter(self._loader)
        for first in batches:
            self._ahead = chain([first], batches)
            return True
        self._is_at_end = True
        return False

    def leave_epoch(self) -> None:
        """The next pass is of the next epoch, whatever is left of this one."""
        for _ in iter(self._loader) if not self._is_at_end else ():
            break

    def close(self) -> None:
        """Let go of what is under way, and its workers: the Trainer keeps hold of this loader."""
        self._batches, self._ahead = iter(()), None

    def end_pass(self) -> None:
        """The epoch is over: let the loader know, if its last batch was taken."""
        for _ in self._batches:
            raise UsageError("the training loader has more batches in an epoch than its length said")

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # not yet set: do not look for it in itself
            raise AttributeError(name)
        return getattr(self._loader, name)
