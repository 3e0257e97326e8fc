"""Digests of what several ranks hold; devices add up theirs."""

import torch

from unbroken.replicas import Sums


def test_sums_are_told_by_holders_and_name():
    one, other = torch.device("cpu"), torch.device("meta")
    sums = Sums({one: [((0, 1), "a"), ((0, 2), "b")], other: [((0, 1), "c")]})
    found = sums.digests({one: torch.tensor([16, 255]), other: torch.tensor([1])})
    assert found == {(0, 1): {"a": "10", "c": "1"}, (0, 2): {"b": "ff"}}
