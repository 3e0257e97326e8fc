"""Optimizers: what a resumed one does next equals what the undisturbed one does, and names decide, not positions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from rebuild import Kept, keep, put, raw, same_bytes, weights
from unbroken.errors import StateMismatch, UnsupportedValue, UsageError


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)


def two_groups(model: nn.Module) -> list[dict[str, object]]:
    return [
        {"params": [model[0].weight, model[2].weight], "weight_decay": 0.1},
        {"params": [model[0].bias, model[2].bias], "weight_decay": 0.0, "lr": 0.02},
    ]


def train(model: nn.Module, optimizer: Optimizer, begin: int, end: int) -> None:
    """Steps whose data depend on the step alone."""
    for step in range(begin, end):
        inputs = torch.rand(3, 4, generator=torch.Generator().manual_seed(step)).to(model[0].weight.dtype)

        def closure(inputs: torch.Tensor = inputs) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(inputs).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)


def states(model: nn.Module, optimizer: Optimizer) -> dict[str, object]:
    """Everything of the optimizer by parameter name, in comparable form."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {}
    for parameter, state in optimizer.state.items():
        found[names[id(parameter)]] = {key: form(item) for key, item in state.items()}
    return found


def form(item: object) -> object:
    if isinstance(item, torch.Tensor):
        return (item.dtype, tuple(item.shape), item.stride(), item.device, raw(item))
    if isinstance(item, (list, tuple)):
        return (type(item), tuple(form(part) for part in item))
    return (type(item), item)


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda model: SGD(model.parameters(), 0.1),
    "sgd-momentum": lambda model: SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True),
    "adamw-groups": lambda model: AdamW(two_groups(model), 0.01),
    "adamw-foreach": lambda model: AdamW(model.parameters(), 0.01, foreach=True, amsgrad=True),
    "adamw-fused": lambda model: AdamW(model.parameters(), 0.01, fused=True),
    "adam-lr-tensor": lambda model: Adam(model.parameters(), torch.tensor(0.01), foreach=False),
    "rmsprop": lambda model: RMSprop(model.parameters(), 0.01, momentum=0.5, centered=True),
    "adagrad": lambda model: Adagrad(model.parameters(), 0.1),
    "lbfgs": lambda model: LBFGS(model.parameters(), 0.3, max_iter=3, history_size=3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
def test_a_resumed_optimizer_goes_on_bit_for_bit(name, used):
    straight, before, after = make_model(), make_model(), make_model()
    for model in (before, after):
        model.load_state_dict(straight.state_dict())
    optimizers = {id(model): OPTIMIZERS[name](model) for model in (straight, before, after)}
    train(straight, optimizers[id(straight)], 0, 8)
    train(before, optimizers[id(before)], 0, 4)
    if used:  # a process that trained already and goes back
        train(after, optimizers[id(after)], 50, 53)
    kept = keep({"model": before, "optimizer": optimizers[id(before)]})
    put(kept, {"optimizer": optimizers[id(after)], "model": after})
    assert states(after, optimizers[id(after)]) == states(before, optimizers[id(before)])
    train(after, optimizers[id(after)], 4, 8)
    assert weights(after) == weights(straight)
    assert states(after, optimizers[id(after)]) == states(straight, optimizers[id(straight)])


def test_moments_in_float32_of_bfloat16_parameters_are_never_cast():
    def make():
        model = make_model(torch.bfloat16)
        optimizer = AdamW(model.parameters(), 0.01)
        for parameter in model.parameters():
            moments = {key: torch.rand(parameter.shape) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.tensor(3.0), **moments}
        return model, optimizer

    (before, saved), after = make(), make_model(torch.bfloat16)
    restored = AdamW(after.parameters(), 0.01)
    put(keep({"model": before, "optimizer": saved}), {"model": after, "optimizer": restored})
    assert states(after, restored) == states(before, saved)
    assert restored.state[after[0].weight]["exp_avg"].dtype is torch.float32


def test_existing_state_and_a_learning_rate_tensor_are_filled_in_place():
    before, after = make_model(), make_model()
    saved = Adam(before.parameters(), torch.tensor(0.5), foreach=False)
    live = Adam(after.parameters(), torch.tensor(0.1), foreach=False)
    train(before, saved, 0, 2)
    train(after, live, 0, 1)
    moment, rate = live.state[after[0].weight]["exp_avg"], live.param_groups[0]["lr"]
    put(keep({"model": before, "optimizer": saved}), {"model": after, "optimizer": live})
    assert live.state[after[0].weight]["exp_avg"] is moment and live.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5


def test_reordered_groups_and_parameters_find_their_state():
    before, after = make_model(), make_model()
    saved = AdamW(two_groups(before), 0.01)
    train(before, saved, 0, 3)
    groups = two_groups(after)[::-1]
    for group in groups:
        group["params"] = group["params"][::-1]
    live = AdamW(groups, 0.5)
    put(keep({"model": before, "optimizer": saved}), {"model": after, "optimizer": live})
    assert states(after, live) == states(before, saved)
    assert [group["weight_decay"] for group in live.param_groups] == [0.0, 0.1]
    assert [group["lr"] for group in live.param_groups] == [0.02, 0.01]


def test_a_parameter_that_never_had_a_gradient_has_no_state_afterwards_either():
    before, after = make_model(), make_model()
    saved, live = (SGD(model.parameters(), 0.1, momentum=0.9) for model in (before, after))
    before[0].bias.requires_grad_(False)
    train(before, saved, 0, 2)
    train(after, live, 0, 2)
    put(keep({"model": before, "optimizer": saved}), {"model": after, "optimizer": live})
    assert after[0].bias not in live.state and after[0].weight in live.state


def test_channels_last_moments_of_a_new_process_lie_as_the_parameter_does():
    before, after = (nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last) for _ in range(2))
    saved, live = (SGD(model.parameters(), 0.1, momentum=0.9) for model in (before, after))
    before(torch.rand(1, 3, 5, 5)).sum().backward()
    saved.step()
    put(keep({"model": before, "optimizer": saved}), {"model": after, "optimizer": live})
    assert live.state[after.weight]["momentum_buffer"].stride() == after.weight.stride()
    assert states(after, live) == states(before, saved)


def changed_groups():
    return {
        "gone": (lambda model: AdamW(two_groups(model)[:1]), r"only in .*: 2 \(optimizer's parameter model/0\.bias"),
        "split": (
            lambda model: AdamW([{"params": [parameter]} for parameter in model.parameters()]),
            r"missing in the checkpoint: 4 \(optimizer's group 0 of 1 \(model/0\.weight\)",
        ),
    }


@pytest.mark.parametrize("case", changed_groups())
def test_a_changed_group_is_refused_by_its_parameters_and_touches_nothing(case):
    make, text = changed_groups()[case]
    before, after = make_model(), make_model()
    saved, live = AdamW(two_groups(before), 0.01), make(after)
    train(before, saved, 0, 1)
    untouched = weights(after)
    with pytest.raises(StateMismatch, match=text):
        put(keep({"model": before, "optimizer": saved}), {"model": after, "optimizer": live})
    assert weights(after) == untouched and not live.state


@pytest.mark.parametrize(("one", "other"), [(SGD, Adam), (Adam, SGD), (Adam, AdamW)])
def test_another_class_of_optimizer_is_refused_and_without_strict_begins_anew(one, other):
    before, after = make_model(), make_model()
    saved, live = one(before.parameters(), 0.1), other(after.parameters(), 0.2)
    train(before, saved, 0, 1)
    kept = keep({"model": before, "optimizer": saved})
    with pytest.raises(StateMismatch, match=rf"optimizer as {other.__name__} \(it was {one.__name__}\)"):
        put(kept, {"model": after, "optimizer": live})
    put(kept, {"model": after, "optimizer": live}, strict=False)
    assert not live.state and live.param_groups[0]["lr"] == 0.2
    assert weights(after) == weights(before)
    train(after, live, 1, 2)


def test_a_checkpoint_that_does_not_tell_the_class_of_an_optimizer_restores():
    before, after = make_model(), make_model()
    saved, live = (Adam(model.parameters(), 0.1) for model in (before, after))
    train(before, saved, 0, 1)
    kept = keep({"model": before, "optimizer": saved})
    del kept.values["optimizer"]["class"]
    put(kept, {"model": after, "optimizer": live})
    assert states(after, live) == states(before, saved)


def test_a_new_parameter_is_refused_by_name_and_without_strict_left_alone():
    before, after = make_model(), make_model()
    after.add_module("3", nn.Linear(2, 2))
    saved, live = (SGD(model.parameters(), 0.1, momentum=0.9) for model in (before, after))
    train(before, saved, 0, 1)
    kept = keep({"model": before, "optimizer": saved})
    with pytest.raises(StateMismatch, match=r"optimizer's parameter model/3\.weight"):
        put(kept, {"model": after, "optimizer": live})
    put(kept, {"model": after, "optimizer": live}, strict=False)
    assert states(after, live) == states(before, saved)


def test_a_parameter_of_nothing_registered_is_refused_with_group_index_and_shape():
    model = make_model()
    optimizer = SGD([{"params": model.parameters()}, {"params": [nn.Parameter(torch.rand(2, 7))]}], 0.1)
    with pytest.raises(UsageError, match=r"optimizer: parameter 0 of group 1, of shape \[2, 7\], belongs to nothing"):
        keep({"model": model, "optimizer": optimizer})


def test_a_parameter_that_is_registered_by_itself_has_its_state_under_its_name():
    def make():
        temperature = nn.Parameter(torch.ones(1))
        return {"temperature": temperature, "optimizer": SGD([temperature], 0.1, momentum=0.9)}

    before, after = make(), make()
    (before["temperature"] * 2).backward()
    before["optimizer"].step()
    kept = keep(before)
    assert "optimizer/state/temperature/momentum_buffer" in kept.tensors
    put(kept, after)
    assert same_bytes(after["optimizer"].state[after["temperature"]]["momentum_buffer"], torch.tensor([2.0]))


def test_a_tied_parameter_is_found_under_whichever_name_comes_first_now():
    def make(reverse: bool):
        model = nn.Linear(2, 2)
        names = ["model", "alias"][:: -1 if reverse else 1]
        return model, dict.fromkeys(names, model) | {"optimizer": SGD(model.parameters(), 0.1, momentum=0.9)}

    (before, saved), (after, live) = make(False), make(True)
    before(torch.ones(1, 2)).sum().backward()
    saved["optimizer"].step()
    put(keep(saved), live)
    assert states(after, live["optimizer"]) == states(before, saved["optimizer"])


class SharedStep(SGD):
    """One counter for all parameters, and a text, as optimizers outside of torch have them."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                first = self.state[group["params"][0]]
                counter = first.setdefault("counter", torch.zeros(()))
                self.state[parameter].setdefault("counter", counter)
                self.state[parameter]["note"] = ("seen", 1)
                self.state[parameter][3] = torch.ones(1)
                parameter -= 0.1 * self.state[parameter]["counter"]
            counter += 1


def test_a_tensor_that_parameters_share_stays_shared():
    straight, before, after = make_model(), make_model(), make_model()
    for model in (before, after):
        model.load_state_dict(straight.state_dict())
    runs = {name: SharedStep(model.parameters(), 0.1) for name, model in (("a", straight), ("b", before), ("c", after))}
    for _ in range(4):
        runs["a"].step()
    for _ in range(2):
        runs["b"].step()
    put(keep({"model": before, "optimizer": runs["b"]}), {"model": after, "optimizer": runs["c"]})
    for _ in range(2):
        runs["c"].step()
    assert weights(after) == weights(straight) and states(after, runs["c"]) == states(straight, runs["a"])


def test_a_learning_rate_tensor_that_groups_share_stays_shared():
    before, after = make_model(), make_model()
    saved, live = (SGD(two_groups(model), torch.tensor(0.1)) for model in (before, after))
    for optimizer in (saved, live):
        optimizer.param_groups[1]["lr"] = optimizer.param_groups[0]["lr"]
    saved.param_groups[0]["lr"].fill_(0.25)
    put(keep({"model": before, "optimizer": saved}), {"model": after, "optimizer": live})
    assert live.param_groups[0]["lr"] is live.param_groups[1]["lr"] and live.param_groups[0]["lr"].item() == 0.25


def test_an_option_that_cannot_be_stored_is_named():
    model = make_model()
    optimizer = SGD(model.parameters(), 0.1)
    optimizer.param_groups[0]["rule"] = print
    with pytest.raises(UnsupportedValue, match=r"optimizer\.param_groups\[0\]\['rule'\] is a builtins"):
        keep({"model": model, "optimizer": optimizer})


def test_an_option_the_checkpoint_lacks_stays_and_is_named():
    before, after = make_model(), make_model()
    saved, live = (SGD(model.parameters(), 0.1) for model in (before, after))
    live.param_groups[0]["initial_lr"] = 0.7
    (warning,) = put(keep({"model": before, "optimizer": saved}), {"model": after, "optimizer": live}).warnings
    assert "initial_lr" in warning and live.param_groups[0]["initial_lr"] == 0.7


def test_neither_step_nor_load_state_dict_is_called():
    class Strict(SGD):
        def step(self, closure=None):
            raise AssertionError("stepped")

    before, after = make_model(), make_model()
    put(
        keep({"model": before, "optimizer": Strict(before.parameters(), 0.1)}),
        {"model": after, "optimizer": Strict(after.parameters(), 0.1)},
    )


class OwnStateDict(SGD):
    """As wrappers of optimizers do: more in the state dict than torch knows."""

    def __init__(self, params, lr):
        super().__init__(params, lr, momentum=0.9)
        self.skipped = 0

    def state_dict(self):
        return {**super().state_dict(), "skipped": (self.skipped,)}

    def load_state_dict(self, state_dict):
        (self.skipped,) = state_dict.pop("skipped")
        super().load_state_dict(state_dict)


def test_an_optimizer_with_its_own_state_dict_keeps_it_by_name():
    before, after = make_model(torch.bfloat16), make_model(torch.bfloat16)
    saved = OwnStateDict(two_groups(before), 0.1)
    groups = two_groups(after)[::-1]
    groups[0]["params"] = groups[0]["params"][::-1]
    live = OwnStateDict(groups, 0.1)
    train(before, saved, 0, 2)
    for state in saved.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].float()
    saved.skipped = 5
    kept: Kept = keep({"model": before, "optimizer": saved})
    assert "optimizer/state/model/0.weight/momentum_buffer" in kept.tensors
    put(kept, {"model": after, "optimizer": live})
    assert live.skipped == 5 and states(after, live) == states(before, saved)
    assert [group["weight_decay"] for group in live.param_groups] == [0.0, 0.1]


def test_an_optimizer_of_another_shape_of_state_dict_gets_back_what_it_gave():
    class Odd(SGD):
        seen = None

        def state_dict(self):
            return {"odd": [1, (2,)], "state": {"x": 1}}

        def load_state_dict(self, state_dict):
            self.seen = state_dict

    before, after = make_model(), make_model()
    live = Odd(after.parameters(), 0.1)
    put(
        keep({"model": before, "optimizer": Odd(before.parameters(), 0.1)}),
        {"model": after, "optimizer": live},
    )
    assert live.seen == {"odd": [1, (2,)], "state": {"x": 1}}
