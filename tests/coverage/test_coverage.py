# ruff: noqa: F841, B008  # variables that nothing but the search looks at
"""What a script forgot to register is named, and nothing else is."""

import copy
import gc
import itertools
import logging
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
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import unbroken
from unbroken.coverage import coverage
from unbroken.coverage.coverage import Coverage, Uncovered, find_uncovered


class Training:
    """A model with its optimizer, and what a Checkpointer of them does."""

    def __init__(self):
        self.others = find_uncovered({})  # left by other tests
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.registered = {"model": self.model, "optimizer": self.optimizer}
        self.coverage = None

    def begin(self, **more):
        """Training begins: the Checkpointer takes its look."""
        self.coverage = Coverage(self.registered | more)
        self.coverage.look()

    def forgotten(self, **more):
        """What is named at the first save, seen from the caller's frame."""
        known = {id(entry.value) for entry in self.others}
        registered = self.registered | more
        if self.coverage is not None:
            self.coverage.registered = registered  # as if the Checkpointer had been given all of it from the beginning
        found = find_uncovered(registered, sys._getframe(1))
        return [str(entry) for entry in found if id(entry.value) not in known]


@pytest.fixture
def run():
    return Training()


class Meter:
    """An object of the user's with a state."""

    def __init__(self, **held):
        self.__dict__.update(held)

    def state_dict(self):
        raise AssertionError("the search called state_dict")

    def load_state_dict(self, state):
        raise AssertionError("the search called load_state_dict")


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(8))


def data():
    return TensorDataset(torch.arange(8.0))


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


# Loaders.


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
    train, evaluate = (DataLoader(data(), 2, num_workers=1, persistent_workers=True) for _ in range(2))
    for _ in evaluate:
        pass
    for _ in itertools.islice(train, 2):
        assert run.forgotten() == ["loader `train` (DataLoader)"]


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


# Names.


def test_names_are_the_shortest_way_from_a_variable_and_unique(run):
    class Trainer:
        def __init__(self, optimizer):
            self.schedules = {"warm": StepLR(optimizer, 1)}
            self.extra = StepLR(optimizer, 2)

    trainer = Trainer(run.optimizer)
    direct = trainer.extra
    keep = lambda hidden=(StepLR(run.optimizer, 3), StepLR(run.optimizer, 4)): hidden  # noqa: E731
    names = ["StepLR", "StepLR 2", "direct", "trainer.schedules['warm']"]
    assert [entry.name for entry in find_uncovered(run.registered) if entry.kind == "scheduler"] == names
    assert direct is trainer.extra
    assert len(keep()) == 2


def test_a_long_list_is_cut_and_counted(run, caplog):
    many = [StepLR(run.optimizer, size) for size in range(1, 8)]
    run.begin()
    run.coverage.check(strict=False, loud=True)
    run.coverage.check(strict=False, loud=True)
    (record,) = caplog.records
    assert record.message.startswith(
        "not in the checkpoint, and looks like training state: scheduler `many[0]` (StepLR)"
    )
    assert record.message.endswith(" more; register it in the Checkpointer's state")
    assert record.message.count("`") == 2 * coverage.SHOWN
    assert len(many) == 7


def test_str_tells_kind_name_and_class():
    assert str(Uncovered("scheduler", "sched", "LambdaLR", None)) == "scheduler `sched` (LambdaLR)"


# The search disturbs nothing.


def test_the_search_runs_no_code_of_what_it_looks_at(run):
    touched = []

    class Proxy:
        def __getattribute__(self, name):
            touched.append(name)
            raise RuntimeError("not to be touched")

        __class__ = property(lambda self: touched.append("__class__"))
        __dict__ = property(lambda self: touched.append("__dict__"))
        __eq__ = __hash__ = __bool__ = __len__ = __iter__ = lambda self, *a: touched.append("operator")

    class Lazy(types.ModuleType):
        def __getattribute__(self, name):
            touched.append(name)
            raise RuntimeError("not to be loaded")

    class Meta(type):
        def __eq__(cls, other):
            touched.append("eq")

        def __hash__(cls):
            touched.append("hash")
            raise RuntimeError

    class Odd(metaclass=Meta):
        pass

    class Computed(Meter):
        @property
        def value(self):
            touched.append("value")

    odd = [Proxy(), Lazy("lazy"), Odd(), Computed(), weakref.proxy(run.model)]
    sys.modules["lazy_module_of_a_test"] = odd[1]
    try:
        run.begin()
        assert run.forgotten() == ["object `odd[3]` (Computed)"]
    finally:
        del sys.modules["lazy_module_of_a_test"]
    assert touched == []


def test_the_search_draws_no_random_number(run):
    noise = np.random.default_rng(0)
    before = random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state(), noise.bit_generator.state
    scheduler = StepLR(run.optimizer, 2)
    run.begin()
    assert run.forgotten() == ["scheduler `scheduler` (StepLR)"]
    assert random.getstate() == before[0] and np.random.get_state()[1].tobytes() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2]) and noise.bit_generator.state == before[3]


def test_the_search_keeps_nothing_alive(run):
    def step():
        batch, sched = nn.Linear(2, 2), StepLR(run.optimizer, 2)
        references = weakref.ref(batch), weakref.ref(sched)
        run.begin()
        assert run.forgotten() == ["scheduler `sched` (StepLR)"]
        del batch
        # A frame keeps the copy of its variables that was made for `f_locals`.
        assert references[0]() is None
        return references

    _, sched = step()
    gc.collect()
    assert sched() is None


def test_what_the_script_got_from_locals_stays_its_own(run):
    rate = 0.1
    settings = locals()
    run.begin()
    run.forgotten()
    assert settings["rate"] is rate


def test_a_bug_in_the_search_is_told_and_does_not_end_the_training(run, monkeypatch, caplog):
    def fail(*_, **__):
        raise KeyError("a bug")

    monkeypatch.setattr(coverage, "Search", fail)
    run.begin()
    assert find_uncovered(run.registered) == []
    run.coverage.check(strict=True, loud=True)
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    assert "cannot tell whether all training state is registered: KeyError: 'a bug'" in caplog.text
