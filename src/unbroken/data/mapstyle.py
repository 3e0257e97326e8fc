"""Batches of a map-style data set from a position on: an order of indices, cut into keys, fetched by the inner loader.

No sample before the position is fetched. The keys say all that a batch's content and randomness depend on, so the inner
loader and its workers need no state, and batches arrive in the order in which their keys were sent.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from unbroken.data.cursor import BatchSizes, WhenRanksChange, batch_spans, count_batches, fit_batch_size, share_of
from unbroken.data.dataset import BatchKey, SeededDataset
from unbroken.data.feed import Delivered
from unbroken.data.inner import build_inner
from unbroken.data.orders import Order, known_order, take
from unbroken.data.samplers import CustomSampler, job_rank, job_world_size, world_of
from unbroken.data.seeding import Preserved, Purpose, mix
from unbroken.errors import StateMismatch, UsageError

_logger = logging.getLogger("unbroken.data")

Sent = deque[tuple[int, list[Any]]]
"""Of each key on its way: the position after its batch, and its samples."""
_POSITIONS_PER_BATCH = 1 << 32


class MapFeed:
    """The feed of a loader over a map-style data set."""

    def __init__(self, loader: DataLoader[Any], when_ranks_change: WhenRanksChange = "batch") -> None:
        self._loader = loader
        self._when_ranks_change = when_ranks_change
        self._micro_batches = 1
        sampler, size, drop_last = _what_to_sample(loader)
        self._sampler = sampler
        self._configured_size = size
        self._size = size
        self._drop_last = drop_last
        self._batched = loader.batch_sampler is not None
        self._order: Order | None = None if self._samples_in_batches() else known_order(sampler)
        self._custom = None if self._order is not None else CustomSampler(sampler)
        self._keys = _Keys()
        self._inner: DataLoader[Any] | None = None
        self._generator = torch.Generator()

    def _samples_in_batches(self) -> bool:
        """Whether the sampler is a batch sampler that cuts batches as it likes."""
        return self._batched and self._configured_size is None

    # What is saved, and what is taken back.

    def describe(self) -> dict[str, Any]:
        said: dict[str, Any] = {
            "kind": "map",
            "sampler": self._sampler_kind(),
            "dataset_length": _length(self._loader.dataset),
            "order_length": _length(self._sampler) if self._order is None else self._order.length(),
            "world": self._world(),
            "batch_size": self._configured_size,
            "global_batch": None if self._size is None else self._size * self._world() * self._micro_batches,
        }
        if self._custom is not None:
            said["broken_off"] = self._custom.history()
        return said

    def adopt(self, state: Mapping[str, Any]) -> list[str]:
        self._check_same_data(state)
        world, warnings = self._world(), []
        size, micro_batches = self._size, 1
        if self._custom is not None:
            self._check_custom(state, world)
        if self._configured_size is not None and state["global_batch"] is not None:
            saved = BatchSizes(state["batch_size"], state["world"], state["global_batch"])
            fitted = fit_batch_size(saved, self._configured_size, world, self._when_ranks_change)
            size, micro_batches = fitted.size, fitted.micro_batches
            warnings += [fitted.warning] if fitted.warning else []
        elif self._configured_size is None and state["world"] != world:
            warnings.append(
                f"batches are not the loader's to size: {world} ranks now read what {state['world']} read before, and "
                "the global batch changes with them"
            )
        self._size, self._micro_batches = size, micro_batches
        if self._custom is not None:
            self._custom.adopt(state["broken_off"])
        return warnings

    def _check_same_data(self, state: Mapping[str, Any]) -> None:
        live = self.describe()
        if live["sampler"] != state["sampler"]:
            raise StateMismatch(
                f"the loader's sampler is {live['sampler']} and the checkpoint was saved with {state['sampler']}; "
                "their orders differ, so give the loader the same kind of sampler"
            )
        for what, name in (("dataset_length", "data set"), ("order_length", "sampler")):
            if live[what] != state[what]:
                raise StateMismatch(
                    f"the {name} has {live[what]} samples and had {state[what]} when the checkpoint was saved; "
                    "an epoch cannot go on over other data"
                )

    def _check_custom(self, state: Mapping[str, Any], world: int) -> None:
        assert self._custom is not None
        if state["world"] != world:
            raise StateMismatch(
                f"{name_of(self._sampler)} was saved on {state['world']} ranks and runs on {world}: each rank keeps "
                "its own place in it, so start as many ranks as before, or use torch's DistributedSampler"
            )
        if self._custom.used:
            raise UsageError(
                f"{name_of(self._sampler)} has been iterated already and cannot be taken back; restore before the "
                "first iteration, or build the sampler and the loader anew"
            )

    def _sampler_kind(self) -> str:
        return name_of(self._sampler) if self._order is None else self._order.kind

    def _world(self) -> int:
        return world_of(self._sampler) if self._order is None else self._order.world

    # Batches.

    def start(self, seed: int, epoch: int, position: int) -> Iterator[Delivered]:
        sent: Sent = deque()
        if self._order is None:
            keys = self._custom_keys(seed, epoch, position, sent)
        else:
            self._warn_if_every_rank_reads_everything(self._order)
            if self._count_left(self._order, position) == 0:
                return iter(())  # no worker is started to say that an epoch is over
            keys = self._known_keys(self._order, seed, epoch, position, sent)
        if self._inner is None:
            dataset = SeededDataset(self._loader.dataset, self._loader.collate_fn)
            self._inner, self._generator = build_inner(self._loader, dataset, self._keys)
        # Workers that persist were seeded once, wherever the job was started; so their base seed must not tell epochs.
        self._generator.manual_seed(mix(Purpose.WORKERS, seed, 0 if self._inner.persistent_workers else epoch))
        self._keys.next_pass = keys
        with Preserved():
            batches = iter(self._inner)
        return self._deliver(batches, sent)

    def _deliver(self, batches: Iterator[Any], sent: Sent) -> Iterator[Delivered]:
        while (delivered := self._next(batches, sent)) is not None:
            yield delivered

    def _next(self, batches: Iterator[Any], sent: Sent) -> Delivered | None:
        try:
            if self._loader.num_workers > 0:
                return _pair(next(batches), sent)
            with Preserved():
                return _pair(next(batches), sent)
        except StopIteration:
            return None

    def _known_keys(self, order: Order, seed: int, epoch: int, position: int, sent: Sent) -> Iterator[BatchKey]:
        share = share_of(order.length(), position, order.rank, order.world, drop_last=order.drop_last)
        drawn = order.draw(seed, epoch)
        for first, last in batch_spans(share.count, self._size or 1, drop_last=self._drop_last):
            positions = share.positions(first, last)
            indices = take(drawn, positions)
            sent.append((share.cursor_after(last), indices))
            yield BatchKey(seed, epoch, indices, positions if order.repeats else None, self._batched)

    def _custom_keys(self, seed: int, epoch: int, position: int, sent: Sent) -> Iterator[BatchKey]:
        assert self._custom is not None
        sampling = self._custom.begin(seed, epoch, position)
        in_batches = self._samples_in_batches()
        size = 1 if in_batches else self._size or 1
        while items := sampling.take(size):
            if self._drop_last and len(items) < size:
                return
            indices = list(items[0]) if in_batches else items
            first = position * _POSITIONS_PER_BATCH if in_batches else position
            position += len(items)
            sent.append((position, indices))
            yield BatchKey(seed, epoch, indices, range(first, first + len(indices)), self._batched)

    def _count_left(self, order: Order, position: int) -> int:
        count = share_of(order.length(), position, order.rank, order.world, drop_last=order.drop_last).count
        return count_batches(count, self._size or 1, drop_last=self._drop_last)

    def _warn_if_every_rank_reads_everything(self, order: Order) -> None:
        alone = not order.distributed and job_world_size() > 1
        if alone and order.shuffled and self.rank() == 0 and not self._keys.used:
            _logger.warning(
                "%s on a job of %d ranks: each rank reads all samples; use DistributedSampler to share them",
                order.kind,
                job_world_size(),
            )

    def finished(self, epoch: int) -> None:
        pass  # the next epoch's keys are made from its number alone

    def abandoned(self, epoch: int, *, moved_on: bool) -> None:
        if self._custom is not None:
            self._custom.break_off(epoch, moved_on=moved_on)

    def rank(self) -> int:
        return self._order.rank if self._order is not None and self._order.distributed else job_rank()

    def batches(self) -> int:
        return len(self._loader) if self._order is None else self._count_left(self._order, 0)

    def micro_batches(self) -> int:
        return self._micro_batches

    def batch_size(self) -> int | None:
        return self._size if self._loader.batch_size is not None else None


class _Keys:
    """The inner loader's sampler: each iter() goes over the keys laid ready."""

    def __init__(self) -> None:
        self.next_pass: Iterator[BatchKey] = iter(())
        self.used = False

    def __iter__(self) -> Iterator[BatchKey]:
        self.used = True
        return self.next_pass


def _pair(batch: Any, sent: Sent) -> Delivered:
    """The batch with what was sent for it; keys come back in the order in which they went."""
    return Delivered(batch, *sent.popleft())


def _what_to_sample(loader: DataLoader[Any]) -> tuple[Any, int | None, bool]:
    """Sampler, batch size and drop_last; a size of None means no batching, or a batch sampler that sizes its own."""
    if loader.batch_size is not None or loader.batch_sampler is None:
        return loader.sampler, loader.batch_size, loader.drop_last
    sampler: Any = loader.batch_sampler
    if type(sampler) is BatchSampler:
        return sampler.sampler, sampler.batch_size, sampler.drop_last
    return sampler, None, False


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def name_of(sampler: Any) -> str:
    """What a sampler is called in the state and in messages."""
    return type(sampler).__qualname__
