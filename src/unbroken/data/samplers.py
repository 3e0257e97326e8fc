"""Samplers of any other make: iterated on isolated random streams, and replayed by index to get back to a position.

Nobody knows what such a sampler keeps between epochs, so a resumed one is taken through all of them again: indices
only, no sample is fetched. A `state_dict` of its own is not used: it would say where the sampler is, ahead of the loop
by what was prefetched, and nothing in it proves that it is all of the sampler's state.
The position counts what the sampler gave: batches for a batch sampler, samples otherwise. It is this rank's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from unbroken.data.seeding import Isolated, Purpose, mix

_CHUNK = 1024


class CustomSampler:
    """One sampler with what it was put through so far. On the training thread only."""

    def __init__(self, sampler: Iterable[Any]) -> None:
        self._sampler = sampler
        self._broken_off: list[list[int]] = []
        """[epoch, taken, moved on] of each pass that did not end: how much was taken of it, prefetch included, and
        whether the loop then went to the next epoch."""
        self._taken = 0
        self._used = False
        self._behind = False
        """An earlier process took its sampler further than this one."""

    @property
    def used(self) -> bool:
        """Whether it was iterated in this process, so that its hidden state is no longer that of a new one."""
        return self._used

    def history(self) -> list[list[int]]:
        return [list(entry) for entry in self._broken_off]

    def adopt(self, history: list[list[int]]) -> None:
        """Continue an earlier process with this history; the replay happens at the next pass."""
        self._broken_off = [list(entry) for entry in history]
        self._behind = True

    def begin(self, seed: int, epoch: int, position: int) -> CustomPass:
        """A pass over `epoch` from `position` on."""
        if self._behind:
            self._replay(seed, epoch)
        self._used, self._taken = True, position
        fresh = CustomPass(self, seed, epoch)
        fresh.skip(position)
        return fresh

    def break_off(self, epoch: int, *, moved_on: bool) -> None:
        """The pass over `epoch` ends here, unfinished."""
        self._broken_off.append([epoch, self._taken, int(moved_on)])

    def count(self, items: int) -> None:
        self._taken += items

    def _replay(self, seed: int, epoch: int) -> None:
        self._behind = False
        for past in range(epoch + 1):
            entries = [entry for entry in self._broken_off if entry[0] == past]
            for _, taken, _ in entries:
                CustomPass(self, seed, past).skip(taken)
            if past < epoch and not any(moved_on for _, _, moved_on in entries):
                CustomPass(self, seed, past).skip(None)


class CustomPass:
    """One iteration of a sampler, a few items at a time: it may be endless, and may learn from the loop as it goes."""

    def __init__(self, owner: CustomSampler, seed: int, epoch: int) -> None:
        self._owner = owner
        sampler = owner._sampler
        parts = list(_with_inner_samplers(sampler))
        self._streams = Isolated(mix(Purpose.SAMPLER, seed, epoch), _generators_of(parts))
        with self._streams:
            for part in parts:
                if callable(getattr(part, "set_epoch", None)):
                    part.set_epoch(epoch)
            self._items: Iterator[Any] = iter(sampler)

    def skip(self, items: int | None) -> None:
        """Take and forget `items` items, or all that are left."""
        left = items
        while left is None or left > 0:
            wanted = _CHUNK if left is None else min(_CHUNK, left)
            if len(self._next(wanted)) < wanted:
                return
            left = None if left is None else left - wanted

    def take(self, items: int) -> list[Any]:
        """The next `items` items, fewer at the end."""
        taken = self._next(items)
        self._owner.count(len(taken))
        return taken

    def _next(self, items: int) -> list[Any]:
        with self._streams:
            return list(islice(self._items, items))


def world_of(sampler: Iterable[Any]) -> int:
    """How many ranks the sampler deals to: what it says, else the job's world size."""
    for part in _with_inner_samplers(sampler):
        replicas = getattr(part, "num_replicas", None)
        if isinstance(replicas, int):
            return replicas
    return job_world_size()


def job_world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def job_rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _with_inner_samplers(sampler: Any) -> Iterator[Any]:
    """A sampler and those it wraps."""
    seen: list[Any] = []
    queue = [sampler]
    while queue and len(seen) < 16:
        part = queue.pop(0)
        if part is None or any(part is other for other in seen):
            continue
        seen.append(part)
        queue += [getattr(part, name, None) for name in ("sampler", "batch_sampler", "base_sampler")]
    return iter(seen)


def _generators_of(parts: list[Any]) -> list[torch.Generator]:
    found: list[torch.Generator] = []
    for part in parts:
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator) and not any(generator is other for other in found):
            found.append(generator)
    return found
