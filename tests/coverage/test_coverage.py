# ruff: noqa: F841  # variables that nothing but the search looks at
"""What a script forgot to register is named, and nothing else is."""

import copy
import gc
import random
import sys
import types
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, LambdaLR, LinearLR, ReduceLROnPlateau, SequentialLR, StepLR
from torch.optim.swa_utils import AveragedModel

from unbroken.coverage.coverage import Coverage


class Meter:
    """An object of the user's with a state."""

    def __init__(self, **held):
        self.__dict__.update(held)

    def state_dict(self):
        raise AssertionError("the search called state_dict")

    def load_state_dict(self, state):
        raise AssertionError("the search called load_state_dict")


def test_a_run_that_registers_everything_is_not_told_anything(run):
    scheduler = LambdaLR(run.optimizer, float)
    scaler = torch.amp.GradScaler("cpu")
    generator = torch.Generator()
    run.begin(scheduler=scheduler, scaler=scaler, generator=generator)
    torch.rand(1, generator=generator)
    assert run.forgotten(scheduler=scheduler, scaler=scaler, generator=generator) == []


# Each kind.


def test_an_optimizer_and_the_module_it_trains_are_named(run):
    critic = nn.Linear(2, 2)
    critic_optimizer = torch.optim.SGD(critic.parameters())
    run.begin()
    assert run.forgotten() == ["optimizer `critic_optimizer` (SGD)", "module `critic` (Linear)"]
    del critic_optimizer


@pytest.mark.parametrize("make", [lambda o: LambdaLR(o, float), ReduceLROnPlateau, lambda o: StepLR(o, 2)])
def test_a_scheduler_is_named(run, make):
    sched = make(run.optimizer)
    run.begin()
    assert run.forgotten() == [f"scheduler `sched` ({type(sched).__name__})"]


def test_a_chain_of_schedulers_is_one(run):
    chain = SequentialLR(run.optimizer, [LinearLR(run.optimizer), ConstantLR(run.optimizer)], [2])
    run.begin()
    assert run.forgotten() == ["scheduler `chain` (SequentialLR)"]
    assert run.forgotten(chain=chain) == []


def test_a_scaler_is_named_if_it_is_enabled(run):
    scaler, off = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)
    run.begin()
    assert run.forgotten() == ["scaler `scaler` (GradScaler)"]
    del off


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (torch.Generator, lambda g: torch.rand(1, generator=g)),
        (lambda: np.random.default_rng(0), lambda g: g.random()),
        (lambda: np.random.RandomState(0), lambda g: g.rand()),
        (lambda: random.Random(0), lambda g: g.random()),
    ],
)
def test_a_generator_is_named_if_training_draws_from_it(run, make, draw):
    noise, split = make(), make()
    draw(split)
    run.begin()
    assert run.forgotten() == []
    draw(noise)
    assert run.forgotten() == [f"generator `noise` ({type(noise).__name__})"]
    assert run.forgotten(noise=noise) == []
    # A generator that is made anew, for a step, say, has nothing to remember.
    anew = make()
    draw(anew)
    assert run.forgotten(noise=noise) == []


def test_the_global_generators_are_always_saved_and_never_named(run):
    hidden = [random._inst, np.random.mtrand._rand, torch.default_generator, random.SystemRandom()]
    run.begin()
    random.random(), np.random.rand(), torch.rand(1)
    assert run.forgotten() == []
    assert len(hidden) == 4


def test_without_an_earlier_look_every_generator_counts(run):
    noise = torch.Generator()
    assert run.forgotten() == ["generator `noise` (Generator)"]
    del noise


def test_an_object_of_the_users_with_a_state_is_named(run):
    meter = Meter()
    run.begin()
    assert run.forgotten() == ["object `meter` (Meter)"]
    assert run.forgotten(meter=meter) == []


def test_an_object_that_only_inherits_a_librarys_state_is_not_the_users(run):
    # Lightning's Callback and DataModule define both methods and give nothing.
    library = types.ModuleType("installed")
    library.__file__ = pytest.__file__
    sys.modules["installed"] = library
    callback = type("Callback", (), {"state_dict": dict, "load_state_dict": dict, "__module__": "installed"})
    mine = type("Mine", (callback,), {"__module__": __name__})()
    run.begin()
    del sys.modules["installed"]
    assert run.forgotten() == []
    assert mine is not None


# Modules that are trained, and others.


def test_an_average_of_the_weights_is_named_when_it_moves(run):
    ema = copy.deepcopy(run.model).requires_grad_(False)
    run.begin()
    assert run.forgotten() == []
    for average in ema.parameters():
        average.data.mul_(0.5)  # leaves the version counter as it is
    assert run.forgotten() == ["module `ema` (Linear)"]
    assert run.forgotten(ema=ema) == []


def test_torchs_averaged_model_is_named_before_it_moves(run):
    average = AveragedModel(run.model)
    run.begin()
    assert run.forgotten() == ["module `average` (AveragedModel)"]
    del average


def test_a_module_that_is_trained_by_hand_is_named(run):
    head = nn.Linear(2, 2)
    run.begin()
    head(torch.ones(1, 2)).sum().backward()
    with torch.no_grad():
        head.weight -= 0.1 * head.weight.grad
    assert run.forgotten() == ["module `head` (Linear)"]


@pytest.mark.parametrize(
    "copied",
    [
        lambda model: {name: tensor.detach().clone() for name, tensor in model.named_parameters()},
        lambda model: [tensor.detach().clone() for tensor in model.parameters()],
    ],
)
def test_an_average_of_the_weights_in_plain_tensors_is_named(run, copied):
    shadow, frozen = copied(run.model), copied(run.model)
    other = {"rows": torch.zeros(3), "sums": torch.zeros(2)}
    run.begin()
    for tensor in shadow.values() if isinstance(shadow, dict) else shadow:
        tensor.mul_(0.9)
    other["rows"].add_(1)
    assert run.forgotten() == [f"tensors `shadow` ({type(shadow).__name__})"]
    assert len(frozen) == 2


def test_lists_of_the_parameters_and_of_their_gradients_are_no_average(run):
    run.model(torch.ones(1, 2)).sum().backward()
    held, gradients = list(run.model.parameters()), [tensor.grad for tensor in run.model.parameters()]
    run.begin()
    with torch.no_grad():
        for tensor in [*held, *gradients]:
            tensor.add_(1)
    assert run.forgotten() == []


def test_a_module_of_nothing_but_buffers_is_named_when_it_moves(run):
    bank = nn.Module()
    bank.register_buffer("keys", torch.zeros(4, 2))
    weights = nn.CrossEntropyLoss(weight=torch.ones(3))
    run.begin()
    bank.keys[0] = 1
    assert run.forgotten() == ["module `bank` (Module)"]
    assert weights.weight is not None


def test_what_does_not_train_is_not_named(run):
    class Accuracy(nn.Module):
        def __init__(self):
            super().__init__()
            self.right = torch.zeros(())

    teacher, unfrozen, loss, accuracy = nn.BatchNorm1d(2), nn.Linear(2, 2), nn.CrossEntropyLoss(), Accuracy()
    teacher.requires_grad_(False).eval()
    run.begin()
    # Nobody froze it, so that gradients pile up in it; it stays as it is.
    unfrozen(teacher(run.model(torch.ones(4, 2)))).sum().backward()
    teacher.to(memory_format=torch.preserve_format)
    accuracy.right += 1
    assert run.forgotten() == []
    assert loss is not None


def test_what_a_registered_module_consists_of_is_covered_and_so_is_what_wraps_it(run):
    class WithLoss(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model, self.loss = model, nn.MSELoss()

    whole = nn.Sequential(run.model, nn.Linear(2, 2))
    part, wrapper, parallel = whole[1], WithLoss(whole), nn.DataParallel(whole)
    second = torch.optim.SGD(whole.parameters())
    run.begin()
    assert run.forgotten(whole=whole, second=second) == []
    assert run.forgotten(wrapper=wrapper, second=second) == []
    assert run.forgotten(parallel=parallel, second=second) == []
    assert run.forgotten(second=second) != []
    del part


# What registered objects cover.


def test_what_a_registered_object_holds_is_covered(run):
    inner = Meter(sched=StepLR(run.optimizer, 2), things={"g": [torch.Generator()]})
    bundle = Meter(inner=inner)
    assert [line.split()[0] for line in run.forgotten()] == ["scheduler", "generator", "object", "object"]
    assert run.forgotten(bundle=bundle) == []


def test_a_scheduler_does_not_cover_the_optimizer_it_sets(run):
    sched = StepLR(torch.optim.SGD(nn.Linear(2, 2).parameters()), 2)
    assert run.forgotten(sched=sched) == ["optimizer `sched.optimizer` (SGD)"]


def test_a_wrapper_around_an_optimizer_needs_no_name_of_its_own(run):
    class Scaled(torch.optim.Optimizer):
        def __init__(self, optimizer):
            self.optimizer = optimizer
            self.param_groups = optimizer.param_groups

    wrapped = Scaled(run.optimizer)
    assert run.forgotten() == []
    model = nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters())
    wrapped = Scaled(inner)
    assert run.forgotten(head=model) == ["optimizer `wrapped` (Scaled)"]
    assert run.forgotten(head=model, wrapped=wrapped) == []


def test_what_another_checkpointer_saves_is_covered_while_it_lives(run):
    scheduler = StepLR(run.optimizer, 2)
    other = Coverage({"scheduler": scheduler})
    assert run.forgotten() == []
    del other
    assert run.forgotten() == ["scheduler `scheduler` (StepLR)"]


# What an earlier training left behind.


def test_objects_of_a_training_that_is_over_are_not_named(run):
    def earlier():
        model = nn.Linear(2, 2)
        schedule = StepLR(torch.optim.SGD(model.parameters()), 2)
        schedule.itself = schedule  # held by nobody else
        return weakref.ref(schedule)

    gc.disable()
    try:
        left = earlier()
        assert left() is not None
        assert run.forgotten() == []
    finally:
        gc.enable()


def test_objects_of_an_earlier_phase_that_are_kept_are_not_named(run):
    warmup = torch.optim.Adam(run.model.parameters())
    warmup_schedule = StepLR(warmup, 1)

    def step():
        run.model(torch.ones(1, 2)).sum().backward()
        warmup.step()
        warmup_schedule.step()

    step()
    run.begin()
    assert run.forgotten() == []
    step()
    assert run.forgotten() == ["optimizer `warmup` (Adam)", "scheduler `warmup_schedule` (StepLR)"]
