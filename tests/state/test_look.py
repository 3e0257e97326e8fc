"""A look is kept only while it stands: whatever happens between two captures, the second sees what a new one would."""

import itertools

import pytest
import torch
from torch import nn

from unbroken.state import look
from unbroken.state.registry import State


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 4)

    def forward(self, x):
        return self.second(self.norm(self.first(x)))


class Job:
    def __init__(self):
        torch.manual_seed(0)
        self.model = Net()
        self.lone = torch.zeros(3)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        self.step()
        self.objects = {"model": self.model, "lone": self.lone, "optimizer": self.optimizer}
        self.state = State(self.objects)

    def step(self):
        self.optimizer.zero_grad()
        self.model(torch.randn(5, 4)).square().mean().backward()
        self.optimizer.step()


def seen(captured):
    tensors = {
        name: (t.data_ptr(), t.dtype, t.shape, t.stride(), t.is_conj(), t.is_neg(), live.spread)
        for name, live in captured.tensors.items()
        if not name.startswith("rng/")
        for t in [live.tensor]
    }
    values = {name: value for name, value in captured.values.items() if name != "rng"}
    return tensors, values, captured.fenced


def swap_weights(job):
    job.model.first.weight, job.model.second.weight = job.model.second.weight, job.model.first.weight


def replace_parameter(job):
    job.model.first.weight = nn.Parameter(job.model.first.weight.detach().clone())
    job.optimizer.param_groups[0]["params"][0] = job.model.first.weight
    job.optimizer.state.clear()


def rename(job):
    job.model.third = job.model.second
    del job.model.second
    job.model.forward = lambda x: job.model.third(job.model.norm(job.model.first(x)))


def add_module(job):
    job.model.extra = nn.Linear(2, 2)


def add_group(job):
    job.model.extra = nn.Linear(2, 2)
    job.optimizer.add_param_group({"params": list(job.model.extra.parameters()), "lr": 0.5})


def move_data(job):
    job.model.first.weight.data = job.model.first.weight.data.clone()


def transpose_data(job):
    job.model.first.weight.data = job.model.first.weight.data.t()


def reinterpret_data(job):
    job.lone.data = job.lone.data.view(torch.int32)


def shorten_data(job):
    job.lone.data = job.lone.data[:2]


def move_moment(job):
    state = job.optimizer.state[job.model.first.weight]
    state["exp_avg"] = state["exp_avg"].clone()


def move_moment_in_place(job):
    state = job.optimizer.state[job.model.first.weight]
    state["exp_avg"].data = state["exp_avg"].data.clone()


def new_key(job):
    job.optimizer.state[job.model.first.weight]["more"] = torch.zeros(2)


def rename_key(job):
    state = job.optimizer.state[job.model.first.weight]
    state["other"] = state.pop("exp_avg")


def plain_value(job):
    job.optimizer.state[job.model.first.weight]["count"] = 1234567


def list_in_state(job):
    job.optimizer.state[job.model.first.weight]["history"] = [1, 2]


def drop_state(job):
    del job.optimizer.state[job.model.first.weight]


def freeze(job):
    job.model.first.weight.requires_grad_(False)


def buffer_replaced(job):
    job.model.norm.running_mean = torch.ones(4)


def buffer_transient(job):
    job.model.norm._non_persistent_buffers_set.add("running_mean")


def tie(job):
    gone = job.model.second.weight
    job.model.second.weight = job.model.first.weight
    job.optimizer.state.pop(gone, None)
    group = job.optimizer.param_groups[0]
    group["params"] = [parameter for parameter in group["params"] if parameter is not gone]


def reorder_group(job):
    job.optimizer.param_groups[0]["params"].reverse()


def tensor_option(job):
    job.optimizer.param_groups[0]["lr"] = torch.tensor(0.25)


def option(job):
    job.optimizer.param_groups[0]["lr"] = 0.125


def drop_gradient(job):
    job.model.first.weight.grad = None


def another_class(job):
    job.model.norm.__class__ = nn.BatchNorm2d


def conjugate(job):
    job.lone.data = torch.view_as_complex(torch.ones(3, 2)).conj() if job.lone.is_complex() else job.lone.data.neg()


def negative_view(job):
    job.lone.data = torch._neg_view(job.lone.data)


def move_option(job):
    """A tensor that is an option and in the state, under another name among the options."""
    group = job.optimizer.param_groups[0]
    if "scale" in group:
        group["factor"] = group.pop("scale")
    else:
        group["scale"] = job.optimizer.state[job.model.first.weight]["exp_avg"]


def capturable(job):
    group = job.optimizer.param_groups[0]
    group["capturable"] = not group["capturable"]


CHANGES = [
    conjugate,
    negative_view,
    move_option,
    capturable,
    swap_weights,
    replace_parameter,
    rename,
    add_module,
    add_group,
    move_data,
    transpose_data,
    reinterpret_data,
    shorten_data,
    move_moment,
    move_moment_in_place,
    new_key,
    rename_key,
    plain_value,
    list_in_state,
    drop_state,
    freeze,
    buffer_replaced,
    buffer_transient,
    tie,
    reorder_group,
    tensor_option,
    option,
    drop_gradient,
    another_class,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_capture_after_a_change_sees_what_a_new_one_would(change):
    job = Job()
    before = job.state.capture(accumulating=False)
    again = job.state.capture(accumulating=False)
    assert again.standing is before.standing, "it was kept"
    assert seen(again) == seen(before)
    change(job)
    after = job.state.capture(accumulating=False)
    assert seen(after) == seen(State(job.objects).capture(accumulating=False))
    assert seen(after) != seen(before) or change is another_class


@pytest.mark.parametrize("first", CHANGES, ids=lambda change: change.__name__)
def test_changes_that_follow_each_other_are_all_seen(first):
    """In every order of two: what one leaves behind must not hide the other."""
    for second in CHANGES:
        job = Job()
        for change in (first, second):
            job.state.capture(accumulating=False)
            try:
                change(job)
            except (KeyError, AttributeError, RuntimeError, IndexError):
                break  # these two do not go together
            try:
                expected = seen(State(job.objects).capture(accumulating=False))
            except Exception as error:
                with pytest.raises(type(error)):
                    job.state.capture(accumulating=False)
                break
            assert seen(job.state.capture(accumulating=False)) == expected, (first.__name__, second.__name__)


def test_an_option_that_is_in_the_state_too_may_get_another_name():
    job = Job()
    move_option(job)
    job.state.capture(accumulating=False)
    move_option(job)
    assert seen(job.state.capture(accumulating=False)) == seen(State(job.objects).capture(accumulating=False))


def test_a_list_inside_a_state_may_change_unseen_and_is_looked_at_anew():
    job = Job()
    history = job.optimizer.state[job.model.first.weight].setdefault("history", [1])
    job.state.capture(accumulating=False)
    history.append(2)
    state = job.state.capture(accumulating=False).values["optimizer"]["state"]["model/first.weight"]
    assert "2" in str(state["rest"])


def test_a_step_changes_nothing_that_is_kept():
    job = Job()
    standing = job.state.capture(accumulating=False).standing
    for _ in range(3):
        job.step()
        captured = job.state.capture(accumulating=False)
        assert captured.standing is standing
    weight = captured.tensors["model/first.weight"].tensor
    assert torch.equal(weight, job.model.first.weight)


def test_partial_gradients_are_looked_at_each_time():
    job = Job()
    job.state.capture(accumulating=False)
    job.model(torch.randn(5, 4)).square().mean().backward()
    captured = job.state.capture(accumulating=True)
    assert torch.equal(captured.tensors["gradients/model/first.weight"].tensor, job.model.first.weight.grad)


def test_what_is_replaced_at_every_save_is_not_held_on_to():
    job = Job()
    for _ in range(2 * look.MOST_REPLACED):
        move_moment(job)
        captured = job.state.capture(accumulating=False)
    assert job.state._keeper._kept is None
    assert seen(captured) == seen(State(job.objects).capture(accumulating=False))


def test_ids_of_objects_that_are_gone_mean_nothing():
    """A new object may get the id of the old one: the look holds on to what it saw."""
    job = Job()
    for count in itertools.count():
        job.state.capture(accumulating=False)
        job.model.norm.running_mean = torch.full((4,), float(count))
        captured = job.state.capture(accumulating=False)
        assert float(captured.tensors["model/norm.running_mean"].tensor[0]) == count
        if count == 20:
            break
