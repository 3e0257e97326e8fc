"""The resumable loader: a torch DataLoader that knows its position and can be put back to it, bit for bit.

`resumable(loader)` gives a `ResumableLoader`, which is iterated like the DataLoader it was made from. Order and
randomness come from (seed, epoch, sample); the global random streams are never moved, neither by iter() nor by next().

What counts is what the loop has had: a batch is consumed when the loop receives it, whatever was prefetched.
- State saved in the loop's body after an epoch's last batch: the first loop of the resumed job has no batches left, and
  ends at once, so that what the script does between epochs happens as in the run before.
- State saved after the loop ended: the next epoch, at its beginning.
- A loop left by `break`: the next iter() begins the next epoch, as with torch. In a resumed job the first iter() goes
  on in the middle of the epoch. An iteration that gave no batch does not count.
"""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, IterDataPipe

from unbroken.data.cursor import WhenRanksChange
from unbroken.data.feed import Delivered, Feed
from unbroken.data.iterable import IterableFeed
from unbroken.data.mapstyle import MapFeed
from unbroken.errors import StateMismatch, UsageError

_logger = logging.getLogger("unbroken.data")
_FORMAT = 1
_BATCHES_REMEMBERED = 1024
"""Batches whose sample ids wait for `drain_samples`; older ones are forgotten, so that nobody has to call it."""


def resumable(
    loader: DataLoader[Any], *, seed: int | None = None, when_ranks_change: WhenRanksChange = "batch"
) -> ResumableLoader:
    """`loader` with an exact position.

    seed  of order and augmentation; by default the DistributedSampler's, else the generator's that the loader or its
          sampler was given, else `torch.initial_seed()`. A restored state's seed takes its place.

    when_ranks_change  how the global batch stays what it was when a checkpoint of another number of ranks is restored:
          "batch" changes the batch size per rank; "accumulate" leaves it, and `micro_batches` tells how many batches
          the script is to accumulate; "refuse" ends with StateMismatch

    Options, data set, sampler and collate function are the loader's. Its own iteration is not used any more.
    Raises UsageError for what cannot be resumed exactly this way: another kind of loader, or a DataPipe.
    """
    _check_kind(loader)
    if when_ranks_change not in get_args(WhenRanksChange):
        raise UsageError(f'when_ranks_change={when_ranks_change!r}: give "batch", "accumulate" or "refuse"')
    iterable = isinstance(loader.dataset, IterableDataset)
    if iterable and when_ranks_change != "batch":
        raise UsageError("an iterable data set divides itself among ranks: leave when_ranks_change out")
    feed: Feed = IterableFeed(loader) if iterable else MapFeed(loader, when_ranks_change)
    made = ResumableLoader(loader, feed, _default_seed(loader) if seed is None else seed)
    made._settings = {"seed": seed, "when_ranks_change": when_ranks_change}
    return made


class ResumableLoader:
    """A DataLoader's batches, from any position on. Made by `resumable`; one iteration at a time, on one thread.

    Attributes that are not its own (`dataset`, `sampler`, `num_workers`, `collate_fn`, …) are the wrapped loader's.
    """

    def __init__(self, loader: DataLoader[Any], feed: Feed, seed: int) -> None:
        self._loader = loader
        self._feed = feed
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._iteration = 0
        """Which iteration is the current one; an older one may not go on."""
        self._open = False
        self._given = 0
        """Batches of the current iteration that the loop has had."""
        self._loaded: dict[str, Any] | None = None
        self._samples: deque[list[Any]] = deque(maxlen=_BATCHES_REMEMBERED)
        self._settings: dict[str, Any] = {}
        """What `resumable` was asked for."""

    @property
    def wrapped(self) -> DataLoader[Any]:
        """The loader that `resumable` was given."""
        return self._loader

    def over(self, loader: DataLoader[Any]) -> ResumableLoader:
        """The same settings over another loader, from its beginning: for frameworks that make loaders anew."""
        return resumable(loader, **self._settings)

    @property
    def micro_batches(self) -> int:
        """How many batches make up one of the run as it began: 1, or more once `when_ranks_change="accumulate"` made up
        for ranks that are gone. A script that accumulates k batches anyway accumulates k times as many."""
        return self._feed.micro_batches()

    @property
    def epoch(self) -> int:
        """The epoch under way, or between two the one that comes next; counted from 0."""
        return self._epoch

    @property
    def seed(self) -> int:
        """What order and randomness derive from."""
        return self._seed

    @property
    def batch_size(self) -> int | None:
        """Samples per batch on this rank. Another than configured if a restore kept the global batch on other ranks."""
        return self._feed.batch_size()

    def __len__(self) -> int:
        """Batches in a whole epoch on this rank, wherever in it the loader is."""
        return self._feed.batches()

    def __iter__(self) -> Iterator[Any]:
        """The rest of the epoch under way if it was just restored, else a new epoch. Starts the workers."""
        if self._open:
            moved_on = self._given > 0
            self._feed.abandoned(self._epoch, moved_on=moved_on)
            if moved_on:
                self._epoch, self._position = self._epoch + 1, 0
        self._iteration += 1
        self._open, self._given, self._loaded = True, 0, None
        deliveries = self._feed.start(self._seed, self._epoch, self._position)
        return self._hand_out(deliveries, self._iteration)

    def _hand_out(self, deliveries: Iterator[Delivered], iteration: int) -> Iterator[Any]:
        while (delivered := self._receive(deliveries, iteration)) is not None:
            yield delivered.take()
        self._feed.finished(self._epoch)
        self._epoch, self._position = self._epoch + 1, 0
        self._open, self._given = False, 0

    def _receive(self, deliveries: Iterator[Delivered], iteration: int) -> Delivered | None:
        if iteration != self._iteration:
            raise UsageError(
                "this iteration over the loader is over: another was begun, or a state was loaded; a resumable loader "
                "has one position, so use one iteration at a time"
            )
        delivered = next(deliveries, None)
        if delivered is not None:
            self._position = delivered.position
            self._given += 1
            self._samples.append(delivered.ids)
        return delivered

    def state_dict(self) -> dict[str, Any]:
        """Seed, epoch, position, and what they hold for: plain values, equal on all ranks with DistributedSampler."""
        if self._loaded is not None:
            return copy.deepcopy(self._loaded)
        own = {"format": _FORMAT, "seed": self._seed, "epoch": self._epoch, "position": self._position}
        return {**own, **self._feed.describe()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state_dict` was called. The next iter() does; a loop under way may not go on.

        The global batch is kept: on another number of ranks the batch size per rank changes with it, with a warning,
        unless the script changed it. Raises StateMismatch, having changed nothing, if the state is of other data, of
        another kind of sampler, or cannot be continued on this number of ranks or workers.
        """
        kind = self._feed.describe()["kind"]
        if state.get("format") != _FORMAT or state.get("kind") != kind:
            raise StateMismatch(
                f"this is no state of a resumable loader over {'an iterable' if kind == 'iterable' else 'a map-style'} "
                f"data set (format {state.get('format')!r}, kind {state.get('kind')!r}); load what state_dict() gave"
            )
        place: list[Any] = [state.get(name) for name in ("seed", "epoch", "position")]
        if not all(type(number) is int for number in place) or min(place[1:]) < 0:
            raise StateMismatch(f"seed, epoch and position of a loader's state are whole numbers, not {place}")
        taken = copy.deepcopy(dict(state))
        warnings = self._feed.adopt(taken)
        for warning in warnings if self._feed.rank() == 0 else []:
            _logger.warning("%s", warning)
        self._loaded = taken
        self._seed, self._epoch, self._position = taken["seed"], taken["epoch"], taken["position"]
        self._iteration += 1
        self._open, self._given = False, 0
        self._samples.clear()

    def set_epoch(self, epoch: int) -> None:
        """Accepted and not needed, as a sampler's: the epoch is part of the position, see `epoch`."""

    def drain_samples(self) -> list[Any]:
        """Indices of the samples consumed since the last call, in order; for an iterable data set the numbers of the
        batches in their epoch. Nobody has to call it: at most the last 1024 batches are remembered."""
        ids = [index for batch in self._samples for index in batch]
        self._samples.clear()
        return ids

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # not yet set: do not look for it in itself
            raise AttributeError(name)
        return getattr(self._loader, name)


def _check_kind(loader: Any) -> None:
    if isinstance(loader, ResumableLoader):
        raise UsageError("this loader is resumable already; use it as it is")
    if not isinstance(loader, DataLoader):
        raise UsageError(
            f"resumable() takes a torch DataLoader, not {type(loader).__name__}; if that is a framework's wrapper, "
            "pass the DataLoader that it was made from, or see unbroken.integrations"
        )
    if isinstance(loader.dataset, IterDataPipe):
        raise UsageError("DataPipes cannot be resumed exactly; give the DataLoader a Dataset or an IterableDataset")
    kind = type(loader)
    stateful = any(base.__module__.startswith("torchdata.stateful_dataloader") for base in kind.__mro__)
    own = [
        name
        for name in ("__iter__", "_get_iterator")
        if getattr(kind, name) is not getattr(DataLoader, name) and not (stateful and _is_torchdatas(kind, name))
    ]
    if own:
        raise UsageError(
            f"{kind.__name__} has its own {own[0]}, which resumable() cannot put back to a position; pass the plain "
            "DataLoader it was made from, and wrap the result"
        )


def _is_torchdatas(kind: type, name: str) -> bool:
    """Whether `name` is what torchdata's StatefulDataLoader defines. Its options are a DataLoader's; our position is
    used instead of its own, which holds for one number of workers and leaves out their random streams."""
    return str(getattr(getattr(kind, name), "__module__", "")).startswith("torchdata.stateful_dataloader")


def _default_seed(loader: DataLoader[Any]) -> int:
    sampler = loader.sampler
    for part in (sampler, getattr(loader.batch_sampler, "sampler", None)):
        if isinstance(part, DistributedSampler):
            return int(part.seed)
    for generator in (getattr(sampler, "generator", None), loader.generator):
        if isinstance(generator, torch.Generator):
            return generator.initial_seed()
    return torch.initial_seed()
