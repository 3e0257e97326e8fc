"""FSDP1 with flat parameters only, its default: it goes on bit for bit, and what cannot be told apart is refused."""

import contextlib
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy

import independent_reader
import unbroken
from processes import Raised
from sharded.models import CPU, LAYOUTS, Job, Net, make_job, raw

MODULE = "sharded.test_flat"


class Odd(nn.Module):
    """Tied weights, one that is registered twice, an empty parameter, one smaller than the number of ranks."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.tied = nn.Linear(5, 5)
        self.tied.weight = self.first.weight
        self.twice = nn.Sequential(self.first, nn.Linear(5, 1, bias=False))

    def forward(self, x):
        return self.twice(self.tied(self.first(x))) + self.empty.sum()


def wrapped(net, **options):
    return FullyShardedDataParallel(net, device_id=CPU, **options)


OPTIMIZERS = {
    "adam": lambda ps: torch.optim.Adam(ps, 0.1, amsgrad=True),
    "fused": lambda ps: torch.optim.AdamW(ps, 0.1, fused=True),
    "sgd": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, 0.1),  # makes its state at once
}
STRATEGIES = {
    "full": {},
    "grad_op": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "none": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "mixed": {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
}


def train(rank, world_size, directory, strategy, optimizer, begin, until):
    """Steps on data of each rank's own; all of this rank's memory at the end, padding apart."""
    model = wrapped(Odd(seed=1 if begin == 0 else 2), **STRATEGIES[strategy])
    job = Job(model, OPTIMIZERS[optimizer](model.parameters()))
    with unbroken.Checkpointer(directory, job.state, on_error="raise") as ckpt:
        restored = ckpt.restore()
        assert (restored.step if restored else 0) == begin
        for step in range(begin, until):
            generator = torch.Generator().manual_seed(10 * step + rank)
            model(torch.randn(4, 5, generator=generator)).square().sum().backward()
            job.optimizer.step()
            job.optimizer.zero_grad()
            ckpt.step()
            if step == 2 and begin == 0:
                ckpt.save()
    flat = model._handle.flat_param
    held = flat.numel() - flat._shard_numel_padded
    told = {"": raw(flat[:held])}
    for key, item in job.optimizer.state[flat].items():
        assert not item.dim() or not any(raw(item[held:])), "padding"
        told[key] = raw(item[:held] if item.dim() else item), item.dtype, tuple(item.shape), item.stride(), item.device
    return told


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_training_is_the_straight_one_bit_for_bit(ranks, tmp_path, strategy, optimizer):
    case = f"{MODULE}:train"
    straight = ranks.run_all_well(case, 4, str(tmp_path), strategy, optimizer, 0, 6)
    assert ranks.run_all_well(case, 4, str(tmp_path), strategy, optimizer, 3, 6) == straight
    assert strategy == "none" or len({told[""] for told in straight}) == 4


def odd_job(kind, seed):
    model = Odd(seed) if kind == "single" else wrapped(Odd(seed), use_orig_params=kind == "true")
    return Job(model, torch.optim.AdamW(model.parameters(), 0.1))


def pass_on(rank, world_size, old, new, kinds):
    """Restore from one directory and save to another; the first has nothing to restore."""
    job = odd_job(kinds[0], seed=1)
    if old is None:
        job.model(torch.ones(2, 5)).sum().backward()
        job.optimizer.step()
    else:
        with unbroken.Checkpointer(old, job.state) as ckpt:
            ckpt.restore()
    with unbroken.Checkpointer(new, job.state, on_error="raise") as ckpt:
        ckpt.step()
        ckpt.save()
    return None


def test_tied_and_empty_parameters_pass_through_flat_ones_and_back(ranks, tmp_path):
    """Every directory holds the same tensors with the same bytes, whoever wrote it."""
    chain = [("single", 1), ("flat", 4), ("true", 3), ("flat", 2), ("single", 1)]
    old = None
    for index, (kind, world_size) in enumerate(chain):
        new = str(tmp_path / str(index))
        ranks.run_all_well(f"{MODULE}:pass_on", world_size, old, new, (kind,))
        old = new
    contents = [
        {
            name: value.tobytes()
            for name, value in independent_reader.read(independent_reader.newest(tmp_path / str(index)), 0)[0].items()
            if not name.startswith("rng")
        }
        for index in range(len(chain))
    ]
    elements = [{name: value for name, value in content.items() if value} for content in contents]
    assert all(each == elements[0] for each in elements), [sorted(each) for each in elements]
    assert "model/tied.weight" not in elements[0] and "optimizer/state/model/twice.1.weight/exp_avg" in elements[0]


def half_a_window(rank, world_size, directory, layout, begin):
    """Half a window, a checkpoint, and what comes of the whole window; or the second half alone."""
    job = make_job(layout, seed=1)
    rows = torch.randn(8, 6, generator=torch.Generator().manual_seed(4))
    with unbroken.Checkpointer(directory, job.state, on_error="raise") as ckpt:
        assert begin == (ckpt.restore() is None)
        if begin:
            job.model(rows[:4]).square().sum().backward()
            ckpt.step(accumulating=True)
            ckpt.save()
            ckpt.wait()
        assert ckpt.micro_step == 1
        job.model(rows[4:]).square().sum().backward()
        job.optimizer.step()
        ckpt.step()
    return job.content()


@pytest.mark.parametrize(
    ("layout", "others"),
    [
        ("fsdp1_flat", [("fsdp1_flat", 4), ("fsdp1_flat", 2), ("fsdp1", 4), ("fsdp1", 2), ("fsdp2", 4)]),
        ("fsdp1", [("fsdp1_flat", 4), ("fsdp1_flat", 2), ("hybrid_fsdp1_flat", 4)]),
        ("fsdp2", [("fsdp1_flat", 4)]),
        ("hybrid_fsdp1_flat", [("hybrid_fsdp1_flat", 4), ("fsdp1_flat", 2)]),
        ("whole_fsdp1_flat", [("whole_fsdp1_flat", 4), ("ddp", 4)]),
        ("ddp", [("whole_fsdp1_flat", 4)]),
    ],
)
def test_gradients_of_half_a_window_go_on_in_other_layouts(ranks, tmp_path, layout, others):
    whole = ranks.run_all_well(f"{MODULE}:half_a_window", 4, str(tmp_path / "run"), layout, True)[0]
    for other, world_size in others:
        for result in ranks.run_all_well(f"{MODULE}:half_a_window", world_size, str(tmp_path / "run"), other, False):
            common = whole.keys() & result.keys()
            assert len(common) >= 7 and {k: whole[k] for k in common} == {k: result[k] for k in common}, other


def test_partial_gradients_that_no_rank_reduced_do_not_go_into_shards(ranks, tmp_path):
    ranks.run_all_well(f"{MODULE}:half_a_window", 4, str(tmp_path), "ddp", True)
    for layout in ("fsdp1_flat", "fsdp1", "fsdp2"):
        for result in ranks.run(f"{MODULE}:half_a_window", 4, str(tmp_path), layout, False):
            assert isinstance(result, Raised) and result.kind == "StateMismatch", result
            assert "is what this rank had summed alone, and cannot be had in another layout" in result.text


def save_uneven(rank, world_size, directory, steps):
    """A job whose `few` trains only in some of the steps."""
    job = make_job("ddp", seed=1)
    with unbroken.Checkpointer(directory, job.state, on_error="raise") as ckpt:
        for step in range(2):
            job.model(torch.ones(2, 6)).square().sum().backward()
            if step not in steps:
                job.model.module.few.weight.grad = None
            job.optimizer.step()
            job.optimizer.zero_grad()
            ckpt.step()
        ckpt.save()


def restore_uneven(rank, world_size, directory, layout):
    job = make_job(layout, seed=2)
    before = [raw(p) for p in job.model.parameters()]
    told = ""
    with unbroken.Checkpointer(directory, job.state) as ckpt:
        try:
            ckpt.restore()
        except unbroken.errors.StateMismatch as error:
            told = str(error)
    return told, before == [raw(p) for p in job.model.parameters()]


def test_parts_of_a_flat_parameter_that_do_not_agree_are_refused(ranks, tmp_path):
    directory = str(tmp_path / "none")
    ranks.run_all_well(f"{MODULE}:save_uneven", 2, directory, [])
    for told, untouched in ranks.run_all_well(f"{MODULE}:restore_uneven", 2, directory, "fsdp1_flat"):
        assert "optimizer's state of " in told and "that of 1 (model/few.weight) is not" in told, told
        assert untouched
    assert ranks.run_all_well(f"{MODULE}:restore_uneven", 2, directory, "fsdp1") == [("", False)] * 2
    directory = str(tmp_path / "one")
    ranks.run_all_well(f"{MODULE}:save_uneven", 2, directory, [1])
    told = [text for text, _ in ranks.run_all_well(f"{MODULE}:restore_uneven", 2, directory, "fsdp1_flat")]
    pattern = r"optimizer/state/model/down.\w+/step is 2.0 in the checkpoint, and .*few.weight/step is 1.0; .* one flat"
    assert any(re.search(pattern, text) for text in told), told


class Rows(torch.optim.Optimizer):
    """Keeps something that is neither of the parameter's shape nor one number."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["rows"] = self.made()

    def made(self):
        return torch.ones(2)


class Listed(Rows):
    def made(self):
        return [torch.ones(2)]


class Foreign(torch.optim.SGD):
    def state_dict(self):
        return super().state_dict()


def refused(rank, world_size, directory, what):
    net = Net(seed=1)
    if what == "transposed":
        net.up.weight = nn.Parameter(net.up.weight.detach().t().contiguous().t())
    model = LAYOUTS["fsdp1_flat"](net)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = {"rows": Rows, "listed": Listed, "foreign": Foreign}.get(what, torch.optim.SGD)(trained)
    model_there = net if what == "unwrapped" else model
    with contextlib.ExitStack() as stack:
        if what == "no_sync":
            stack.enter_context(model.no_sync())
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step() if what in ("rows", "listed") else None
    state = {"model": model_there, "optimizer": optimizer}
    with unbroken.Checkpointer(directory, state, on_error="raise") as ckpt:
        ckpt.step(accumulating=what == "no_sync")
        ckpt.save()
        dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("rows", "UnsupportedValue", r"rows of model/\S+, of shape \[2\]: .* cannot be told apart by parameter"),
        ("listed", "UnsupportedValue", r"optimizer/state/model/\S+: .* cannot be told apart by parameter"),
        (
            "foreign",
            "UnsupportedValue",
            r"optimizer: Foreign has a state_dict of its own, and model/\S+ is only a part",
        ),
        ("transposed", "UnsupportedValue", r"model/up.weight was not laid out row by row"),
        ("unwrapped", "UsageError", r"model/_flat_param is the flat parameter of a FullyShardedDataParallel"),
        ("no_sync", "UnsupportedValue", r"the gradient of model/\S+ is not reduced yet \(no_sync\)"),
    ],
)
def test_what_cannot_be_told_apart_by_parameter_is_refused(ranks, tmp_path, what, kind, text):
    for result in ranks.run(f"{MODULE}:refused", 2, str(tmp_path), what):
        assert isinstance(result, Raised) and result.kind == kind, result
        assert re.search(text, result.text), result.text
    assert not list(tmp_path.glob("step-*/manifest.json"))


def restore_while_gathered(rank, world_size, directory):
    """With SHARD_GRAD_OP parameters are whole from a forward until its backward, and what is written there is lost."""
    model = wrapped(Odd(seed=1), use_orig_params=True, **STRATEGIES["grad_op"])
    with unbroken.Checkpointer(directory, {"model": model}, on_error="raise") as ckpt:
        ckpt.step()
        ckpt.save()
    model(torch.ones(2, 5))
    with unbroken.Checkpointer(directory, {"model": model}, on_error="raise") as ckpt:
        ckpt.restore()


def test_a_restore_between_a_forward_and_its_backward_is_refused_where_parameters_are_whole(ranks, tmp_path):
    for result in ranks.run(f"{MODULE}:restore_while_gathered", 2, str(tmp_path)):
        assert isinstance(result, Raised) and result.kind == "StateMismatch", result
        assert "model is gathered for a backward that has not come" in result.text


def restore_after_a_forward(rank, world_size, directory, orig):
    """A forward without a backward leaves a gathered copy with some strategies."""
    told = []
    for name, options in STRATEGIES.items():
        old, new = (wrapped(Odd(seed), use_orig_params=orig, **options) for seed in (1, 2))
        with unbroken.Checkpointer(f"{directory}/{name}", {"model": old}, on_error="raise") as ckpt:
            ckpt.step()
            ckpt.save()
        x = torch.ones(2, 5)
        with torch.no_grad():
            before = new(x)
            with unbroken.Checkpointer(f"{directory}/{name}", {"model": new}) as ckpt:
                ckpt.restore()
            told.append((name, raw(before) != raw(old(x)), raw(new(x)) == raw(old(x))))
    return told


@pytest.mark.parametrize("orig", [False, True])
def test_a_forward_before_the_restore_leaves_nothing_stale(ranks, tmp_path, orig):
    for told in ranks.run_all_well(f"{MODULE}:restore_after_a_forward", 2, str(tmp_path), orig):
        assert told == [(name, True, True) for name in STRATEGIES]
