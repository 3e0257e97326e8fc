"""A sharded job loses ranks and gets them back in the middle of an epoch: the same samples, steps, rates and losses."""

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import unbroken
from processes import Raised
from sharded.models import make_job

MODULE = "sharded.test_elastic"
SAMPLES, BATCH = 96, 2
STEPS = 18


def make_loader(rank, world_size, choice):
    rows = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(rows, torch.arange(SAMPLES))
    sampler = DistributedSampler(data, world_size, rank, seed=3)
    return unbroken.resumable(DataLoader(data, BATCH, sampler=sampler, drop_last=True), when_ranks_change=choice)


def train(rank, world_size, directory, until, choice):
    """Train up to a step; per step the loss of this rank, its samples and the rate."""
    job = make_job("fsdp2" if world_size > 1 else "single", seed=1)
    scheduler = torch.optim.lr_scheduler.StepLR(job.optimizer, 4, 0.5)
    loader = make_loader(rank, world_size, choice)
    state = {**job.state, "scheduler": scheduler, "loader": loader}
    told = {}
    with unbroken.Checkpointer(directory, state, every=unbroken.Every(steps=1), on_error="raise") as ckpt:
        ckpt.restore()
        losses, samples = [], []
        while ckpt.global_step < until:
            for rows, ids in loader:
                loss = job.model(rows).square().mean()
                (loss / loader.micro_batches).backward()
                losses.append(loss.item())
                samples.append(ids.tolist())
                if len(losses) < loader.micro_batches:
                    ckpt.step(accumulating=True)
                    continue
                job.optimizer.step()
                job.optimizer.zero_grad()
                scheduler.step()
                told[ckpt.global_step + 1] = (losses, samples, job.optimizer.param_groups[0]["lr"])
                losses, samples = [], []
                ckpt.step()
                if ckpt.global_step >= until:
                    break
    return told


def global_run(results):
    """Per step: the mean loss, the samples of all ranks, and the rate."""
    steps = {}
    for step, (_, _, rate) in results[0].items():
        losses = [loss for result in results for loss in result[step][0]]
        samples = [sample for result in results for batch in result[step][1] for sample in batch]
        steps[step] = (sum(losses) / len(losses), sorted(samples), rate)
    return steps


@pytest.mark.parametrize("choice", ["accumulate", "batch"])
def test_half_the_ranks_go_and_come_back_in_the_middle_of_an_epoch(ranks, tmp_path, choice):
    straight = global_run(ranks.run_all_well(f"{MODULE}:train", 4, str(tmp_path / "straight"), STEPS, choice))
    changing = {}
    for world_size, until in [(4, 5), (2, 9), (1, 13), (4, STEPS)]:
        part = ranks.run_all_well(f"{MODULE}:train", world_size, str(tmp_path / "run"), until, choice)
        changing |= global_run(part)
    assert changing.keys() == straight.keys()
    for step, (loss, samples, rate) in straight.items():
        assert changing[step][1:] == (samples, rate), f"step {step}"
        assert changing[step][0] == pytest.approx(loss, rel=1e-4), "losses agree to the order of reduction"
    first_epoch = [sample for step in range(1, SAMPLES // (4 * BATCH) + 1) for sample in changing[step][1]]
    assert sorted(first_epoch) == list(range(SAMPLES)), "each sample once"


def test_another_number_of_ranks_is_refused_where_the_user_chose_so(ranks, tmp_path):
    ranks.run_all_well(f"{MODULE}:train", 4, str(tmp_path), 3, "refuse")
    for result in ranks.run(f"{MODULE}:train", 2, str(tmp_path), 5, "refuse"):
        assert isinstance(result, Raised) and result.kind == "StateMismatch"
        assert 'this job has 2, which when_ranks_change="refuse" forbids' in result.text
    for result in ranks.run(f"{MODULE}:train", 3, str(tmp_path), 5, "accumulate"):
        assert isinstance(result, Raised) and "no multiple of the 6 that 3 ranks read at once" in result.text


def accumulate(rank, world_size, directory, layout, begin, sync):
    """Half a window, a checkpoint, and what comes of the whole window; or the second half alone."""
    job = make_job(layout if world_size > 1 else "single", seed=1)
    rows = torch.randn(8, 6, generator=torch.Generator().manual_seed(4))
    with unbroken.Checkpointer(directory, job.state, on_error="raise") as ckpt:
        restored = ckpt.restore()
        assert begin == (restored is None)
        if begin:
            if not sync:
                job.model.set_requires_gradient_sync(False)
            job.model(rows[:4]).square().sum().backward()
            ckpt.step(accumulating=True)
            ckpt.save()
            ckpt.wait()
        assert ckpt.micro_step == 1
        job.model(rows[4:]).square().sum().backward()
        job.optimizer.step()
        ckpt.step()
    return job.content()


@pytest.mark.parametrize("layout", ["fsdp2", "two_dimensional", "hsdp"])
def test_sharded_gradients_of_half_a_window_restore_into_any_number_of_ranks(ranks, tmp_path, layout):
    whole = ranks.run_all_well(f"{MODULE}:accumulate", 4, str(tmp_path), layout, True, True)[0]
    assert ranks.run_all_well(f"{MODULE}:accumulate", 4, str(tmp_path), layout, False, True) == [whole] * 4
    if layout == "fsdp2":
        for world_size in (1, 2):
            other = ranks.run_all_well(f"{MODULE}:accumulate", world_size, str(tmp_path), layout, False, True)[0]
            assert other == whole, "all ranks read the same rows, so that no order of reduction matters"


def test_gradients_that_fsdp_has_not_reduced_are_refused(ranks, tmp_path):
    for result in ranks.run(f"{MODULE}:accumulate", 4, str(tmp_path), "fsdp2", True, False):
        assert isinstance(result, Raised) and result.kind == "UnsupportedValue", result
        assert "FSDP keeps gradients of model" in result.text
