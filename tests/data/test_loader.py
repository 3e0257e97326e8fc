"""A killed and resumed loader gives what the one that was not killed gave, to the bit."""

from __future__ import annotations

import json
import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from loaders import Augmented, check_every_kill, ids, resume, watch
from unbroken.data import ResumableLoader, resumable
from unbroken.data.seeding import read_streams
from unbroken.errors import StateMismatch, UsageError

DATA = Augmented(23)
WEIGHTS = [1.0 + index % 5 for index in range(23)]
SAMPLERS: dict[str, Any] = {
    "sequential": lambda: SequentialSampler(DATA),
    "shuffled": lambda: RandomSampler(DATA),
    "with replacement": lambda: RandomSampler(DATA, replacement=True, num_samples=31),
    "fewer than all": lambda: RandomSampler(DATA, num_samples=9),
    "more than all": lambda: RandomSampler(DATA, num_samples=50),
    "own generator": lambda: RandomSampler(DATA, generator=torch.Generator().manual_seed(9)),
    "subset": lambda: SubsetRandomSampler(range(3, 20)),
    "weighted": lambda: WeightedRandomSampler(WEIGHTS, 21),
    "distributed": lambda: DistributedSampler(DATA, 2, 1, seed=4),
    "distributed in order": lambda: DistributedSampler(DATA, 3, 0, shuffle=False),
}


def build(sampler: str, **options: Any) -> ResumableLoader:
    return resumable(DataLoader(DATA, sampler=SAMPLERS[sampler](), batch_size=4, **options), seed=7)


def streams_now() -> str:
    python, numpy, torch_state = read_streams()
    return repr(
        (python, numpy["state"]["key"].tolist(), numpy["state"]["pos"], numpy["has_gauss"], torch_state.tolist())
    )


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_any_kill_of_any_sampler_is_invisible(sampler: str, drop_last: bool) -> None:
    straight = check_every_kill(partial(build, sampler, drop_last=drop_last))
    assert len(straight) == 2 * (len(build(sampler, drop_last=drop_last)) + 1)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_kills_are_invisible_with_workers_too(workers: int, persistent: bool) -> None:
    make = partial(build, "shuffled", num_workers=workers, persistent_workers=persistent, prefetch_factor=3)
    straight = check_every_kill(make, kills=slice(2, None, 7))
    assert straight == watch(build("shuffled"), 2)


def test_the_number_of_workers_may_change_at_a_kill() -> None:
    straight = watch(build("weighted"), 2)
    first = watch(resume(partial(build, "weighted", num_workers=2), straight[1][1]), 1)
    assert first == straight[2:7]
    assert watch(resume(partial(build, "weighted", num_workers=1), first[-1][1]), 2) == straight[7:]


def test_several_kills_in_one_epoch_are_invisible() -> None:
    straight = watch(build("shuffled"), 1)
    saved = json.dumps(build("shuffled").state_dict())
    for event in straight:
        loader = resume(partial(build, "shuffled"), saved)
        seen = next(iter(loader), None)
        saved = json.dumps(loader.state_dict())
        assert saved == event[1]
        assert (seen is None) == (event is straight[-1])


def test_spawned_workers_give_the_same_samples() -> None:
    spawned = build("shuffled", num_workers=1, multiprocessing_context="spawn")
    assert watch(spawned, 1) == watch(build("shuffled"), 1)


def test_neither_iter_nor_next_moves_a_global_stream() -> None:
    np.random.randn()  # leaves a second Gaussian in store
    before = streams_now()
    for sampler in SAMPLERS:
        iterator = iter(build(sampler))
        assert streams_now() == before
        for _ in iterator:
            assert streams_now() == before
    iterator = iter(build("shuffled", num_workers=1))
    next(iterator)
    assert streams_now() == before


def test_draws_between_batches_do_not_change_the_samples() -> None:
    disturbed = build("shuffled")
    seen = []
    for batch in disturbed:
        seen.append([part.tolist() for part in batch])
        random.random(), np.random.rand(5), torch.rand(3)
    assert seen == [[part.tolist() for part in batch] for batch in build("shuffled")]


def test_epochs_differ_in_order_and_in_augmentation() -> None:
    loader = build("sequential")
    first, second = list(loader), list(loader)
    assert [batch[0].tolist() for batch in first] == [batch[0].tolist() for batch in second]
    for stream in (1, 2, 3):
        draws = torch.cat([batch[stream] for batch in first + second])
        assert len(draws.unique()) == len(draws)
    shuffled = build("shuffled")
    assert list(ids(shuffled)) != list(ids(shuffled))


def test_a_sample_drawn_twice_in_an_epoch_is_augmented_twice() -> None:
    batches = list(build("with replacement"))
    drawn = torch.cat([batch[0] for batch in batches])
    assert len(drawn.unique()) < len(drawn)
    assert len(torch.cat([batch[1] for batch in batches]).unique()) == len(drawn)


class Noisy:
    """A collate function that draws."""

    def __call__(self, samples: list[Any]) -> list[Any]:
        return [default_collate(samples), torch.rand(2), torch.tensor([random.random()])]


def test_a_random_collate_function_is_seeded_by_its_batch() -> None:
    make = partial(build, "shuffled", collate_fn=Noisy())
    straight = check_every_kill(make)
    assert watch(build("shuffled", collate_fn=Noisy(), num_workers=1), 1) == straight[:7]


class Caching(Augmented):
    """Draws when it reads a sample for the first time only."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.cache: dict[int, Any] = {}

    def __getitem__(self, index: int) -> int:
        if index not in self.cache:
            self.cache[index] = random.random()
            torch.rand(3)
        return index


def test_what_a_collate_function_draws_does_not_depend_on_a_cache() -> None:
    loader = resumable(DataLoader(Caching(8), batch_size=4, collate_fn=Noisy()), seed=7)
    state = loader.state_dict()
    first = [batch[1].tolist() for batch in loader]
    loader.load_state_dict(state)
    assert [batch[1].tolist() for batch in loader] == first


def test_without_batching_each_sample_is_its_own_batch() -> None:
    def make(workers: int = 0) -> ResumableLoader:
        return resumable(DataLoader(DATA, batch_size=None, shuffle=True, num_workers=workers), seed=1)

    straight = check_every_kill(make)
    assert len(straight) == 2 * 24
    assert watch(make(workers=1), 2) == straight


class FetchedTogether(Augmented):
    """Fetches a batch at once, in an order of its own."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in reversed(indices)]


def test_a_dataset_that_fetches_batches_is_seeded_by_batch() -> None:
    def make() -> ResumableLoader:
        return resumable(DataLoader(FetchedTogether(11), batch_size=4, shuffle=True), seed=1)

    check_every_kill(make)
    one_by_one = resumable(DataLoader(Augmented(11), batch_size=4, shuffle=True), seed=1)
    assert [batch[::-1] for batch in ids(make())] == list(ids(one_by_one))


def test_samples_of_a_subset_are_seeded_one_by_one() -> None:
    subset = Subset(DATA, list(range(23)))
    pairs = resumable(DataLoader(subset, batch_size=2), seed=7)
    fours = build("sequential")
    assert torch.cat([batch[1] for batch in pairs]).tolist() == torch.cat([batch[1] for batch in fours]).tolist()


def test_torchs_batch_sampler_is_read_like_a_batch_size() -> None:
    def make() -> ResumableLoader:
        sampler = BatchSampler(RandomSampler(DATA), 4, drop_last=True)
        return resumable(DataLoader(DATA, batch_sampler=sampler), seed=7)

    straight = check_every_kill(make)
    assert [event[0] for event in straight] == [event[0] for event in watch(build("shuffled", drop_last=True), 2)]


def test_the_order_of_a_distributed_sampler_is_torchs() -> None:
    for length, world, drop_last in [(23, 4, False), (23, 4, True), (8, 4, False), (3, 8, False), (3, 8, True)]:
        data = Augmented(length)
        for rank in range(world):
            sampler = DistributedSampler(data, world, rank, seed=11, drop_last=drop_last)
            loader = resumable(DataLoader(data, sampler=sampler, batch_size=3))
            for epoch in range(2):
                plain = DistributedSampler(data, world, rank, seed=11, drop_last=drop_last)
                plain.set_epoch(epoch)
                assert len(loader) == len(DataLoader(data, sampler=plain, batch_size=3))
                assert [index for batch in ids(loader) for index in batch] == list(plain)


def test_set_epoch_by_habit_breaks_nothing() -> None:
    loader = build("distributed")
    habitual = []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        habitual += list(ids(loader))
    other = build("distributed")
    assert habitual == [*ids(other), *ids(other)]


def test_a_break_ends_the_epoch_but_a_resumed_job_goes_on_in_it() -> None:
    loader = build("shuffled")
    assert len(list(ids(loader, 2))) == 2
    saved = json.dumps(loader.state_dict())
    second = list(ids(loader))
    straight = build("shuffled")
    first = list(ids(straight))
    assert second == list(ids(straight))
    assert list(ids(resume(partial(build, "shuffled"), saved))) == first[2:]


def test_an_iteration_that_gave_nothing_does_not_count() -> None:
    loader = build("shuffled")
    iter(loader), iter(loader)
    assert loader.epoch == 0
    assert list(ids(loader)) == list(ids(build("shuffled")))


def test_length_and_epoch_tell_the_whole_epoch_after_a_resume() -> None:
    straight = watch(build("shuffled"), 2)
    loader = resume(partial(build, "shuffled"), straight[9][1])
    assert (len(loader), loader.epoch) == (6, 1)


def test_the_ledger_gets_the_ids_of_what_the_loop_had() -> None:
    loader = build("shuffled", num_workers=1)
    had = [index for batch in ids(loader, 3) for index in batch]
    assert loader.drain_samples() == had
    assert loader.drain_samples() == []


def test_two_loaders_in_one_loop_do_not_disturb_each_other() -> None:
    shared = torch.Generator().manual_seed(3)

    def make() -> ResumableLoader:
        return resumable(DataLoader(DATA, batch_size=4, sampler=WeightedRandomSampler(WEIGHTS, 20, generator=shared)))

    alone = list(ids(make()))
    state = shared.get_state()
    both = list(zip(ids(make()), ids(make()), strict=True))
    assert both == list(zip(alone, alone, strict=True))
    assert torch.equal(shared.get_state(), state)


def test_an_older_iteration_may_not_go_on() -> None:
    loader = build("shuffled")
    old = iter(loader)
    next(old)
    iter(loader)
    with pytest.raises(UsageError, match="one iteration at a time"):
        next(old)


def test_the_saved_seed_wins() -> None:
    straight = watch(build("shuffled"), 1)
    other = resumable(DataLoader(DATA, sampler=SAMPLERS["shuffled"](), batch_size=4), seed=8)
    other.load_state_dict(json.loads(straight[0][1]))
    assert watch(other, 1) == straight[1:]


def test_the_seed_comes_from_what_the_user_seeded() -> None:
    torch.manual_seed(41)
    assert resumable(DataLoader(DATA, shuffle=True)).seed == 41
    assert build("distributed").seed == 7
    assert resumable(DataLoader(DATA, sampler=SAMPLERS["distributed"]())).seed == 4
    assert resumable(DataLoader(DATA, sampler=SAMPLERS["own generator"]())).seed == 9
    assert resumable(DataLoader(DATA, shuffle=True, generator=torch.Generator().manual_seed(6))).seed == 6


def test_the_wrapped_loaders_attributes_can_be_read() -> None:
    loader = build("distributed", num_workers=0, drop_last=True)
    assert loader.dataset is DATA
    assert (loader.batch_size, loader.num_workers, loader.drop_last) == (4, 0, True)
    assert isinstance(loader.sampler, DistributedSampler)
    with pytest.raises(AttributeError, match="no_such_thing"):
        loader.no_such_thing  # noqa: B018


class Indexed(Dataset[Any]):
    """Tells who worker_info says it is."""

    def __init__(self) -> None:
        self.offset = 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index + self.offset


def shift_own_dataset(worker_id: int) -> None:
    info: Any = torch.utils.data.get_worker_info()
    info.dataset.offset = 100


def test_the_settings_are_taken_along_to_a_loader_that_a_framework_made_anew() -> None:
    plain = DataLoader(Augmented(8), 4, shuffle=True)
    asked = resumable(plain, seed=3, when_ranks_change="accumulate")
    anew = DataLoader(Augmented(8), 2, sampler=DistributedSampler(Augmented(8), 2, 0, seed=9))
    made = asked.over(anew)
    assert asked.wrapped is plain and made.wrapped is anew
    assert (made.seed, made.batch_size) == (3, 2)
    assert resumable(plain).over(anew).seed == 9, "no seed was asked for"
    saved = resumable(DataLoader(Augmented(8), 2, sampler=DistributedSampler(Augmented(8), 4, 0))).state_dict()
    made.load_state_dict(saved)
    assert (made.micro_batches, made.batch_size) == (2, 2)


def test_worker_init_fn_sees_the_users_dataset() -> None:
    loader = resumable(DataLoader(Indexed(), batch_size=4, num_workers=1, worker_init_fn=shift_own_dataset))
    assert [batch.tolist() for batch in loader] == [[100, 101, 102, 103]]


class Failing(Augmented):
    def __getitem__(self, index: int) -> Any:
        random.random()
        raise LookupError(f"no sample {index}")


def test_a_failing_sample_raises_and_leaves_the_streams_alone() -> None:
    before = streams_now()
    with pytest.raises(LookupError, match="no sample 0"):
        next(iter(resumable(DataLoader(Failing(3)))))
    assert streams_now() == before


def test_other_data_or_another_sampler_is_refused_by_name_and_changes_nothing() -> None:
    saved = json.loads(watch(build("shuffled"), 1)[1][1])
    longer = resumable(DataLoader(Augmented(24), batch_size=4, shuffle=True), seed=1)
    with pytest.raises(StateMismatch, match="24 samples and had 23"):
        longer.load_state_dict(saved)
    assert longer.state_dict()["seed"] == 1
    with pytest.raises(StateMismatch, match=r"SequentialSampler and .* RandomSampler"):
        build("sequential").load_state_dict(saved)
    with pytest.raises(StateMismatch, match="load what state_dict"):
        build("sequential").load_state_dict({"epoch": 3})


class SelfMade(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([])


def test_what_cannot_be_resumed_is_refused() -> None:
    with pytest.raises(UsageError, match="resumable already"):
        resumable(build("shuffled"))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="SelfMade has its own __iter__"):
        resumable(SelfMade(DATA))
    with pytest.raises(UsageError, match="takes a torch DataLoader, not list"):
        resumable([1, 2])  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [{"position": -1}, {"epoch": -3}, {"seed": "x"}, {"epoch": None}, {"position": 1.5}])
def test_a_state_that_no_loader_gives_is_refused_and_changes_nothing(change):
    loader = resumable(DataLoader(list(range(8)), 2), seed=3)
    before = loader.state_dict()
    with pytest.raises(StateMismatch, match="whole numbers"):
        loader.load_state_dict({**before, **change})
    assert loader.state_dict() == before
