"""Whatever is raised inside a save or a restore: all that was taken is given back, and nothing waits for it."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import unbroken
from unbroken import session
from unbroken.errors import NoUsableCheckpoint, SaveFailed, UnsupportedValue, UsageError
from unbroken.store.local import LocalStore

MODULE = "test_exceptions"
WAIT_S = 30


class Job:
    def __init__(self, path, **options):
        self.weight = torch.zeros(1000)
        self.ckpt = unbroken.Checkpointer(path, {"weight": self.weight}, keep=None, write_deadline_s=WAIT_S, **options)

    def step(self):
        self.weight.fill_(self.ckpt.global_step + 1)
        self.ckpt.step()
        self.ckpt.save()


def committed(path):
    return sorted(int(manifest.parent.name.partition("-")[2]) for manifest in path.glob("step-*/manifest.json"))


def raise_once(monkeypatch, error):
    """The next snapshot fails so; tells nothing of it to anybody."""
    real, left = session.take, [error]

    def take(*arguments):
        if left:
            raise left.pop()
        return real(*arguments)

    monkeypatch.setattr(session, "take", take)


@pytest.mark.parametrize("error", [MemoryError("no room"), OSError(12, "Cannot allocate memory"), RuntimeError("oops")])
def test_a_snapshot_that_fails_costs_its_save_and_nothing_else(tmp_path, monkeypatch, error):
    job = Job(tmp_path)
    job.step()
    for _ in range(3):  # more often than there are arenas
        raise_once(monkeypatch, error)
        job.step()
        with pytest.raises(SaveFailed, match=type(error).__name__):
            job.ckpt.wait()
    job.step()
    job.ckpt.close()
    assert committed(tmp_path) == [1, 5]


def test_an_interrupt_inside_a_save_leaves_a_job_that_can_save_the_same_step(tmp_path, monkeypatch):
    job = Job(tmp_path)
    job.step()
    raise_once(monkeypatch, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        job.step()
    job.ckpt.save()
    job.ckpt.wait()
    job.ckpt.close()
    assert committed(tmp_path) == [1, 2]


def test_an_interrupt_while_the_disk_is_waited_for_leaves_a_job_that_can_save_the_same_step(tmp_path, monkeypatch):
    job = Job(tmp_path, slots=1)
    job.step()
    job.ckpt.wait()
    go_on = threading.Event()
    create = LocalStore.create_in_parts
    monkeypatch.setattr(
        LocalStore, "create_in_parts", lambda store, name, parts: (go_on.wait(WAIT_S), create(store, name, parts))
    )
    monkeypatch.setattr(session, "SMALL_BYTES", 0)
    job.step()
    writer = job.ckpt._session._writer

    def interrupt(**_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(writer.arenas, "get", interrupt)
        with pytest.raises(KeyboardInterrupt):
            job.step()
    go_on.set()
    job.ckpt.save()
    job.ckpt.wait()
    job.ckpt.close()
    assert committed(tmp_path) == [1, 2, 3]


def fail_on_one_rank(rank, world_size, directory):
    model = nn.Linear(4, 4)
    ckpt = unbroken.Checkpointer(directory, {"model": model}, write_deadline_s=WAIT_S, keep=None)
    real, outcomes = session.take, []

    def take(*arguments):
        if rank == 1 and ckpt.global_step == 2:
            raise MemoryError("no room")
        return real(*arguments)

    session.take = take
    for _ in range(3):
        ckpt.step()
        ckpt.save()
        try:
            ckpt.wait()
            outcomes.append("")
        except SaveFailed as error:
            outcomes.append(str(error))
    session.take = real
    ckpt.close()
    return outcomes


def test_a_snapshot_that_fails_on_one_rank_is_told_to_all_at_once(ranks, tmp_path):
    for first, second, third in ranks.run_all_well(f"{MODULE}:fail_on_one_rank", 2, str(tmp_path)):
        assert (first, third) == ("", "")
        assert "rank 1: MemoryError: no room" in second


def test_a_forked_child_is_told_that_it_cannot_save(tmp_path):
    job = Job(tmp_path)
    job.step()
    job.ckpt._pid += 1
    with pytest.raises(UsageError, match="forked"):
        job.ckpt.save()
    job.ckpt._pid -= 1
    job.ckpt.close()


class Cached(nn.Module):
    """A weight, and from the second step on a buffer that is not persistent."""

    def __init__(self, cache):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(100))
        if cache is not None:
            self.register_buffer("cache", torch.full((100,), cache), persistent=False)


def two_saves(path):
    for cache, weight in ((None, 1.0), (123.0, 2.0)):
        model = Cached(cache)
        ckpt = unbroken.Checkpointer(path, {"model": model}, keep=None)
        ckpt.restore()
        model.weight.data.fill_(weight)
        ckpt.step()
        ckpt.save()
        ckpt.close()


def damage(path):
    (file,) = path.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_what_an_older_checkpoint_lacks_is_as_it_was_before_a_damaged_one_was_tried(tmp_path):
    two_saves(tmp_path)
    damage(tmp_path / "step-2")
    model = Cached(-7.0)
    with unbroken.Checkpointer(tmp_path, {"model": model}) as ckpt:
        assert ckpt.restore().step == 1
    assert torch.equal(model.cache, torch.full((100,), -7.0))
    assert float(model.weight.detach()[0]) == 1.0


def test_the_same_of_everything_where_only_what_fits_is_restored(tmp_path):
    two_saves(tmp_path)
    damage(tmp_path / "step-2")
    damage(tmp_path / "step-1")
    model = Cached(-7.0)
    with pytest.raises(NoUsableCheckpoint):
        unbroken.Checkpointer(tmp_path, {"model": model}).restore(strict=False)
    assert torch.equal(model.weight, torch.zeros(100))
    assert torch.equal(model.cache, torch.full((100,), -7.0))


def test_it_is_said_if_a_damaged_checkpoint_is_in_the_objects(tmp_path):
    two_saves(tmp_path)
    damage(tmp_path / "step-2")
    damage(tmp_path / "step-1")
    with pytest.raises(NoUsableCheckpoint, match="build the objects anew first"):
        unbroken.Checkpointer(tmp_path, {"model": Cached(-7.0)}).restore()
    for path in tmp_path.glob("step-*/*.safetensors"):
        path.unlink()
    with pytest.raises(NoUsableCheckpoint, match="nothing was changed"):
        unbroken.Checkpointer(tmp_path, {"model": Cached(-7.0)}).restore()


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_memory_that_cannot_be_written_is_no_damage(tmp_path):
    np.save(tmp_path / "base.npy", np.ones(100_000, np.float32))
    base = torch.from_numpy(np.load(tmp_path / "base.npy", mmap_mode="r"))
    run = tmp_path / "run"
    with unbroken.Checkpointer(run, {"base": base}) as ckpt:
        ckpt.step()
        ckpt.save()
    with pytest.raises(UsageError, match="memory that cannot be written"):
        unbroken.Checkpointer(run, {"base": base}).restore()


def test_tensors_of_inference_mode_are_refused_when_they_are_saved(tmp_path):
    with torch.inference_mode():
        teacher = nn.Linear(2, 2)
    ckpt = unbroken.Checkpointer(tmp_path, {"teacher": teacher})
    ckpt.step()
    with pytest.raises(UnsupportedValue, match=r"teacher/weight is a tensor of torch\.inference_mode"):
        ckpt.save()


def save_after_evaluation(rank, world_size, directory):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    losses = []
    with unbroken.Checkpointer(directory, {"model": model, "optimizer": optimizer}, on_error="raise") as ckpt:
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 8)).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
            ckpt.step()
            if directory.endswith("evaluated"):
                with torch.no_grad():
                    model(torch.ones(2, 8))
            ckpt.save()
    return losses


def test_fsdp_after_an_evaluation_is_saved_as_before_it(ranks, tmp_path):
    plain = ranks.run_all_well(f"{MODULE}:save_after_evaluation", 2, str(tmp_path / "plain"))
    assert ranks.run_all_well(f"{MODULE}:save_after_evaluation", 2, str(tmp_path / "evaluated")) == plain
    files = [sorted((tmp_path / run / "step-3").glob("*.safetensors")) for run in ("plain", "evaluated")]
    assert [file.read_bytes() for file in files[0]] == [file.read_bytes() for file in files[1]]
