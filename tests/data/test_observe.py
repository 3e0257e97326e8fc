"""Batches of plain loaders, for the ledger: seen by their content, without being touched."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from unbroken.data.observe import digest_batch, drain_batches, observe_loaders

numbers = st.lists(st.integers(-9, 9), min_size=1, max_size=3)
batches = st.recursive(
    numbers.map(torch.tensor) | numbers.map(np.array) | st.text(max_size=3) | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=6,
)


def spelled(batch):
    return repr(batch)


@given(batches, batches)
def test_two_batches_have_one_digest_exactly_if_they_are_alike(one, other):
    assert (digest_batch(one) == digest_batch(other)) == (spelled(one) == spelled(other))


def test_where_lists_and_numbers_end_counts():
    assert digest_batch([1, 2]) != digest_batch([12])
    assert digest_batch([[], 1]) != digest_batch([[1]])
    assert digest_batch([[1], 2]) != digest_batch([[1, 2]])


def test_the_order_and_the_dtype_count():
    assert digest_batch(torch.tensor([1, 2])) != digest_batch(torch.tensor([2, 1]))
    assert digest_batch(torch.tensor([1, 2])) != digest_batch(torch.tensor([1, 2], dtype=torch.int32))
    assert digest_batch(torch.zeros(2, 3)) != digest_batch(torch.zeros(3, 2))


def test_every_batch_of_any_loader_is_noted_once_and_comes_as_it_was():
    observe_loaders()
    observe_loaders()
    drain_batches()
    torch.manual_seed(0)
    undisturbed = [batch.tolist() for batch in DataLoader(range(8), 3, shuffle=True)]
    state = torch.get_rng_state()
    noted = drain_batches()
    torch.manual_seed(0)
    assert [batch.tolist() for batch in DataLoader(range(8), 3, shuffle=True)] == undisturbed
    assert torch.equal(torch.get_rng_state(), state)
    assert drain_batches() == noted == [digest_batch(torch.tensor(batch)) for batch in undisturbed]
    assert drain_batches() == []
