"""Batches of an iterable data set from a position on: by the data set's own state where that is exact, else by replay.

The position counts batches that this rank's loop has had. With the data set's `state_dict` (or its iterator's) the
state holds one for each worker, as of that worker's last batch in the loop. Without, the first batches are read again
and dropped, with a warning that says how many. Randomness is per item (`items.py`), so neither way moves it.
A data set that keeps something from one epoch to the next must say so in `state_dict`, or be told by `set_epoch`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from unbroken.data.feed import Delivered
from unbroken.data.hugging_face import runs_functions_on_threads, state_is_exact
from unbroken.data.inner import build_inner
from unbroken.data.items import Carried, SeededItems, Start
from unbroken.data.samplers import job_rank, job_world_size
from unbroken.data.seeding import Preserved, Purpose, mix
from unbroken.errors import StateMismatch

_logger = logging.getLogger("unbroken.data")


class IterableFeed:
    """The feed of a loader over an iterable data set."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._workers = loader.num_workers
        self._by_state = state_is_exact(loader.dataset)
        if self.rank() == 0 and runs_functions_on_threads(loader.dataset):
            _logger.warning(
                "functions mapped over data sets that are then interleaved run on several threads at once: random "
                "numbers they draw cannot be repeated; map after interleaving if they draw any"
            )
        self._items: SeededItems | None = None
        self._inner: DataLoader[Any] | None = None
        self._generator = torch.Generator()
        self._states: dict[int, dict[str, Any]] = {}
        """By worker, as of its last batch in the loop."""
        self._next_worker = 0
        self._restored = False
        """The next iteration starts from `_states`: no batch was had since they were loaded."""
        self._rotated = False
        """Process 0 plays another worker than 0 in this iteration, as `next_worker` was not 0 at the checkpoint."""

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "iterable",
            "dataset": type(self._loader.dataset).__qualname__,
            "world": job_world_size(),
            "num_workers": self._workers,
            "batch_size": self._loader.batch_size,
            "next_worker": self._next_worker,
            "workers": self._worker_states(),
        }

    def _worker_states(self) -> list[dict[str, Any] | None]:
        if self._workers == 0 and self._by_state and self._items is not None and not self._restored:
            return [self._items.live_state()]  # nothing is prefetched here: the data set is where the loop is
        return [self._states.get(worker) for worker in range(max(self._workers, 1))]

    def adopt(self, state: Mapping[str, Any]) -> list[str]:
        name = type(self._loader.dataset).__qualname__
        if state["dataset"] != name:
            raise StateMismatch(f"the data set is {name} and the checkpoint was saved with {state['dataset']}")
        live = {"num_workers": self._workers, "world": job_world_size(), "batch_size": self._loader.batch_size}
        changed = [what for what, value in live.items() if state[what] != value]
        if changed and state["position"] > 0:
            what = changed[0]
            raise StateMismatch(
                f"{what} is {live[what]} and was {state[what]} at the checkpoint: in the middle of an epoch of an "
                f"iterable data set ({name}) the position holds for that {what} only; start with {what}={state[what]}"
            )
        warnings = [f"{what} is {live[what]} and was {state[what]} at the checkpoint" for what in changed]
        self._states = {} if changed else {n: said for n, said in enumerate(state["workers"]) if said is not None}
        self._next_worker = 0 if changed else state["next_worker"]
        self._restored = True
        self._inner = None
        return warnings

    def start(self, seed: int, epoch: int, position: int) -> Iterator[Delivered]:
        inner, items = self._built()
        states = self._states if self._restored and self._by_state else {}
        by_state = any("dataset" in said or "iterator" in said for said in states.values())
        self._rotated = by_state and position > 0 and self._next_worker > 0
        items.begin(epoch, Start(seed, dict(states) if by_state else {}, self._next_worker if self._rotated else 0))
        # Workers that persist were seeded once, wherever the job was started; so their base seed must not tell epochs.
        self._generator.manual_seed(mix(Purpose.WORKERS, seed, 0 if inner.persistent_workers else epoch))
        with Preserved():
            batches = iter(inner)
        return self._deliver(batches, epoch, position, replayed=0 if by_state else position)

    def _built(self) -> tuple[DataLoader[Any], SeededItems]:
        if self._inner is None or self._items is None:
            loader = self._loader
            self._items = SeededItems(
                loader.dataset,
                loader.collate_fn,
                loader.batch_size,
                loader.drop_last,
                workers=self._workers,
                carries_state=self._by_state,
                shared_epoch=loader.persistent_workers,
            )
            self._inner, self._generator = build_inner(loader, self._items)
        return self._inner, self._items

    def _deliver(self, batches: Iterator[Carried], epoch: int, position: int, replayed: int) -> Iterator[Delivered]:
        if replayed and self.rank() == 0:
            _logger.warning(
                "reading %d batches of epoch %d again to come back to where the checkpoint was saved; "
                "give %s state_dict() and load_state_dict() to go there directly",
                replayed,
                epoch,
                type(self._loader.dataset).__qualname__,
            )
        while (carried := self._next(batches)) is not None:
            if carried.state is not None:
                self._states[carried.worker] = carried.state
                self._next_worker = (carried.worker + 1) % max(self._workers, 1)
            if not carried.batch:
                continue
            if replayed:
                replayed -= 1
                continue
            position += 1
            self._restored = False
            yield Delivered(carried.batch.pop(), position, [position - 1])

    def _next(self, batches: Iterator[Carried]) -> Carried | None:
        try:
            if self._workers > 0:
                return next(batches)
            with Preserved():
                return next(batches)
        except StopIteration:
            return None

    def finished(self, epoch: int) -> None:
        self._restored = False
        if self._workers == 0 and self._items is not None:
            self._items.rest()
        self._next_worker = 0
        if not self._loader.persistent_workers:
            self._states = {}  # the next epoch's workers are new copies of the data set in this process
            return
        self._states = {worker: _at_epoch_edge(said) for worker, said in self._states.items()}
        if self._rotated:
            # Process 0 played another worker; the next epoch begins with worker 0, so it needs other processes.
            self._restart_workers()

    def abandoned(self, epoch: int, *, moved_on: bool) -> None:
        if self._workers == 0:
            if moved_on and self._items is not None:
                self._items.rest()
            return
        if moved_on:
            self._states, self._next_worker, self._restored = {}, 0, False
        # What a worker prefetched has moved its data set past the loop: start from copies of this process's.
        self._restart_workers()

    def _restart_workers(self) -> None:
        self._inner = None
        self._restored = self._restored or bool(self._states)

    def rank(self) -> int:
        return job_rank()

    def batches(self) -> int:
        return len(self._loader)

    def micro_batches(self) -> int:
        return 1

    def batch_size(self) -> int | None:
        return self._loader.batch_size


def _at_epoch_edge(said: dict[str, Any]) -> dict[str, Any]:
    """A worker's state at an epoch's end as the state it begins the next one with."""
    return {**{key: value for key, value in said.items() if key != "iterator"}, "items": 0, "ended": False}
