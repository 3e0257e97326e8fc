# ruff: noqa: F841, B008  # variables that nothing but the search looks at
"""How what is found is named, and that the search changes nothing."""

import gc
import logging
import random
import sys
import types
import weakref

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from unbroken.coverage import coverage
from unbroken.coverage.coverage import Uncovered, find_uncovered


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
    assert " more; register it in the Checkpointer's state" in record.message
    assert record.message.count("`") == 2 * coverage.SHOWN
    assert len(many) == 7


def test_str_tells_kind_name_and_class():
    assert str(Uncovered("scheduler", "sched", "LambdaLR", None)) == "scheduler `sched` (LambdaLR)"


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

    class Computed:
        def state_dict(self):
            touched.append("state_dict")

        def load_state_dict(self, state):
            touched.append("load_state_dict")

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
