"""What may be registered, and what the digests notice."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD

from rebuild import keep, put
from unbroken.errors import UsageError
from unbroken.state.registry import State


@pytest.mark.parametrize("name", ["", "a/b", "a b", "é", "rng", "rank", "gradients", 3, "x\n"])
def test_a_name_that_could_be_mistaken_is_refused(name):
    with pytest.raises(UsageError, match="name"):
        State({name: nn.Linear(1, 1)})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([nn.Linear(1, 1)], "register each of its parts"),
        (3, "builtins.int.*state_dict"),
        (nn.Linear, "builtins.type"),
        (torch.ones(1, requires_grad=True) * 2, "result of a computation"),
        (Path(), "state_dict"),
    ],
    ids=str,
)
def test_an_object_whose_state_nobody_knows_is_refused(value, text):
    with pytest.raises(UsageError, match=text):
        State({"thing": value})


class Counter:
    def __init__(self) -> None:
        self.state = {"x": float("nan"), "y": (1,)}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state_dict):
        self.state = state_dict


def make():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "counter": Counter(), "t": torch.tensor([float("nan"), 0.0])}


CHANGES = {
    "a sign of zero": ("t", lambda objects: objects["t"].neg_()),
    "a payload of NaN": ("t", lambda objects: objects["t"].view(torch.int32)[0].add_(1)),
    "a buffer": ("model", lambda objects: objects["model"][1].num_batches_tracked.add_(1)),
    "a frozen weight": ("model", lambda objects: objects["model"][0].weight.requires_grad_(False)),
    "a last bit": ("model", lambda objects: objects["model"][0].weight.data.view(torch.int32)[0, 0].bitwise_xor_(1)),
    "a learning rate": ("optimizer", lambda objects: objects["optimizer"].param_groups[0].update(lr=0.2)),
    "a type": ("optimizer", lambda objects: objects["optimizer"].param_groups[0].update(dampening=0.0)),
    "no state": ("optimizer", lambda objects: objects["optimizer"].state.popitem()),
    "a list for a tuple": ("counter", lambda objects: objects["counter"].state.update(y=[1])),
    "a draw": ("rng", lambda objects: torch.rand(1)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_digest_notices_every_bit_and_says_which_part(change):
    part, act = CHANGES[change]
    objects = make()
    state = State(objects)
    before = state.digests()
    assert state.digests() == before and set(before) == {*objects, "rng"}
    act(objects)
    after = state.digests()
    assert {name for name in after if after[name] != before[name]} == {part}


def test_a_digest_notices_a_name_a_dtype_and_a_shape_with_the_same_bytes():
    forms = [torch.zeros(2), torch.zeros(2, dtype=torch.int32), torch.zeros(2, 1), torch.zeros(1, 2)]
    digests = [State({"t": form}).digests()["t"] for form in forms] + [State({"u": forms[0]}).digests()["u"]]
    assert len(set(digests)) == 5


def test_digests_of_a_restored_state_are_those_of_the_saved_one():
    before, after = make(), make()
    torch.rand(3)
    before["model"](torch.ones(3, 2)).sum().backward()
    before["optimizer"].step()
    kept = keep(before, accumulating=True)
    digests = State(before).digests(accumulating=True)
    put(kept, after)
    assert State(after).digests(accumulating=True) == digests and "gradients" in digests


def test_two_saves_of_one_state_are_the_same():
    objects = make()
    one, two = keep(objects), keep(objects)
    assert one.values == two.values
    assert list(one.tensors) == list(two.tensors)


def test_capturing_changes_nothing_of_the_objects():
    objects = make()
    expected = {name: copy.deepcopy(objects[name].state_dict()) for name in ("model", "optimizer")}
    State(objects).capture(accumulating=True)
    assert str(expected) == str({name: objects[name].state_dict() for name in expected})
