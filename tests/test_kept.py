"""What does not change is written once and linked into later checkpoints; what changes after all is found out."""

from __future__ import annotations

import errno
import json

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typer.testing import CliRunner

import independent_reader
import unbroken
from rebuild import raw
from unbroken.cli.main import app
from unbroken.errors import NoUsableCheckpoint, SaveFailed
from unbroken.store.local import LocalStore
from unbroken.verification import verify_run

MODULE = "test_kept"
WIDTH = 640
"""A weight of 1.6 MB."""


class Adapted(nn.Module):
    """A frozen layer with a small one beside it, as adapters are."""

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.adapter = nn.Linear(WIDTH, 4)

    def forward(self, x):
        return self.adapter(self.base(x))


class Job:
    def __init__(self, path, seed=0, wrap=lambda model: model, **options):
        self.model = Adapted(seed)
        wrapped = wrap(self.model)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], 0.1)
        state = {"model": wrapped, "optimizer": self.optimizer}
        self.ckpt = unbroken.Checkpointer(path, state, **{"keep": None} | options)
        self.forward = wrapped
        self.contents = {}

    def step(self):
        self.optimizer.zero_grad()
        self.forward(torch.randn(4, WIDTH)).square().mean().backward()
        self.optimizer.step()
        self.ckpt.step()
        self.contents[self.ckpt.global_step] = self.content()
        self.ckpt.save()

    def step_in_vain(self, reason):
        """A step whose save fails."""
        with pytest.raises(SaveFailed, match=reason):
            self.step()
            self.ckpt.wait()

    def content(self):
        return {name: raw(tensor) for name, tensor in self.model.state_dict().items()}


def kept_files(path):
    return {file.parent.name: file.stat().st_ino for file in sorted(path.glob("step-*/*-kept.safetensors"))}


def restored(path):
    job = Job(path, seed=1)
    step = job.ckpt.restore().step
    job.ckpt.close()
    return step, job.content()


def version_of(path):
    return json.loads(path.read_bytes())["version"]


def test_frozen_weights_are_written_once_and_every_checkpoint_is_whole(tmp_path):
    job = Job(tmp_path, keep=unbroken.Keep(last=2))
    for _ in range(5):
        job.step()
        job.ckpt.wait()
    job.ckpt.close()
    files = kept_files(tmp_path)
    assert sorted(files) == ["step-4", "step-5"]
    assert len(set(files.values())) == 1, "one file by two names"
    assert version_of(tmp_path / "step-5/manifest.json") == 3
    assert all(file.stat().st_size < 100_000 for file in tmp_path.glob("step-5/*00000.safetensors"))
    assert not verify_run(LocalStore(tmp_path), lambda _: None).faults
    assert restored(tmp_path) == (5, job.contents[5])


def test_a_restarted_job_writes_its_own(tmp_path):
    job = Job(tmp_path)
    job.step()
    job.ckpt.close()
    again = Job(tmp_path, seed=1)
    again.ckpt.restore()
    again.step()
    again.step()
    again.ckpt.close()
    files = kept_files(tmp_path)
    assert files["step-1"] != files["step-2"] == files["step-3"]
    assert restored(tmp_path) == (3, again.contents[3])


def test_a_weight_that_is_exchanged_through_data_is_saved_as_it_is(tmp_path):
    """A target network that follows the trained one, say."""
    job = Job(tmp_path)
    for _ in range(4):
        job.step()
        job.ckpt.wait()
        job.model.base.weight.data.mul_(0.5)
    job.ckpt.close()
    assert "step-1" in kept_files(tmp_path)
    assert "step-2" not in kept_files(tmp_path)
    assert restored(tmp_path) == (4, job.contents[4])


def test_a_single_element_that_changes_unseen_costs_one_save(tmp_path):
    job = Job(tmp_path)
    job.step()
    job.ckpt.wait()
    job.model.base.weight.data[3, 5] = 7.0
    job.step_in_vain(r"model/base.weight.* changed though no gradient is wanted")
    assert not list(tmp_path.glob("step-2/*.safetensors")), "the space of the failed try is given back"
    job.step()
    job.ckpt.close()
    assert restored(tmp_path) == (3, job.contents[3])


def test_a_weight_that_changes_while_its_file_is_written_costs_that_save(tmp_path, monkeypatch):
    job = Job(tmp_path)
    create = LocalStore.create_in_parts

    def change_and_create(store, name, parts):
        if "kept" in name:
            job.model.base.weight.data.add_(1)
        create(store, name, parts)

    monkeypatch.setattr(LocalStore, "create_in_parts", change_and_create)
    job.step_in_vain("model/base.weight")
    assert not list(tmp_path.glob("step-1/*.safetensors"))
    job.step()
    job.ckpt.close()
    assert restored(tmp_path) == (2, job.contents[2])


def test_a_weight_that_is_trained_from_now_on_is_saved_as_it_is(tmp_path):
    job = Job(tmp_path)
    job.step()
    job.ckpt.wait()
    job.model.base.requires_grad_(True)
    job.optimizer.add_param_group({"params": list(job.model.base.parameters())})
    for _ in range(3):
        job.step()
    job.ckpt.close()
    assert sorted(kept_files(tmp_path)) == ["step-1"]
    again = Job(tmp_path, seed=1)
    again.model.base.requires_grad_(True)
    again.optimizer.add_param_group({"params": list(again.model.base.parameters())})
    again.ckpt.restore()
    assert again.content() == job.contents[4]


def test_where_files_cannot_have_two_names_each_checkpoint_has_its_own(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(LocalStore, "link", refuse)
    job = Job(tmp_path)
    job.step()
    job.step()
    job.ckpt.close()
    assert len(set(kept_files(tmp_path).values())) == 2
    assert restored(tmp_path) == (2, job.contents[2])


def test_a_disk_that_is_full_for_one_save_leaves_nothing_and_the_next_is_whole(tmp_path, monkeypatch):
    job = Job(tmp_path)
    job.step()
    job.ckpt.wait()
    with monkeypatch.context() as patch:

        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(LocalStore, "create_in_parts", full)
        job.step_in_vain("No space left")
    assert not list(tmp_path.glob("step-2/*.safetensors"))
    job.step()
    job.ckpt.close()
    files = kept_files(tmp_path)
    assert files["step-3"] == files["step-1"]
    assert restored(tmp_path) == (3, job.contents[3])


def test_blocking_snapshots_write_all_at_every_save(tmp_path):
    job = Job(tmp_path, snapshot="block")
    job.step()
    job.step()
    job.ckpt.close()
    assert kept_files(tmp_path) == {}
    assert version_of(tmp_path / "step-2/manifest.json") == 1


def test_a_damaged_byte_harms_all_that_share_it_and_is_found(tmp_path):
    job = Job(tmp_path)
    job.step()
    job.step()
    job.ckpt.close()
    (file,) = tmp_path.glob("step-2/*-kept.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    with file.open("r+b") as opened:
        opened.write(data)
    assert len(verify_run(LocalStore(tmp_path), lambda _: None).faults) == 2
    with pytest.raises(NoUsableCheckpoint, match=r"kept\.safetensors"):
        Job(tmp_path, seed=1).ckpt.restore()


def test_other_readers_and_commands_find_all_that_is_in_it(tmp_path):
    job = Job(tmp_path / "run")
    job.step()
    job.step()
    job.step()
    job.ckpt.close()
    tensors, _ = independent_reader.read(independent_reader.newest(tmp_path / "run"), 0)
    assert tensors["model/base.weight"].tobytes() == job.model.base.weight.numpy().tobytes()
    invoke = CliRunner().invoke
    assert invoke(app, ["export", str(tmp_path / "run"), str(tmp_path / "out")]).exit_code == 0
    exported = safetensors.torch.load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(exported["base.weight"], job.model.base.weight)
    assert invoke(app, ["prune", str(tmp_path / "run"), "--keep", "1"]).exit_code == 0
    assert sorted(kept_files(tmp_path / "run")) == ["step-3"]
    assert invoke(app, ["verify", str(tmp_path / "run")]).exit_code == 0
    assert restored(tmp_path / "run") == (3, job.contents[3])


def save_frozen(rank, world_size, directory):
    torch.manual_seed(0)
    job = Job(directory, wrap=DistributedDataParallel)
    for _ in range(3):
        job.step()
        job.ckpt.wait()
    job.ckpt.close()
    return job.contents[3]


def restore_frozen(rank, world_size, directory):
    job = Job(directory, seed=1, wrap=DistributedDataParallel)
    step = job.ckpt.restore().step
    job.ckpt.close()
    return step, job.content()


def change_one_replica(rank, world_size, directory):
    job = Job(directory, wrap=DistributedDataParallel)
    job.step()
    job.ckpt.wait()
    if rank == 1:
        job.model.base.weight.data[WIDTH // 4, 0] = 5.0  # in the part that rank 0 writes
    job.step()
    try:
        job.ckpt.wait()
    except SaveFailed as error:
        return str(error)
    return ""


def test_ranks_share_what_is_frozen_and_any_number_of_them_restores_it(ranks, tmp_path):
    run = str(tmp_path)
    saved = ranks.run_all_well(f"{MODULE}:save_frozen", 2, run)
    assert len(list(tmp_path.glob("step-3/*-kept.safetensors"))) == 2
    assert len(set(kept_files(tmp_path).values())) == 1
    assert ranks.run_all_well(f"{MODULE}:restore_frozen", 2, run) == [(3, saved[0])] * 2
    assert restored(tmp_path) == (3, saved[0])


def test_a_replica_of_a_frozen_weight_that_differs_is_found(ranks, tmp_path):
    for error in ranks.run_all_well(f"{MODULE}:change_one_replica", 2, str(tmp_path)):
        assert "differ" in error
