"""An iterable data set whose every item is seeded by (seed, epoch, worker, number of the item).

`SeededItems` runs where the items are read: in the main process, or as a copy in each worker. It puts the batches
together there, as torch's loader would, and can say with each batch where its data set is, so that the position that
counts is that of the batch the loop has, whatever was prefetched.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory

from unbroken.data.seeding import Purpose, mix, seed_all


@dataclass(slots=True)
class Carried:
    """What the inner loader hands over: a batch, or (`batch` empty) only the news that a worker is done."""

    worker: int
    state: dict[str, Any] | None
    """Where this worker's data set is after the batch; None if it does not say."""
    batch: list[Any]
    """The batch, once; empty at a worker's end."""

    def pin_memory(self, device: Any = None) -> Carried:
        """Called by the loader's pinning thread: the batch goes to pinned memory, the state stays as it is."""
        self.batch = [pin_memory(batch, device) for batch in self.batch]  # type: ignore[no-untyped-call]
        return self


@dataclass(slots=True)
class Start:
    """Where the next iteration begins."""

    seed: int
    states: dict[int, dict[str, Any]]
    """By worker. One with `items` > 0 is in mid-epoch; with 0 it is of the end of the epoch before."""
    first_worker: int = 0
    """Whose turn it is to give the first batch. torch asks process 0 first, so process 0 plays this worker."""


class SeededItems(IterableDataset[Carried]):
    """The user's data set, read by batch. Picklable if the data set and the collate function are."""

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[Any], Any],
        batch_size: int | None,
        drop_last: bool,
        workers: int,
        carries_state: bool,
        shared_epoch: bool,
    ) -> None:
        self.dataset = dataset
        self._collate_fn = collate_fn
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._workers = workers
        self._carries_state = carries_state
        # Workers that persist get no copy of a later epoch's number; they read it from here.
        self._epoch = torch.zeros(1, dtype=torch.int64)
        if shared_epoch:
            self._epoch.share_memory_()  # type: ignore[no-untyped-call]
        self._start = Start(seed=0, states={})
        self._iterator: Any = None
        self._items = 0
        self._ended = False

    def begin(self, epoch: int, start: Start) -> None:
        """What the next iter() is to do. In the main process, before workers are started or resumed."""
        self._epoch[0] = epoch
        self._start = start

    def identity_of(self, process: int) -> int:
        """Which worker a worker process is, to the data set: the first process gives the first batch."""
        return (process + self._start.first_worker) % self._workers

    def live_state(self) -> dict[str, Any]:
        """Where the data set is now, in this process. The caller may keep it: nothing in it is shared."""
        state: dict[str, Any] = {"items": self._items, "ended": self._ended}
        if is_stateful(self.dataset):
            state["dataset"] = copy.deepcopy(self.dataset.state_dict())
        if is_stateful(self._iterator) and self._iterator is not self.dataset:
            state["iterator"] = copy.deepcopy(self._iterator.state_dict())
        return state

    def rest(self) -> None:
        """Between two epochs: the data set keeps what it keeps, the iteration is over."""
        self._iterator, self._items, self._ended = None, 0, False

    def __iter__(self) -> Iterator[Carried]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        in_worker = info is not None
        # Popped: a worker that persists starts its next epoch from where its data set then is.
        self._open(worker, self._start.states.pop(worker, None))
        while not self._ended:
            samples = self._read_batch(worker)
            if not samples or (self._drop_last and len(samples) < (self._batch_size or 1)):
                break
            batch = self._collate_fn(samples if self._batch_size is not None else samples[0])
            del samples
            carried = Carried(worker, self._state_to_carry(in_worker), [batch])
            del batch
            yield carried
            del carried
        self._iterator = None
        if in_worker and self._carries_state:
            # The end, too, moves a data set (it may count its epochs): the last word is said after it.
            yield Carried(worker, self._state_to_carry(in_worker), [])

    def _state_to_carry(self, in_worker: bool) -> dict[str, Any] | None:
        return self.live_state() if in_worker and self._carries_state else None

    def _open(self, worker: int, saved: dict[str, Any] | None) -> None:
        epoch = int(self._epoch[0])
        mid_epoch = saved is not None and saved["items"] > 0
        # A data set may take set_epoch as "begin anew": in mid-epoch its state comes after that, as in the run before.
        if mid_epoch:
            _set_epoch(self.dataset, epoch)
        if saved is not None and saved.get("dataset") is not None:
            self.dataset.load_state_dict(copy.deepcopy(saved["dataset"]))
        if not mid_epoch:
            _set_epoch(self.dataset, epoch)
        self._items, self._ended = (saved["items"], saved["ended"]) if saved is not None else (0, False)
        if self._ended:
            return
        seed_all(mix(Purpose.ITEM, self._start.seed, epoch, worker, self._items))
        self._iterator = iter(self.dataset)
        if saved is not None and saved.get("iterator") is not None:
            self._iterator.load_state_dict(copy.deepcopy(saved["iterator"]))

    def _read_batch(self, worker: int) -> list[Any]:
        epoch, samples = int(self._epoch[0]), []
        for _ in range(1 if self._batch_size is None else self._batch_size):
            self._items += 1
            seed_all(mix(Purpose.ITEM, self._start.seed, epoch, worker, self._items))
            try:
                samples.append(next(self._iterator))
            except StopIteration:
                self._ended = True
                break
        return samples


def is_stateful(thing: Any) -> bool:
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


def _set_epoch(dataset: Any, epoch: int) -> None:
    if callable(getattr(dataset, "set_epoch", None)):
        dataset.set_epoch(epoch)
