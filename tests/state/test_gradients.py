"""Gradients: partial sums inside a window, and None against zero between two steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rebuild import keep, put, raw, same_bytes
from unbroken.errors import UnsupportedValue


def make() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].bias.grad = None
    return model


def with_gradients() -> nn.Module:
    model = make()
    for parameter in list(model.parameters())[:3]:
        parameter.grad = torch.randn(parameter.shape)
    model[0].weight.grad[0, 0] = -0.0
    return model


@pytest.mark.parametrize("fresh", [True, False])
def test_partial_gradients_come_back_bit_for_bit(fresh):
    before, after = with_gradients(), make() if fresh else with_gradients()
    if not fresh:
        after[1].bias.grad = torch.ones(2)
    kept = keep({"model": before}, accumulating=True)
    assert "gradients/model/0.weight" in kept.tensors
    put(kept, {"model": after})
    for one, other in zip(before.parameters(), after.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or (same_bytes(one.grad, other.grad) and not other.grad.requires_grad)


def test_between_two_steps_only_where_there_are_gradients_is_kept():
    before, after = with_gradients(), make()
    after[1].bias.grad = torch.ones(2)
    kept = keep({"model": before})
    assert not any(name.startswith("gradients/") for name in kept.tensors)
    put(kept, {"model": after})
    assert after[1].bias.grad is None
    assert raw(after[0].weight.grad) == bytes(16)


def test_a_zeroed_gradient_takes_minus_zero_as_in_the_undisturbed_run():
    """-0.0 added to zeros is 0.0, and stays -0.0 where the gradient was None."""
    before, after = make(), make()
    for parameter in before.parameters():
        parameter.grad = torch.zeros_like(parameter)
    put(keep({"model": before}), {"model": after})
    for model in (before, after):
        (model[0].weight * torch.tensor(-0.0)).sum().backward()
    assert raw(after[0].weight.grad) == raw(before[0].weight.grad) == bytes(16)


def test_gradients_keep_the_strides_of_their_parameter():
    before, after = (nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last) for _ in range(2))
    before.weight.grad = torch.randn(before.weight.shape).to(memory_format=torch.channels_last)
    put(keep({"model": before}, accumulating=True), {"model": after})
    assert after.weight.grad.stride() == before.weight.grad.stride()
    assert same_bytes(after.weight.grad, before.weight.grad)


def test_a_sparse_gradient_is_refused_only_while_it_would_be_lost():
    model = nn.Embedding(3, 2, sparse=True)
    model(torch.tensor([1])).sum().backward()
    keep({"model": model})
    with pytest.raises(UnsupportedValue, match=r"gradient of model/weight is a tensor of layout torch\.sparse_coo"):
        keep({"model": model}, accumulating=True)


def test_a_rank_without_saved_gradients_keeps_its_own_and_says_so():
    kept = keep({"model": make()})
    del kept.values["gradients"]
    after = with_gradients()
    (warning,) = put(kept, {"model": after}).warnings
    assert "gradients are not restored" in warning and after[0].weight.grad is not None
