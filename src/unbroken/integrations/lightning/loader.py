"""A training loader as Lightning's loop takes it, with the position that the loop is at.

Lightning begins an epoch with `iter`, also where nothing is left of one that was restored; it does not ask a loader
with a length for a batch after the last; and of one without a length it holds a batch back, to know which is the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

from unbroken.data.loader import ResumableLoader, resumable
from unbroken.errors import UsageError


class EpochLoader:
    """One pass is one epoch. Workers start with the first batch that is asked for, not with `iter`."""

    def __init__(self, loader: ResumableLoader) -> None:
        self._loader = loader
        self._is_sized = _has_length(loader)
        self._given = False
        """Whether the pass under way gave a batch."""
        self._exhausted = False
        """The pass under way has ended, before the epoch: the loop goes on with other loaders."""
        self._ended = False
        """It was restored so. After a pass that only finds the end of its epoch, the next one gives batches."""
        self._leaves = False
        """The next pass is of the next epoch, though this one gave nothing."""
        self._before: dict[str, Any] | None = None
        """Where the loop is: before the newest batch, which is held back. For a loader without a length."""
        self._samples: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        if self._ended and not self._leaves:
            return iter(())
        return self._pass()

    def _pass(self) -> Iterator[Any]:
        if self._leaves and not self._exhausted:
            self._leave()
        self._given = self._exhausted = self._ended = self._leaves = False
        batches = iter(self._loader)
        while batch := self._next(batches):
            self._given = True
            yield batch.pop()  # no frame keeps a batch alive beside the loop
        self._exhausted = True

    def _next(self, batches: Iterator[Any]) -> list[Any]:
        """The next batch, if there is one."""
        if not self._is_sized:
            self._samples += self._loader.drain_samples()
            self._before = self._loader.state_dict()
        return list(islice(batches, 1))

    def _leave(self) -> None:
        """Go to the next epoch, whatever is left of this one."""
        for _ in self._loader:
            break
        self._loader.drain_samples()

    def end_epoch(self) -> None:
        """The loop's epoch is over: the next pass is of the next one."""
        self._leaves = not self._given

    def state_dict(self) -> dict[str, Any]:
        """The position of the loop."""
        if self._before is not None:  # the loop has not seen the end yet
            return {"exhausted": False, "loader": self._before}
        return {"exhausted": self._exhausted, "loader": self._loader.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state_dict` was called. Raises StateMismatch as `ResumableLoader.load_state_dict` does."""
        self._loader.load_state_dict(state["loader"])
        self._exhausted = self._ended = state["exhausted"]
        self._before, self._given, self._leaves = None, False, False
        self._samples.clear()

    def drain_samples(self) -> list[Any]:
        """Indices of the samples that the loop has had since the last call."""
        if self._is_sized:
            return self._loader.drain_samples()
        samples, self._samples = self._samples, []
        return samples

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # not yet set: do not look for it in itself
            raise AttributeError(name)
        return getattr(self._loader, name)


def unwrapped(loader: object) -> DataLoader[Any]:
    """The DataLoader that Lightning may deal to the ranks, whether the script made it resumable or not.

    Raises UsageError for anything else.
    """
    if isinstance(loader, ResumableLoader):
        return loader.wrapped
    if not isinstance(loader, DataLoader):
        raise UsageError(
            f"train_dataloaders: a {type(loader).__name__} cannot be resumed exactly; give torch DataLoaders"
        )
    return loader


def epoch_loader(given: object, dealt: Any) -> EpochLoader:
    """What Lightning made of the script's loader, with a position. Raises UsageError as `resumable` does."""
    return EpochLoader(given.over(dealt) if isinstance(given, ResumableLoader) else resumable(dealt))


def _has_length(loader: ResumableLoader) -> bool:
    try:
        len(loader)
    except (TypeError, NotImplementedError):
        return False
    return True
