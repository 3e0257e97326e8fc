"""Iterable data sets: by their own state where there is one, by replay where there is none, never another stream."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from loaders import Augmented, batch_bytes, check_every_kill, resume, watch
from unbroken.data import ResumableLoader, resumable
from unbroken.data.hugging_face import state_is_exact
from unbroken.errors import StateMismatch, UsageError

LENGTH = 21


class Plain(IterableDataset[Any]):
    """A shuffled stream with augmentation and no state of its own; workers take turns."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        for index in random.sample(range(worker, LENGTH, workers), len(range(worker, LENGTH, workers))):
            yield index, random.random(), float(np.random.rand()), torch.rand(1, dtype=torch.float64).item()


class Stateful(IterableDataset[Any]):
    """Says where it is. Counts its epochs by itself, and orders each anew. Notes how much it read."""

    def __init__(self) -> None:
        self.at, self.passes, self.read = 0, 0, 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        order = random.Random(self.passes).sample(range(worker, LENGTH + worker, workers), (LENGTH - worker) // workers)
        while self.at < len(order):
            self.at += 1
            self.read += 1
            yield order[self.at - 1], random.random(), float(np.random.rand()), torch.rand(1).item()
        self.at, self.passes = 0, self.passes + 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "passes": self.passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.passes = state["at"], state["passes"]


class Walk:
    """An iterator that says where it is."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Walk:
        return self

    def __next__(self) -> Any:
        if self.at == LENGTH:
            raise StopIteration
        self.at += 1
        return self.at, random.random()

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Walked(IterableDataset[Any]):
    def __iter__(self) -> Walk:
        return Walk()


def build(
    dataset: type[IterableDataset[Any]], kind: type[DataLoader[Any]] = DataLoader, **options: Any
) -> ResumableLoader:
    return resumable(kind(dataset(), **{"batch_size": 4, **options}), seed=3)


@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"batch_size": None}, {"batch_size": 7}])
@pytest.mark.parametrize("dataset", [Plain, Stateful, Walked])
def test_any_kill_of_a_stream_is_invisible(dataset: type[IterableDataset[Any]], options: dict[str, Any]) -> None:
    check_every_kill(partial(build, dataset, **options), epochs=3)


@pytest.mark.parametrize("dataset", [Plain, Stateful, Walked])
@pytest.mark.parametrize("persistent", [False, True])
def test_any_kill_with_workers_is_invisible(dataset: type[IterableDataset[Any]], persistent: bool) -> None:
    make = partial(build, dataset, num_workers=2, persistent_workers=persistent, batch_size=3)
    check_every_kill(make, epochs=2, kills=slice(0, None, 3))


def test_the_end_of_a_pass_reaches_the_state_of_workers_that_persist() -> None:
    # Batches fill the workers' shares exactly, so the data set counts its pass only when asked for one sample more.
    make = partial(build, Stateful, num_workers=2, persistent_workers=True, batch_size=5)
    check_every_kill(make, epochs=3, kills=slice(2, None, 2))


@pytest.mark.parametrize("dataset", [Plain, Stateful])
@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_an_epoch_broken_off_leaves_nothing_behind_but_what_is_saved(
    dataset: type[IterableDataset[Any]], options: dict[str, Any]
) -> None:
    make = partial(build, dataset, batch_size=3, **options)
    straight = make()
    for number, _ in enumerate(straight):
        if number == 2:
            break
    batches = iter(straight)
    saved = [json.dumps(straight.state_dict())]
    seen = []
    for batch in batches:
        seen.append(batch_bytes(batch))
        saved.append(json.dumps(straight.state_dict()))
    assert straight.epoch == 2
    if options:  # the workers are new, so the epoch is a whole one
        assert len(seen) == 8
    for number, state in enumerate(saved[:3]):
        assert [batch_bytes(batch) for batch in resume(make, state)] == seen[number:]


def test_a_stateful_stream_is_not_read_again(caplog: pytest.LogCaptureFixture) -> None:
    straight = watch(build(Stateful), 1)
    loader = resume(partial(build, Stateful), straight[3][1])
    assert watch(loader, 1) == straight[4:]
    assert loader.dataset.read == LENGTH - 16
    assert caplog.messages == []


def test_a_replay_says_what_it_costs_and_what_would_avoid_it(caplog: pytest.LogCaptureFixture) -> None:
    straight = watch(build(Plain), 1)
    with caplog.at_level(logging.WARNING, "unbroken.data"):
        watch(resume(partial(build, Plain), straight[3][1]), 1)
    assert caplog.messages == [
        "reading 4 batches of epoch 0 again to come back to where the checkpoint was saved; "
        "give Plain state_dict() and load_state_dict() to go there directly"
    ]


def test_a_stream_moves_no_global_stream() -> None:
    before = random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()
    for dataset in (Plain, Stateful):
        assert list(build(dataset))
    assert (random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()) == before


def test_epochs_of_a_stream_differ() -> None:
    seen = watch(build(Plain), 2)
    assert {event[0] for event in seen[:6]}.isdisjoint(event[0] for event in seen[7:13])


def test_torchdatas_loader_is_taken_like_torchs() -> None:
    straight = watch(build(Stateful), 2)
    assert check_every_kill(partial(build, Stateful, StatefulDataLoader), kills=slice(1, None, 4)) == straight
    mapped = resumable(StatefulDataLoader(Augmented(9), batch_size=2, shuffle=True), seed=1)
    plain = resumable(DataLoader(Augmented(9), batch_size=2, shuffle=True), seed=1)
    assert watch(mapped, 2) == watch(plain, 2)


def test_another_number_of_workers_or_batch_size_is_refused_in_mid_epoch_only() -> None:
    straight = watch(build(Plain), 1)
    with pytest.raises(StateMismatch, match=r"num_workers is 2 and was 0 at the checkpoint.*start with num_workers=0"):
        build(Plain, num_workers=2).load_state_dict(json.loads(straight[2][1]))
    with pytest.raises(StateMismatch, match="start with batch_size=4"):
        build(Plain, batch_size=2).load_state_dict(json.loads(straight[2][1]))
    between = build(Plain, num_workers=1)
    between.load_state_dict(json.loads(straight[-1][1]))
    assert [event[0] for event in watch(between, 2)] == [event[0] for event in watch(build(Plain), 2)[7:]]


def test_another_kind_of_stream_is_refused() -> None:
    with pytest.raises(StateMismatch, match="Stateful and the checkpoint was saved with Plain"):
        build(Stateful).load_state_dict(build(Plain).state_dict())


def test_a_datapipe_is_refused() -> None:
    from torch.utils.data.datapipes.iter import IterableWrapper

    with pytest.raises(UsageError, match="DataPipes cannot be resumed exactly"):
        resumable(DataLoader(IterableWrapper(range(3))))


class Split(IterableDataset[Any]):
    """torch's documented way to share a stream: worker_init_fn sets the bounds of each worker's copy."""

    def __init__(self) -> None:
        self.begin, self.end = 0, 12

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.begin, self.end))


def split(worker_id: int) -> None:
    info: Any = get_worker_info()
    info.dataset.begin, info.dataset.end = 6 * info.id, 6 * info.id + 6


def test_worker_init_fn_can_split_the_stream() -> None:
    def make() -> ResumableLoader:
        return build(Split, num_workers=2, worker_init_fn=split, batch_size=2)

    loader = make()
    assert [batch.tolist() for batch in loader] == [[0, 1], [6, 7], [2, 3], [8, 9], [4, 5], [10, 11]]


def hugging_face(stages: str) -> Any:
    table = datasets.Dataset.from_dict({"id": list(range(LENGTH))})
    stream = table.to_iterable_dataset(num_shards=3)
    if "shuffle" in stages:
        stream = stream.shuffle(seed=1, buffer_size=6)
    if "interleave" in stages:
        stream = datasets.interleave_datasets([stream, hugging_face("")], probabilities=[0.5, 0.5], seed=2)
    if "map" in stages:
        stream = stream.map(draw_many, batched=True, batch_size=5) if "batched" in stages else stream.map(draw)
    if "filter" in stages:
        stream = stream.filter(is_odd)
    return stream.take(15) if "take" in stages else stream


def draw(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "draw": random.random() + float(np.random.rand())}


def draw_many(rows: dict[str, Any]) -> dict[str, Any]:
    return {**rows, "draw": [random.random() for _ in rows["id"]]}


def is_odd(row: dict[str, Any]) -> bool:
    return bool(row["id"] % 2)


@pytest.mark.parametrize(
    ("stages", "by_state"),
    [
        ("", True),
        ("map", True),
        ("map filter take", True),
        ("interleave", True),
        ("interleave map", True),
        ("take shuffle map", False),
        ("shuffle", False),
        ("shuffle map", False),
        ("batched map", False),
    ],
)
def test_any_kill_of_a_hugging_face_stream_is_invisible(
    stages: str, by_state: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert state_is_exact(hugging_face(stages)) == by_state
    check_every_kill(lambda: resumable(DataLoader(hugging_face(stages), batch_size=4), seed=3), states=False)
    assert any("again" in message for message in caplog.messages) != by_state


def test_functions_on_threads_are_named_since_their_draws_cannot_be_repeated(caplog: pytest.LogCaptureFixture) -> None:
    mixed = datasets.interleave_datasets([hugging_face("map"), hugging_face("map")])
    assert not state_is_exact(mixed)
    resumable(DataLoader(mixed))
    assert ["map after interleaving" in message for message in caplog.messages] == [True]


def test_hugging_face_streams_resume_in_workers() -> None:
    for stages in ("map", "shuffle map"):
        check_every_kill(
            lambda stages=stages: resumable(DataLoader(hugging_face(stages), batch_size=3, num_workers=2), seed=3),
            kills=slice(1, None, 5),
            states=False,
        )
