"""B061: the optimizer of a sharded model was saved, and its load asked for a `step` that was not there. B062: with
several groups, the optimizer came back as if it had never trained. B064: the fused AdamW found its counter on another
device, and its first step crashed. B066: what had been saved, or restored, was the live memory itself. B067: after a
restore from full values the moments were plain tensors. B063: an FSDP job did not resume, depending on whether the
model was wrapped before or after.

Right: every option and every value of every parameter is as it was saved; each state tensor is of the type, dtype,
placements and device that a fresh state would have, in memory of its own; the restored job goes on like the straight
one. A model that is wrapped too late is an error that says what does not fit.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import unbroken
from processes import Raised
from sharded.models import Job, Net, fsdp1, fsdp2, raw

MODULE = "cases.test_b061_sharded_optimizer_state"


def groups_of(model: nn.Module) -> list[dict[str, object]]:
    """Two groups that differ in every option, whose members are mixed over the layers."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    decayed = [p for name, p in trained.items() if "weight" in name]
    plain = [p for name, p in trained.items() if "weight" not in name]
    return [
        {"params": decayed, "weight_decay": 0.3, "lr": 0.1, "name": "decayed"},
        {"params": plain, "weight_decay": 0.0, "lr": 0.03, "name": "plain"},
    ]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "Adam": lambda model: torch.optim.Adam(groups_of(model), amsgrad=True),
    "fusedAdamW": lambda model: torch.optim.AdamW(groups_of(model), fused=True),
    "SGD": lambda model: torch.optim.SGD(groups_of(model), momentum=0.9),
    # It makes its state at once, for what this rank holds nothing of as well.
    "Adagrad": lambda model: torch.optim.Adagrad(groups_of(model)),
}
LAYOUTS = {"fsdp2": fsdp2, "fsdp1": fsdp1}


def make(layout: str, optimizer: str, seed: int) -> Job:
    model = LAYOUTS[layout](Net(seed))
    return Job(model, OPTIMIZERS[optimizer](model))


def make_all(seed: int) -> dict[str, Job]:
    return {f"{layout}-{optimizer}": make(layout, optimizer, seed) for layout in LAYOUTS for optimizer in OPTIMIZERS}


def state_of(jobs: dict[str, Job]) -> dict[str, object]:
    return {f"{name}-{what}": value for name, job in jobs.items() for what, value in job.state.items()}


def kinds(job: Job) -> dict[str, tuple[object, ...]]:
    """What each state tensor is, apart from its values."""
    told = {}
    for name, parameter in filter(lambda pair: held_by(pair[1]), job.model.named_parameters()):
        for key, item in job.optimizer.state.get(parameter, {}).items():
            where = (item.device_mesh, item.placements) if isinstance(item, DTensor) else ()
            told[f"{name}/{key}"] = (type(item), item.dtype, tuple(item.shape), item.stride(), item.device, *where)
    return told


def contents(job: Job) -> dict[str, bytes]:
    """What this rank holds of weights and moments."""
    told = {}
    for name, parameter in filter(lambda pair: held_by(pair[1]), job.model.named_parameters()):
        items = {"": parameter, **job.optimizer.state.get(parameter, {})}
        for key, item in items.items():
            told[f"{name}/{key}"] = raw(item.to_local() if isinstance(item, DTensor) else item)
    return told


def options(job: Job) -> list[dict[str, object]]:
    return [{key: item for key, item in group.items() if key != "params"} for group in job.optimizer.param_groups]


def held_by(parameter: torch.Tensor) -> bool:
    """False for what FSDP1 leaves to other ranks: it gets no gradient here, so its state is nothing to go on with."""
    return isinstance(parameter, DTensor) or parameter.numel() > 0


def round_trip(rank, world_size, directory):
    """A step, a save, a restore into new objects, a step in both. What was not the same."""
    old, new = make_all(seed=1), make_all(seed=2)
    with unbroken.Checkpointer(directory, state_of(old), on_error="raise") as ckpt:
        ckpt.step()
        for job in old.values():
            job.step(0)
            job.optimizer.param_groups[0]["lr"] = 0.07
        ckpt.save()
    for job in new.values():
        job.optimizer.param_groups[1]["weight_decay"] = 0.9
    with unbroken.Checkpointer(directory, state_of(new)) as ckpt:
        assert ckpt.restore().step == 1
    wrong = []
    checks = {"options": options, "values": contents, "types and places": kinds}
    for when in ("restored", "a step later"):
        for name in old:
            wrong += [f"{name}: {what}, {when}" for what, of in checks.items() if of(old[name]) != of(new[name])]
        for job in (*old.values(), *new.values()):
            job.step(2)
    return wrong, sum(len(contents(job)) for job in old.values())


def test_every_value_and_option_of_a_sharded_optimizer_comes_back_as_what_it_was(ranks, tmp_path):
    for wrong, compared in ranks.run_all_well(f"{MODULE}:round_trip", 2, str(tmp_path)):
        assert wrong == [] and compared > 60


def a_fresh_state_and_a_restored_one(rank, world_size, directory):
    """The fused optimizer keeps its counter beside the parameter, the others keep it on the host."""
    saved = make("fsdp2", "Adam", seed=1)
    saved.step(0)
    with unbroken.Checkpointer(directory, saved.state, on_error="raise") as ckpt:
        ckpt.save()
    fresh, restored = make("fsdp2", "Adam", seed=1), make("fsdp2", "Adam", seed=1)
    fresh.step(0)
    with unbroken.Checkpointer(directory, restored.state) as ckpt, torch.device("meta"):
        ckpt.restore()
    return [key for key, kind in kinds(fresh).items() if kinds(restored).get(key) != kind]


def test_b064_restored_state_lies_where_a_fresh_one_would_whatever_the_default_device_is(ranks, tmp_path):
    assert ranks.run_all_well(f"{MODULE}:a_fresh_state_and_a_restored_one", 2, str(tmp_path)) == [[], []]


def steps_while_the_save_is_written(rank, world_size, directory):
    """Train on while nothing has reached the disk yet, restore twice, and train one of the two."""
    job = make("fsdp2", "Adam", seed=1)
    go_on = threading.Event()
    with unbroken.Checkpointer(directory, job.state, on_error="raise") as ckpt:
        ckpt.restore()
        store = ckpt._session.store
        create = store.create_in_parts
        store.create_in_parts = lambda name, data: (go_on.wait(30), create(name, data))
        job.step(0)
        ckpt.step()
        at_save = contents(job)
        ckpt.save()
        for seed in (1, 2):
            job.step(seed)
        go_on.set()
    one, other = make("fsdp2", "Adam", seed=2), make("fsdp2", "Adam", seed=3)
    for each in (one, other):
        with unbroken.Checkpointer(directory, each.state) as ckpt:
            ckpt.restore()
    restored = contents(one)
    other.step(1)
    return restored == at_save, restored == contents(one), restored == contents(other)


def test_b066_neither_a_save_nor_a_restore_shares_memory_with_what_trains_on(ranks, tmp_path):
    results = ranks.run_all_well(f"{MODULE}:steps_while_the_save_is_written", 2, str(tmp_path))
    assert results == [(True, True, False)] * 2


def wrap_in_the_wrong_order(rank, world_size, directory, layout):
    """The script's optimizer or its Checkpointer knows the parameters of the bare model only."""
    good = make(layout, "Adam", seed=1)
    with unbroken.Checkpointer(directory, good.state, on_error="raise") as ckpt:
        good.step(0)
        ckpt.save()
    net = Net(seed=2)
    if layout == "fsdp1":  # which leaves the parameters the same objects, and gives them flat shards
        wrapped = fsdp1(net)
    state = {"model": net, "optimizer": OPTIMIZERS["Adam"](net)}
    with unbroken.Checkpointer(directory, state, on_error="raise") as ckpt:
        ckpt.restore()
        wrapped = fsdp2(net)  # which replaces them
        wrapped(torch.ones(1, 6))
        ckpt.step()
        ckpt.save()


def test_b063_a_model_that_is_wrapped_too_late_or_registered_without_its_wrapper_is_told(ranks, tmp_path):
    told = {
        "fsdp1": ("StateMismatch", r"model/\S+ is float32 \[\d+\], and was float32 \[\d+"),
        "fsdp2": ("UsageError", r"optimizer: parameter 0 of group 0, of shape \[10, 6\], belongs to nothing"),
    }
    for layout, (kind, text) in told.items():
        for result in ranks.run(f"{MODULE}:wrap_in_the_wrong_order", 2, str(tmp_path / layout), layout):
            assert isinstance(result, Raised) and result.kind == kind, result
            assert re.search(text, result.text), result.text
