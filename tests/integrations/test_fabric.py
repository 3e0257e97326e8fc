"""Lightning Fabric: a job that was stopped and started again is the job that was not."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("lightning")

import torch
from lightning.fabric import Fabric
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch import nn
from torch.utils.data import DataLoader

import unbroken
from integrations.fabric_jobs import (
    BATCH,
    SAMPLES,
    Average,
    Job,
    Net,
    Noisy,
    Run,
    digest,
    make_fabric,
    train,
    train_fabrics_way,
)
from unbroken.errors import UsageError
from unbroken.integrations.fabric import ResumableFabricLoader, checkpointer, private

JOBS = "integrations.fabric_jobs"
PER_EPOCH = SAMPLES // BATCH


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[int, Any]:
    """What two starts told of each step; a step may be cut in two."""
    steps = dict(first["told"])
    for step, told in second["told"].items():
        steps[step] = [*steps.get(step, []), *told]
    return steps


def assert_goes_on(whole: dict[str, Any], first: dict[str, Any], second: dict[str, Any]) -> None:
    """The second start ends as if the first had not been stopped."""
    assert joined(first, second) == whole["told"]
    assert {**second, "told": None} == {**whole, "told": None}


ALONE = {
    "plain": Job(),
    "accumulating": Job(accumulate=3),
    "several optimizers": Job(optimizers=2),
    "workers": Job(workers=1),
    "bf16-mixed": Job(precision="bf16-mixed"),
    "bf16-true": Job(precision="bf16-true"),
    "a scaler": Job(precision="16-mixed", accumulate=2),
    "validation": Job(validate="before the step"),
    "compiled before": Job(compiled="before"),
    "compiled after": Job(compiled="after"),
    "a stream": Job(data="stream"),
    "a weighted sampler": Job(data="weighted"),
    "a sampler of one's own": Job(data="own sampler"),
    "a batch sampler": Job(data="batch sampler"),
}


@pytest.mark.parametrize("job", ALONE.values(), ids=list(ALONE))
def test_alone_a_job_goes_on_from_any_batch(tmp_path, job):
    steps = PER_EPOCH // job.accumulate + 4
    whole = train(0, 1, str(tmp_path / "whole"), job, steps)
    edge = PER_EPOCH // job.accumulate
    stops = [(1, 0), (edge - 1, job.accumulate - 1), (edge, 0), (edge + 1, 0)]
    if job.workers:
        stops = stops[1:2]  # workers that persist take five seconds each to end
    for stop in stops:
        directory = str(tmp_path / "-".join(map(str, stop)))
        first = train(0, 1, directory, job, steps, stop)
        assert_goes_on(whole, first, train(0, 1, directory, job, steps))


TOGETHER = {
    "DDP": (2, Job("ddp", accumulate=2, validate="before the step")),
    "DDP on four": (4, Job("ddp", optimizers=2, precision="bf16-mixed")),
    "DDP, weighted": (2, Job("ddp", data="weighted")),
    "DDP, a sampler of one's own": (2, Job("ddp", data="own sampler", compiled="before")),
    "FSDP2": (2, Job("fsdp2", accumulate=2, validate="before the step")),
    "FSDP2 on four": (4, Job("fsdp2", precision="bf16-true")),
}


@pytest.mark.parametrize(("world_size", "job"), TOGETHER.values(), ids=list(TOGETHER))
def test_on_several_ranks_a_job_goes_on_from_any_batch(ranks, tmp_path, world_size, job):
    def start(name, *more):
        return ranks.run_all_well(f"{JOBS}:train", world_size, str(tmp_path / name), job, *more)

    edge = PER_EPOCH // world_size // job.accumulate
    steps = edge + 3
    whole = start("whole", steps)
    for stop in [(1, job.accumulate - 1), (2, 0), (edge, 0)]:
        first = start(f"{stop}", steps, stop)
        for each in zip(whole, first, start(f"{stop}", steps), strict=True):
            assert_goes_on(*each)


def test_saving_at_every_step_equals_never_saving(ranks, tmp_path):
    job = Job("ddp", accumulate=2, validate="before the step")
    often, never = (
        ranks.run_all_well(f"{JOBS}:train", 2, str(tmp_path / name), job, 8, None, every)
        for name, every in [("often", 1), ("never", None)]
    )
    assert often == never


@pytest.mark.parametrize("choice", ["batch", "accumulate"])
def test_a_rank_goes_and_comes_back_in_the_middle_of_an_epoch(ranks, tmp_path, choice):
    job = Job("ddp", when_ranks_change=choice)
    samples: dict[int, list[int]] = {}
    for world_size, until in [(2, 2), (1, 4), (2, PER_EPOCH + 2)]:
        alone = Job("auto", when_ranks_change=choice) if world_size == 1 else job
        told = ranks.run_all_well(f"{JOBS}:train", world_size, str(tmp_path), alone, until)
        batches = 2 if world_size == 1 and choice == "accumulate" else 1
        assert {len(step) for step in told[0]["told"].values()} == {batches}
        for step in told[0]["told"]:
            samples[step] = sorted(i for each in told for _, ids in each["told"][step] for i in ids)
    whole = ranks.run_all_well(f"{JOBS}:train", 2, str(tmp_path / "whole"), job, PER_EPOCH + 2)
    expected = {
        step: sorted(i for each in whole for _, ids in each["told"][step] for i in ids) for step in whole[0]["told"]
    }
    assert samples == expected, "the same samples in every step"
    first_epoch = [sample for step in range(1, PER_EPOCH // 2 + 1) for sample in samples[step]]
    assert sorted(first_epoch) == list(range(SAMPLES)), "each sample once"


def test_a_run_begun_on_one_device_goes_on_with_ddp(ranks, tmp_path):
    first = ranks.run_all_well(f"{JOBS}:train", 1, str(tmp_path), Job(), 3)[0]
    rest = ranks.run_all_well(f"{JOBS}:train", 2, str(tmp_path), Job("ddp"), PER_EPOCH)
    seen = [i for told in (first, *rest) for step in told["told"].values() for _, ids in step for i in ids]
    assert sorted(seen) == list(range(SAMPLES))


def test_the_scaler_and_the_callbacks_are_saved_unasked(tmp_path):
    run = Run(0, 1, str(tmp_path), Job(precision="16-mixed"), 1)
    run.go(5, None)
    scaler = run.fabric.strategy.precision.state_dict()
    run.ckpt.close()
    assert scaler["scale"] != 8.0 and run.average.value != 0.0
    again = Run(0, 1, str(tmp_path), Job(precision="16-mixed"), 1)
    assert again.fabric.strategy.precision.state_dict()["scale"] == 8.0
    again.ckpt.restore()
    assert again.fabric.strategy.precision.state_dict() == scaler
    assert again.average.value == run.average.value
    again.ckpt.close()


def test_a_precision_plugin_that_the_script_registers_is_not_saved_twice(tmp_path):
    fabric = make_fabric(0, 1, precision="16-mixed")
    model = fabric.setup_module(Net())
    with checkpointer(fabric, tmp_path, {"model": model, "mine": fabric.strategy.precision}) as ckpt:
        fabric.backward(model(torch.ones(4, 6)).sum())
        ckpt.step()
        ckpt.save()
        ckpt.wait()
    fabric.strategy.precision.scaler.update(2.0)
    with checkpointer(fabric, tmp_path, {"model": model, "mine": fabric.strategy.precision}) as ckpt:
        assert ckpt.restore() is not None
        assert fabric.strategy.precision.scaler.get_scale() == 8.0
    with pytest.raises(UsageError, match=r"'scaler' is what the state of Fabric's own scaler is called"):
        checkpointer(fabric, tmp_path, {"model": model, "scaler": torch.zeros(1)})


def test_callbacks_of_one_class_are_told_apart_and_those_without_state_left_out(tmp_path):
    averages = [Average(), Average()]
    fabric = make_fabric(0, 1, callbacks=[*averages, object()])
    model = fabric.setup_module(Net())
    averages[0].value, averages[1].value = 1.0, 2.0
    with checkpointer(fabric, tmp_path, {"model": model}) as ckpt:
        ckpt.step()
        ckpt.save()
    averages[0].value = averages[1].value = 0.0
    with checkpointer(fabric, tmp_path, {"model": model}) as ckpt:
        ckpt.restore()
    assert [average.value for average in averages] == [1.0, 2.0]


def test_fabrics_own_checkpoints_go_on_working_beside_ours(tmp_path):
    run = Run(0, 1, str(tmp_path / "ours"), Job(), 1)
    run.go(3, None)
    state = {"model": run.model, "optimizer": run.optimizers[0], "loader": run.loader, "step": 3}
    run.fabric.save(tmp_path / "theirs.ckpt", state)
    run.ckpt.close()
    other = Run(0, 1, str(tmp_path / "other"), Job(), 1)
    assert digest(other.model.state_dict()) != digest(run.model.state_dict())
    rest = other.fabric.load(tmp_path / "theirs.ckpt", {"model": other.model, "optimizer": other.optimizers[0]})
    assert digest(other.model.state_dict()) == digest(run.model.state_dict())
    assert rest["step"] == 3
    other.ckpt.close()


def test_a_loader_stays_fabrics_and_tells_what_a_resumable_one_tells(tmp_path):
    run = Run(0, 1, str(tmp_path), Job(), None)
    loader: Any = run.loader
    assert isinstance(loader, ResumableFabricLoader)
    assert (len(loader), loader.epoch, loader.batch_size, loader.micro_batches) == (PER_EPOCH, 0, BATCH, 1)
    assert len(list(loader)) == PER_EPOCH and loader.epoch == 1
    run.ckpt.close()


def test_a_checkpoint_does_not_depend_on_the_wrapping(tmp_path):
    train(0, 1, str(tmp_path), Job(compiled="before"), 3)
    told = train(0, 1, str(tmp_path), Job(compiled="after"), 6)["told"]
    assert list(told) == [4, 5, 6]


def test_what_cannot_be_exact_is_refused_at_the_start(tmp_path):
    fabric = make_fabric(0, 1)
    model = fabric.setup_module(Net())
    with pytest.raises(UsageError, match=r"model is the module inside of what fabric.setup\(\) returned"):
        checkpointer(fabric, tmp_path, {"model": model.module})
    with pytest.raises(UsageError, match=r"loader is a .*DataLoader.*register unbroken.resumable"):
        checkpointer(fabric, tmp_path, {"model": model, "loader": DataLoader(Noisy())})
    with pytest.raises(UsageError, match=r"takes a lightning.fabric.Fabric, not a Net"):
        checkpointer(model.module, tmp_path, {"model": model})
    with pytest.raises(UsageError, match=r"step is a int, which cannot be restored in place: ask ckpt.global_step"):
        checkpointer(fabric, tmp_path, {"model": model, "step": 0})
    several = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    with pytest.raises(UsageError, match=r"comes after fabric.launch"):
        checkpointer(several, tmp_path, {"model": nn.Linear(2, 2)})
    with pytest.raises(UsageError, match=r"pass the DataLoader that it was made from"):
        unbroken.resumable(fabric.setup_dataloaders(DataLoader(Noisy())))


def test_what_fabric_forgets_by_itself(tmp_path):
    """The left column of the table in docs/fabric.md."""
    path, job = str(tmp_path / "theirs.ckpt"), Job(precision="16-mixed")
    whole = train_fabrics_way(path, job, PER_EPOCH, begin=5)
    resumed = train_fabrics_way(path, job, PER_EPOCH, begin=5)
    assert list(resumed["told"]) == list(range(6, PER_EPOCH + 1))
    first_again = [resumed["told"][step][0][1] for step in (6, 7)]
    assert first_again == [whole["told"][step][0][1] for step in (1, 2)], "the epoch began again"
    assert resumed["weights"] != whole["weights"]
    assert resumed["scaler"] != whole["scaler"]


def test_the_private_names_are_as_fabric_has_them():
    fabric = make_fabric(0, 1)
    private.check_imported()
    private.check(fabric, private.OF_FABRIC)
    private.check(fabric.setup_module(Net()), private.OF_A_MODULE)
    private.check(fabric.setup_dataloaders(DataLoader(Noisy())), private.OF_A_LOADER)
    private.check(DistributedSamplerWrapper([2, 1, 0], 2, 0).dataset, private.OF_A_DEALT_SAMPLER)
    with pytest.raises(UsageError, match=r"Fabric\._gone is not as unbroken knows it from lightning 2\.6\.6"):
        private.check(fabric, ["_gone"])
