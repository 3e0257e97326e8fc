"""Who holds what: one name on several ranks, stages of a pipeline, replicas that drift apart, a damaged piece."""

import shutil

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unbroken
from processes import Raised
from sharded.models import make_job, raw
from unbroken.errors import SaveFailed

MODULE = "sharded.test_holders"


def stage_of(rank):
    """Of two stages, each on every other rank."""
    return rank % 2


def make_stage(rank, seed, own_names):
    """One linear layer per stage, which DDP keeps equal on the ranks of that stage."""
    torch.manual_seed(seed)
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    layers = nn.ModuleDict({str(stage_of(rank)) if own_names else "0": nn.Linear(3, 2)})
    model = DistributedDataParallel(layers, process_group=groups[stage_of(rank)])
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters())}


def save_stage(rank, world_size, directory, seeds, own_names):
    """Register the stage of this rank, whose values follow from `seeds`, and save."""
    state = make_stage(rank, seeds[stage_of(rank)], own_names)
    next(iter(state["model"].module.values()))(torch.ones(1, 3)).sum().backward()
    state["optimizer"].step()
    with unbroken.Checkpointer(directory, state, on_error="raise") as ckpt:
        ckpt.step()
        ckpt.save()
    return {name: raw(tensor.detach()) for name, tensor in state["model"].module.named_parameters()}


def restore_all_stages(rank, world_size, directory):
    """The whole model in each process."""
    model = nn.ModuleDict({"0": nn.Linear(3, 2), "1": nn.Linear(3, 2)})
    optimizer = torch.optim.Adam(model.parameters())
    with unbroken.Checkpointer(directory, {"model": model, "optimizer": optimizer}) as ckpt:
        ckpt.restore()
    moments = [len(optimizer.state[parameter]) for parameter in model.parameters()]
    return {name: raw(tensor.detach()) for name, tensor in model.named_parameters()}, moments


def test_stages_that_call_different_layers_alike_are_told_at_the_first_save(ranks, tmp_path):
    for result in ranks.run(f"{MODULE}:save_stage", 4, str(tmp_path / "run"), (1, 2), False):
        assert isinstance(result, Raised) and result.kind == "ReplicasDiffer", result
        assert "model/0.bias is one thing on ranks 0, 2 and another on ranks 1, 3; give" in result.text
    assert not list(tmp_path.glob("run/step-*/manifest.json"))


def test_stages_that_share_a_layer_store_it_once(ranks, tmp_path):
    held = ranks.run_all_well(f"{MODULE}:save_stage", 4, str(tmp_path / "run"), (1, 1), False)
    assert all(each == held[0] for each in held)
    names = [path.read_bytes().count(b'"model/0.weight"') for path in tmp_path.glob("run/step-1/*.safetensors")]
    assert sum(names) == 1


@pytest.mark.parametrize("world_size", [1, 2])
def test_stages_of_a_pipeline_restore_into_processes_that_hold_all_layers(ranks, tmp_path, world_size):
    held = ranks.run_all_well(f"{MODULE}:save_stage", 4, str(tmp_path / "run"), (1, 2), True)
    for whole, moments in ranks.run_all_well(f"{MODULE}:restore_all_stages", world_size, str(tmp_path / "run")):
        assert whole == held[0] | held[1]
        assert moments == [3] * 4, "the state of each stage's optimizer"


def save_plain(rank, world_size, directory, alike):
    """A module that nothing keeps equal."""
    torch.manual_seed(0 if alike else rank)
    model = nn.Linear(3, 2)
    with unbroken.Checkpointer(directory, {"model": model}, on_error="raise") as ckpt:
        ckpt.step()
        ckpt.save()
    return raw(model.weight.detach())


def restore_plain(rank, world_size, directory, strict=True):
    model = nn.Linear(3, 2)
    with unbroken.Checkpointer(directory, {"model": model}) as ckpt:
        ckpt.restore(strict=strict)
    return raw(model.weight.detach())


def test_what_each_rank_had_of_its_own_is_never_picked_for_another_layout(ranks, tmp_path):
    directory = str(tmp_path / "run")
    held = ranks.run_all_well(f"{MODULE}:save_plain", 3, directory, False)
    assert ranks.run_all_well(f"{MODULE}:restore_plain", 3, directory) == held, "at the same size each has its own"
    for result in ranks.run(f"{MODULE}:restore_plain", 2, directory):
        assert isinstance(result, Raised) and result.kind == "StateMismatch", result
        assert "model/bias was each rank's own on ranks 0-2, and ranks 0 and 1 did not have the same" in result.text
    first = ranks.run_all_well(f"{MODULE}:restore_plain", 2, directory, False)
    assert first == held[:2]


def test_what_is_equal_on_all_ranks_restores_into_any_number(ranks, tmp_path):
    held = ranks.run_all_well(f"{MODULE}:save_plain", 3, str(tmp_path / "run"), True)
    assert ranks.run_all_well(f"{MODULE}:restore_plain", 4, str(tmp_path / "run")) == held[:1] * 4


def drift(rank, world_size, directory, check):
    """HSDP whose replicas cease to be equal after the first save: what the saves say."""
    job = make_job("hsdp", seed=1)
    told = []
    with unbroken.Checkpointer(directory, job.state, check_replicas=check) as ckpt:
        for step in (1, 2, 3):
            job.step(step)
            if step == 2 and rank == 3:
                with torch.no_grad():
                    job.model.up.weight.to_local()[0, 0] += 1
            ckpt.step()
            ckpt.save()
            try:
                ckpt.wait()
                told.append("")
            except SaveFailed as error:
                told.append(str(error))
    return told


def test_replicas_of_a_shard_that_drift_apart_are_named_with_their_ranks(ranks, tmp_path):
    for told in ranks.run_all_well(f"{MODULE}:drift", 4, str(tmp_path / "always"), "always"):
        assert told[0] == ""
        assert "that are kept equal differ on rank(s)" in told[1]
        assert "ranks 1, 3 hold the same shard and other values: " in told[2]
        assert "model/up.weight on rank(s) " in told[2]
    for check in ("first", "never"):
        results = ranks.run_all_well(f"{MODULE}:drift", 4, str(tmp_path / check), check)
        assert results == [["", "", ""]] * 4


def save_twice(rank, world_size, directory, layout):
    job = make_job(layout, seed=1)
    contents = []
    with unbroken.Checkpointer(directory, job.state, every=unbroken.Every(steps=1), on_error="raise") as ckpt:
        for step in (1, 2):
            job.step(step)
            ckpt.step()
            contents.append(job.content())
    return contents


def restore_one(rank, world_size, directory, layout):
    job = make_job(layout, seed=2)
    with unbroken.Checkpointer(directory, job.state) as ckpt:
        restored = ckpt.restore()
    return restored.step, restored.skipped, job.content()


@pytest.mark.parametrize(("layout", "other", "world_size"), [("fsdp2", "fsdp2", 4), ("two_dimensional", "fsdp2", 3)])
def test_a_damaged_piece_is_found_by_those_that_need_it_and_all_fall_back(ranks, tmp_path, layout, other, world_size):
    contents = ranks.run_all_well(f"{MODULE}:save_twice", 4, str(tmp_path / "run"), layout)[0]
    for damaged in range(4):
        copy = shutil.copytree(tmp_path / "run", tmp_path / f"copy-{damaged}")
        file = copy / "step-2" / f"g0001-rank-{damaged:05d}.safetensors"
        data = bytearray(file.read_bytes())
        data[-5] ^= 64
        file.write_bytes(data)
        for step, skipped, content in ranks.run_all_well(f"{MODULE}:restore_one", world_size, str(copy), other):
            assert step == 1 and content == contents[0]
            assert len(skipped) == 1 and file.name in skipped[0], skipped


class Signs(torch.optim.Optimizer):
    """Keeps a plain tensor of the whole shape beside each shard, another one on each rank."""

    def step(self, closure=None):
        for parameter in (p for group in self.param_groups for p in group["params"]):
            state = self.state[parameter]
            if "signs" not in state:
                generator = torch.Generator().manual_seed(dist.get_rank())
                state["signs"] = torch.rand(parameter.shape, generator=generator)
            state["signs"].mul_(0.9)


def keep_signs(rank, world_size, directory, again):
    model = make_job("fsdp2", seed=1).model
    optimizer = Signs(model.parameters(), {})
    with unbroken.Checkpointer(directory, {"model": model, "optimizer": optimizer}, on_error="raise") as ckpt:
        if again:
            ckpt.restore()
        else:
            optimizer.step()
            ckpt.step()
            ckpt.save()
    return [(type(s["signs"]).__name__, raw(s["signs"])) for s in optimizer.state.values()]


def test_a_plain_tensor_beside_a_shard_stays_plain_and_each_ranks_own(ranks, tmp_path):
    saved = ranks.run_all_well(f"{MODULE}:keep_signs", 4, str(tmp_path), False)
    assert ranks.run_all_well(f"{MODULE}:keep_signs", 4, str(tmp_path), True) == saved
    assert {kind for kind, _ in saved[0]} == {"Tensor"} and saved[0] != saved[1]
    for result in ranks.run(f"{MODULE}:keep_signs", 2, str(tmp_path), True):
        assert isinstance(result, Raised) and "did not have the same values" in result.text
