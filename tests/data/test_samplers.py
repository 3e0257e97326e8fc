"""Samplers of the user's own: replayed by index, hidden state included, without a sample being fetched."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler

from loaders import Augmented, check_every_kill, ids, resume, watch
from unbroken.data import ResumableLoader, resumable
from unbroken.errors import StateMismatch, UsageError

DATA = Augmented(23)


class Drawing(Sampler[int]):
    """Draws from all three global streams."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(17):
            yield (random.randrange(23) + int(np.random.randint(23)) + int(torch.randint(23, ()))) % 23

    def __len__(self) -> int:
        return 17


class Remembering(Sampler[int]):
    """Shuffles one list over and over: each epoch depends on all before it."""

    def __init__(self) -> None:
        self.order = list(range(13))

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.order)
        yield from self.order


class Told(Sampler[int]):
    """Goes by set_epoch alone, as most samplers for distributed jobs."""

    def __init__(self) -> None:
        self.epoch, self.num_replicas = 0, 2

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(self.epoch).sample(range(23), 10))


class OwnGenerator(Sampler[int]):
    """Shuffles by a generator that a user hands over."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(77)

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(23, generator=self.generator).tolist()


class RaggedBatches(Sampler[list[int]]):
    """Batches of drawn sizes over another sampler, which draws as well."""

    def __init__(self) -> None:
        self.sampler = RandomSampler(DATA)

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for index in self.sampler:
            batch.append(index)
            if random.random() < 0.4:
                yield batch
                batch = []
        if batch:
            yield batch


SAMPLERS: dict[str, Callable[[], Sampler[Any]]] = {
    "drawing": Drawing,
    "remembering": Remembering,
    "told": Told,
    "own generator": OwnGenerator,
}


def build(sampler: Callable[[], Sampler[Any]], **options: Any) -> ResumableLoader:
    return resumable(DataLoader(DATA, sampler=sampler(), batch_size=3, **options), seed=5)


def build_batches(**options: Any) -> ResumableLoader:
    return resumable(DataLoader(DATA, batch_sampler=RaggedBatches(), **options), seed=5)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_any_kill_of_a_custom_sampler_is_invisible(sampler: str, drop_last: bool) -> None:
    check_every_kill(partial(build, SAMPLERS[sampler], drop_last=drop_last), epochs=3)


def test_any_kill_of_a_custom_batch_sampler_is_invisible() -> None:
    straight = check_every_kill(build_batches, epochs=3)
    assert watch(build_batches(num_workers=1, persistent_workers=True), 3) == straight


def test_samplers_that_draw_give_another_order_each_epoch() -> None:
    for sampler in SAMPLERS.values():
        loader = build(sampler)
        assert list(ids(loader)) != list(ids(loader))


def test_a_custom_sampler_moves_no_global_stream_and_not_its_own_generator() -> None:
    sampler = OwnGenerator()
    loader = build(lambda: sampler)
    before = random.getstate(), torch.get_rng_state().tolist(), sampler.generator.get_state().tolist()
    assert len(list(loader)) == 8
    assert (random.getstate(), torch.get_rng_state().tolist(), sampler.generator.get_state().tolist()) == before


class Endless(Sampler[list[int]]):
    """Never comes to an end: the job counts steps, not epochs."""

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield [random.randrange(23) for _ in range(2)]


def test_an_endless_sampler_resumes_where_it_was() -> None:
    def make() -> ResumableLoader:
        return resumable(DataLoader(DATA, batch_sampler=Endless()), seed=2)

    straight = list(ids(make(), 3000))
    first = make()
    assert list(ids(first, 1700)) == straight[:1700]
    DATA.fetched.clear()
    second = resume(make, json.dumps(first.state_dict()))
    assert list(ids(second, 1300)) == straight[1700:]
    assert len(DATA.fetched) == 2600


@pytest.mark.parametrize("workers", [0, 1])
def test_passes_broken_off_are_part_of_a_samplers_past(workers: int) -> None:
    def make() -> ResumableLoader:
        return build(Remembering, num_workers=workers)

    straight = make()
    list(ids(straight, 2))  # breaks off epoch 0, with what was prefetched of it
    list(ids(straight))
    saved = json.dumps(straight.state_dict())
    assert watch(resume(make, saved), 4) == watch(straight, 4)


def test_resuming_at_another_world_size_is_refused() -> None:
    state = build(Told).state_dict()
    four = Told()
    four.num_replicas = 4
    with pytest.raises(StateMismatch, match="Told was saved on 2 ranks and runs on 4"):
        build(lambda: four).load_state_dict(state)


def test_a_sampler_that_went_on_cannot_be_taken_back() -> None:
    loader = build(Remembering)
    state = loader.state_dict()
    list(loader)
    with pytest.raises(UsageError, match="Remembering has been iterated already"):
        loader.load_state_dict(state)


def test_indices_of_any_kind_have_a_stable_seed() -> None:
    class Named(Augmented):
        def __getitem__(self, index: Any) -> Any:
            return hash(index) is None, random.random(), float(np.random.rand()), torch.rand(1).item()

    class Keys(Sampler[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter([("a", 1), "b", 2.5, object(), torch.tensor(3), None, (object(),)])

    def make() -> ResumableLoader:
        return resumable(DataLoader(Named(7), sampler=Keys(), batch_size=2), seed=1)

    straight = check_every_kill(make)
    draws = [event[0] for event in straight]
    assert len(set(draws)) == len(draws)
