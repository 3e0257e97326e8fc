"""A job that goes on with other ranks reads the rest of the same order: each sample once, the same global batches."""

from __future__ import annotations

import logging

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

from loaders import Augmented, rank_loaders, read_steps, same_state
from unbroken.data import resumable
from unbroken.errors import StateMismatch


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 4), (4, 1), (1, 4), (4, 2)])
@pytest.mark.parametrize("drop_last", [False, True])
def test_another_world_size_continues_the_same_steps(before: int, after: int, drop_last: bool) -> None:
    each = 12 // before
    straight = read_steps(rank_loaders(100, before, each, drop_last=drop_last))
    first = rank_loaders(100, before, each, drop_last=drop_last)
    read = read_steps(first, 3)
    second = rank_loaders(100, after, each, drop_last=drop_last)
    for loader in second:
        loader.load_state_dict(same_state(first))
        assert loader.batch_size == 12 // after
    read += read_steps(second)
    assert read[:8] == straight[:8]
    if not drop_last:
        assert {index for step in read for index in step} == set(range(100))
    unchanged = rank_loaders(100, before, each, drop_last=drop_last)
    read_steps(unchanged)
    assert read_steps(second)[:8] == read_steps(unchanged)[:8]


def test_world_sizes_may_change_many_times_in_an_epoch() -> None:
    straight = read_steps(rank_loaders(120, 4, 3))
    read, state = [], same_state(rank_loaders(120, 4, 3))
    for world in (4, 2, 3, 1, 6, 4):
        loaders = rank_loaders(120, world, 3)
        for loader in loaders:
            loader.load_state_dict(state)
        read += read_steps(loaders, 2 if world != 4 or not read else None)
        state = same_state(loaders)
    assert read == straight


def test_augmentation_goes_with_the_sample_not_with_the_rank() -> None:
    four = {
        index: draw
        for loader in rank_loaders(40, 4, 2)
        for batch in loader
        for index, draw in zip(*batch[:2], strict=True)
    }
    one = {index: draw for batch in rank_loaders(40, 1, 8)[0] for index, draw in zip(*batch[:2], strict=True)}
    assert {int(index): float(draw) for index, draw in four.items()} == {
        int(index): float(draw) for index, draw in one.items()
    }


def test_keeping_the_global_batch_is_said_once_and_only_if_something_changes(caplog: pytest.LogCaptureFixture) -> None:
    first = rank_loaders(48, 2, 6)
    read_steps(first, 1)
    with caplog.at_level(logging.WARNING, "unbroken.data"):
        rank_loaders(48, 3, 4)[0].load_state_dict(same_state(first))
        assert caplog.messages == []
        for loader in rank_loaders(48, 3, 6):
            loader.load_state_dict(same_state(first))
        assert caplog.messages == [
            "batch_size is 4 instead of 6 on each of 3 ranks, which keeps the global batch of 12 samples that the "
            "checkpoint was saved with"
        ]


def test_a_world_size_that_cannot_keep_the_global_batch_is_refused_and_changes_nothing() -> None:
    first = rank_loaders(48, 2, 6)
    read_steps(first, 1)
    loader = rank_loaders(48, 5, 6)[0]
    before = loader.state_dict()
    with pytest.raises(StateMismatch, match="12 samples cannot be divided among 5 ranks"):
        loader.load_state_dict(same_state(first))
    assert loader.state_dict() == before


def test_a_state_that_was_loaded_on_other_ranks_is_still_that_state() -> None:
    first = rank_loaders(48, 2, 6)
    read_steps(first, 1)
    loader = rank_loaders(48, 4, 6)[0]
    loader.load_state_dict(same_state(first))
    assert loader.state_dict() == same_state(first)


def test_the_end_of_an_epoch_is_its_end_on_any_number_of_ranks() -> None:
    first = rank_loaders(22, 4, 3)
    read_steps(first, 2)  # 24 positions: two of them padding
    second = rank_loaders(22, 3, 4)
    for loader in second:
        loader.load_state_dict(same_state(first))
    assert read_steps(second) == []
    assert {loader.epoch for loader in second} == {1}


def test_a_shuffled_loader_on_several_ranks_says_that_each_reads_everything(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    loader = resumable(DataLoader(Augmented(4), shuffle=True))
    list(loader), list(loader)
    assert [message for message in caplog.messages if "each rank reads all samples" in message] == caplog.messages
    assert len(caplog.messages) == 1
