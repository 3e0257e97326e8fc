# ruff: noqa: F841  # variables that nothing but the search looks at
"""A loader that is not registered is named if the loop is inside it, and evaluation's is not."""

import itertools

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import unbroken


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(8))


def data():
    return TensorDataset(torch.arange(8.0))


def test_a_shuffled_loader_that_the_loop_is_inside_is_named(run):
    train, evaluate = DataLoader(data(), 2, shuffle=True), DataLoader(data(), 2)
    registered = unbroken.resumable(DataLoader(data()))
    for _ in train:
        assert run.forgotten(loader=registered) == ["loader `train` (DataLoader)"]
    assert run.forgotten(loader=registered) == []
    for _ in evaluate:
        assert run.forgotten(loader=registered) == []


@pytest.mark.parametrize("make", [data, Stream])
def test_without_a_registered_loader_the_one_that_the_loop_is_inside_is_named(run, make):
    train, evaluate = DataLoader(make(), 2), DataLoader(make(), 2)
    for _ in train:
        assert run.forgotten() == ["loader `train` (DataLoader)"]
    assert run.forgotten() == []
    held = iter(evaluate)  # as Lightning does, up to its end
    assert len(list(held)) == 4 or make is Stream


def test_a_loader_with_workers_is_told_from_one_whose_iteration_has_ended(run):
    train, evaluate = (DataLoader(data(), 2, num_workers=1) for _ in range(2))
    held = iter(evaluate)
    assert len(list(held)) == 4
    for _ in itertools.islice(train, 2):
        assert run.forgotten() == ["loader `train` (DataLoader)"]


def test_an_evaluations_loader_is_named_if_its_workers_persist(run):
    """A resumed job starts them anew, and draws their seed from the training's random numbers once more."""
    train, evaluate = unbroken.resumable(DataLoader(data(), 2)), DataLoader(data(), 2, num_workers=1)
    lasting = DataLoader(data(), 2, num_workers=1, persistent_workers=True)
    assert run.forgotten(loader=train) == ["loader `lasting` (DataLoader)"]
    assert run.forgotten(loader=train, lasting=unbroken.resumable(lasting)) == []


def test_between_two_epochs_a_shuffled_loader_is_named_if_none_is_registered(run):
    sampler = DistributedSampler(data(), 1, 0, shuffle=True)
    train, evaluate = DataLoader(data(), 2, sampler=sampler), DataLoader(data(), 2)
    assert run.forgotten() == ["loader `train` (DataLoader)"]
    assert run.forgotten(loader=unbroken.resumable(evaluate)) == []


def test_a_resumable_loader_that_is_not_registered_is_named_and_what_it_is_made_of_is_not(run):
    shuffle = torch.Generator()
    plain = DataLoader(data(), 2, shuffle=True, generator=shuffle)
    loader = unbroken.resumable(plain)
    for _ in loader:
        assert run.forgotten() == ["loader `loader` (ResumableLoader)"]
        assert run.forgotten(loader=loader) == []
    del plain
