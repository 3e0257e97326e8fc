"""Stages of a pipeline, each on two ranks that shard or replicate it, and an embedding that both stages hold.

Two meshes cut the embedding under one name; one of them writes it, if values are the same wherever their parts meet.
"""

import json

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import independent_reader
import unbroken
from processes import Raised
from sharded.models import full, raw
from unbroken import planning
from unbroken.errors import SaveFailed

MODULE = "sharded.test_pipeline"
STEPS = 2
SHARDED = ("shard", "shard")
"""How stages 0 and 1 lie on their two ranks each."""
MIXED = [("shard", "replicate"), ("replicate", "shard")]


class Stage(nn.Module):
    """An embedding or several, and the layers of a stage under the names that they have in the whole model."""

    def __init__(self, seed, layers, embeddings=("embedding",)):
        super().__init__()
        torch.manual_seed(seed)
        self.embeddings = embeddings
        for name in embeddings:
            setattr(self, name, nn.Embedding(7, 4))
        self.layers = nn.ModuleDict()
        for layer in layers:
            torch.manual_seed(seed + 1 + int(layer))
            self.layers[layer] = nn.Linear(4, 5)

    def forward(self, words):
        embedded = sum(getattr(self, name)(words) for name in self.embeddings)
        return sum(layer(embedded).square().sum() for layer in self.layers.values())


class Pipeline:
    """One rank's stage of two, on ranks 0 and 1, and 2 and 3."""

    def __init__(self, layouts, seed, layers="01", shared=True):
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        self.stage = self.mesh.get_local_rank("pp")
        self.embedding = "embedding" if shared else f"embedding{self.stage}"
        self.shared = shared
        self.model = self.wrap(Stage(seed, layers[self.stage], [self.embedding]), layouts[self.stage])
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.1)

    def wrap(self, model, layout):
        if layout == "shard":
            return fully_shard(model, mesh=self.mesh["dp"])
        return DistributedDataParallel(model, process_group=self.mesh.get_group("dp"))

    @property
    def state(self):
        return {"model": self.model, "optimizer": self.optimizer}

    def parameters(self):
        return {name.removeprefix("module."): parameter for name, parameter in self.model.named_parameters()}

    def step(self, step):
        words = torch.randint(7, (6,), generator=torch.Generator().manual_seed(step))
        self.optimizer.zero_grad()
        self.model(words).backward()
        if self.shared:
            self.sum_over_stages(self.parameters()["embedding.weight"].grad)
        self.optimizer.step()

    def sum_over_stages(self, gradient):
        summed = full(gradient).clone()
        dist.all_reduce(summed, group=self.mesh.get_group("pp"))
        if isinstance(gradient, DTensor):
            summed = distribute_tensor(summed, gradient.device_mesh, gradient.placements)
        gradient.copy_(summed)


def content(parameters, optimizer):
    """Every weight and moment, gathered."""
    return {
        f"{name}/{key}": raw(full(item))
        for name, parameter in parameters.items()
        for key, item in {"": parameter, **optimizer.state[parameter]}.items()
    }


def train(rank, world_size, directory, layouts, seed, until, most_pieces=planning.MOST_PIECES, shared=True):
    """Restore if there is something, train up to a step, save; what was there at the start and at the end."""
    job = Pipeline(layouts, seed, shared=shared)
    with pytest.MonkeyPatch.context() as patch, unbroken.Checkpointer(directory, job.state, on_error="raise") as ckpt:
        patch.setattr(planning, "MOST_PIECES", most_pieces)
        ckpt.restore()
        begun = content(job.parameters(), job.optimizer)
        while ckpt.global_step < until:
            job.step(ckpt.global_step)
            ckpt.step()
        ckpt.save()
    return begun, content(job.parameters(), job.optimizer)


def restore_whole(rank, world_size, directory, embeddings=("embedding",)):
    """All layers, sharded over all ranks or in one process."""
    model = Stage(5, "01", embeddings)
    if world_size > 1:
        fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    with unbroken.Checkpointer(directory, {"model": model, "optimizer": optimizer}) as ckpt:
        ckpt.restore()
    return content(dict(model.named_parameters()), optimizer)


def elements_stored(run, step):
    """How many elements of each weight lie in the files of a checkpoint, however often."""
    directory = run / f"step-{step}"
    manifest = json.loads((directory / "manifest.json").read_bytes())["body"]
    stored = {}
    for tensors in (manifest["tensors"], *manifest["rank_tensors"]):
        for name in (name for name in tensors if name.startswith("model/") and name.endswith(".weight")):
            entry = independent_reader.pieces_of(directory, manifest["files"], name, tensors[name])
            stored[name] = stored.get(name, 0) + sum(p["end"] - p["begin"] for p in entry["pieces"]) // 4
    return stored


@pytest.mark.parametrize("most_pieces", [planning.MOST_PIECES, 1], ids=["pieces", "cuts"])
@pytest.mark.parametrize("layouts", [SHARDED, *MIXED], ids="-".join)
def test_an_embedding_of_both_stages_is_stored_once_and_restores_into_any_layout(ranks, tmp_path, layouts, most_pieces):
    run = str(tmp_path / "run")
    results = ranks.run_all_well(f"{MODULE}:train", 4, run, layouts, 1, STEPS, most_pieces)
    saved = [end for _, end in results]
    assert saved[0]["embedding.weight/"] == saved[2]["embedding.weight/"], "or there is nothing to test"
    whole = saved[0] | saved[2]
    assert len(whole) == 4 * 5, "weight, two moments and a step counter of each parameter"
    expected = {"model/embedding.weight": 28, "model/layers.0.weight": 20, "model/layers.1.weight": 20}
    assert elements_stored(tmp_path / "run", STEPS) == expected
    for world_size in (4, 3, 1):
        assert ranks.run_all_well(f"{MODULE}:restore_whole", world_size, run) == [whole] * world_size
    resumed = ranks.run_all_well(f"{MODULE}:train", 4, run, layouts, 9, 2 * STEPS)
    assert [begun for begun, _ in resumed] == saved
    straight = ranks.run_all_well(f"{MODULE}:train", 4, str(tmp_path / "straight"), layouts, 1, 2 * STEPS)
    assert [end for _, end in resumed] == [end for _, end in straight]


def test_stages_without_anything_in_common_are_one_model(ranks, tmp_path):
    run = str(tmp_path / "run")
    results = ranks.run_all_well(f"{MODULE}:train", 4, run, SHARDED, 1, STEPS, planning.MOST_PIECES, False)
    whole = results[0][1] | results[2][1]
    assert len(whole) == 4 * 6
    for world_size in (4, 1):
        restored = ranks.run_all_well(f"{MODULE}:restore_whole", world_size, run, ["embedding0", "embedding1"])
        assert restored == [whole] * world_size


@torch.no_grad()
def save_changed(rank, world_size, directory, layouts, layers, name):
    """A first save after the last element of a tensor of stage 1 changed on rank 3 alone."""
    job = Pipeline(layouts, 1, layers)
    if rank == 3:
        change(job.parameters()[name])
    with unbroken.Checkpointer(directory, job.state, on_error="raise") as ckpt:
        ckpt.step()
        ckpt.save()
        ckpt.wait()


def change(parameter):
    held = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    held[-1, -1] += 1


@pytest.mark.parametrize("layouts", [SHARDED, *MIXED, ("replicate", "replicate")], ids="-".join)
@pytest.mark.parametrize(("layers", "name"), [("01", "embedding.weight"), ("00", "layers.0.weight")])
def test_one_name_for_other_values_is_told_on_all_ranks(ranks, tmp_path, layouts, layers, name):
    for result in ranks.run(f"{MODULE}:save_changed", 4, str(tmp_path / "run"), layouts, layers, name):
        assert isinstance(result, Raised) and result.kind == "ReplicasDiffer", result
        assert f"model/{name} is one thing on ranks 0-1 and another on ranks 2-3; give" in result.text
    assert not list(tmp_path.glob("run/step-*/manifest.json"))


def drift(rank, world_size, directory, layouts):
    """What three saves say, if the embedding of stage 1 changes on rank 3 after the first."""
    job = Pipeline(layouts, 1)
    told = []
    with unbroken.Checkpointer(directory, job.state, check_replicas="always") as ckpt:
        for step in (1, 2, 3):
            job.step(step)
            with torch.no_grad():
                if step == 2 and rank == 3:
                    change(job.parameters()["embedding.weight"])
            ckpt.step()
            ckpt.save()
            try:
                ckpt.wait()
                told.append("")
            except SaveFailed as error:
                told.append(str(error))
    return told


@pytest.mark.parametrize("layouts", [SHARDED, *MIXED], ids="-".join)
def test_an_embedding_that_drifts_apart_after_the_first_save_is_told(ranks, tmp_path, layouts):
    for told in ranks.run_all_well(f"{MODULE}:drift", 4, str(tmp_path), layouts):
        assert told[0] == ""
        assert "that are kept equal differ on rank(s)" in told[1]
        assert "model/embedding.weight is one thing on ranks 0-1 and another on ranks 2-3; give" in told[2]
    assert [path.parent.name for path in tmp_path.glob("step-*/manifest.json")] == ["step-1"]
