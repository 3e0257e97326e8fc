"""Schedulers, scalers and other objects with a state dict."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim import lr_scheduler as schedules

from rebuild import keep, put, raw, same_bytes
from unbroken.errors import StateMismatch, UnsupportedValue, UsageError

SCHEDULERS = {
    "step": lambda optimizer: schedules.StepLR(optimizer, 3, 0.5),
    "sequential": lambda optimizer: schedules.SequentialLR(
        optimizer,
        [schedules.LinearLR(optimizer, 0.1, total_iters=4), schedules.ExponentialLR(optimizer, 0.9)],
        milestones=[4],
    ),
    "one-cycle": lambda optimizer: schedules.OneCycleLR(optimizer, 0.5, total_steps=20),
    "cyclic": lambda optimizer: schedules.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3),
    "lambda": lambda optimizer: schedules.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "cosine-restarts": lambda optimizer: schedules.CosineAnnealingWarmRestarts(optimizer, 3, 2),
    "chained": lambda optimizer: schedules.ChainedScheduler(
        [schedules.ConstantLR(optimizer, 0.1, 3), schedules.ExponentialLR(optimizer, 0.9)], optimizer
    ),
}


def make(schedule, rate):
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters(), rate, momentum=0.5)
    return {"scheduler": schedule(optimizer), "model": model, "optimizer": optimizer}


def rates(objects, steps) -> list[str]:
    found = []
    for _ in range(steps):
        objects["optimizer"].step()
        objects["scheduler"].step()
        found.append([float(group["lr"]).hex() for group in objects["optimizer"].param_groups])
    return found


@pytest.mark.parametrize("rate", [0.1, "tensor"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_learning_rates_after_a_resume_are_those_of_the_straight_run(name, rate):
    def start():
        return make(SCHEDULERS[name], torch.tensor(0.1) if rate == "tensor" else rate)

    straight, before, after = start(), start(), start()
    expected = rates(straight, 12)
    rates(before, 5)
    put(keep(before), after)
    assert rates(after, 7) == expected[5:]


def test_a_plateau_is_left_at_the_same_step():
    def start():
        return make(lambda optimizer: schedules.ReduceLROnPlateau(optimizer, patience=2, factor=0.5), 1.0)

    def run(objects, losses):
        found = []
        for loss in losses:
            objects["scheduler"].step(loss)
            found.append(objects["optimizer"].param_groups[0]["lr"])
        return found

    losses = [1.0, 0.5, 0.6, 0.7, 0.8, 0.6, 0.6, 0.6, torch.tensor(0.4), 0.9]
    straight, before, after = start(), start(), start()
    expected = run(straight, losses)
    run(before, losses[:4])
    put(keep(before), after)
    assert run(after, losses[4:]) == expected[4:] and len(set(expected)) > 2


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
def test_a_scaler_comes_back_and_can_unscale_at_once(used):
    def start():
        model = nn.Linear(2, 2)
        return {"model": model, "optimizer": SGD(model.parameters(), 0.1), "scaler": torch.amp.GradScaler("cpu", 256.0)}

    before, after = start(), start()
    before["scaler"].scale(torch.ones(1))
    before["scaler"].update(8.0)
    if used:
        after["scaler"].scale(torch.ones(1))
    put(keep(before), after)
    assert after["scaler"].state_dict() == before["scaler"].state_dict()
    after["model"](torch.ones(1, 2)).sum().backward()
    after["scaler"].unscale_(after["optimizer"])
    assert after["model"].bias.grad.tolist() == [1 / 8] * 2


def test_a_scaler_that_was_switched_on_or_off_since_is_refused():
    on, off = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)
    with pytest.raises(StateMismatch, match="scaler, a GradScaler, is enabled, and was disabled"):
        put(keep({"scaler": off}), {"scaler": on})
    with pytest.raises(StateMismatch, match="is disabled, and was enabled"):
        put(keep({"scaler": on}), {"scaler": off})
    put(keep({"scaler": off}), {"scaler": off})


class Average:
    """Keeps shadows of weights; its state dict gives the live ones, not copies."""

    def __init__(self) -> None:
        self.shadow = {0: torch.rand(2, 3).t(), "n": torch.rand(1, dtype=torch.float64)}
        self.updates = 3

    def state_dict(self):
        return {"shadow": self.shadow, "updates": self.updates, "view": self.shadow[0][1:]}

    def load_state_dict(self, state_dict):
        self.shadow, self.updates = state_dict["shadow"], state_dict["updates"]


def test_an_object_that_gives_views_and_keeps_what_it_gets_has_memory_of_its_own():
    before, after, other = Average(), Average(), Average()
    kept = keep({"average": before})
    put(kept, {"average": after})
    put(kept, {"average": other})
    assert after.updates == 3 and list(after.shadow) == [0, "n"]
    assert same_bytes(after.shadow[0], before.shadow[0]) and after.shadow[0].stride() == before.shadow[0].stride()
    after.shadow[0].zero_()
    assert raw(other.shadow[0]) == raw(before.shadow[0]) != raw(after.shadow[0])


class Meddling:
    """Loads a state by changing others'."""

    def __init__(self, optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict):
        self.optimizer.param_groups[0]["lr"] = 99.0


def test_what_an_object_does_to_an_optimizer_while_loading_does_not_last():
    model = nn.Linear(1, 1)
    optimizer = SGD(model.parameters(), 0.1)
    objects = {"model": model, "optimizer": optimizer, "meddling": Meddling(optimizer)}
    put(keep(objects), objects)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_an_object_that_writes_over_restored_weights_while_loading_is_named():
    class Clobbering:
        def state_dict(self):
            return {}

        def load_state_dict(self, state_dict):
            with torch.no_grad():
                objects["model"].weight.zero_()

    objects = {"model": nn.Linear(1, 1), "ema": Clobbering()}
    (warning,) = put(keep(objects), objects).warnings
    assert "wrote over tensors: 1 (model/weight)" in warning


def test_a_value_that_cannot_be_stored_is_named_by_its_path():
    class Holding:
        def state_dict(self):
            return {"fn": print}

        def load_state_dict(self, state_dict):
            raise AssertionError

    with pytest.raises(UnsupportedValue, match=r"loader\.state_dict\(\)\['fn'\] is a builtins"):
        keep({"loader": Holding()})


def test_a_load_that_fails_names_its_entry():
    class Failing(Average):
        def load_state_dict(self, state_dict):
            raise KeyError("old format")

    kept = keep({"average": Average()})
    with pytest.raises(UsageError, match="restoring average failed in its own code: KeyError: 'old format'"):
        put(kept, {"average": Failing()})
