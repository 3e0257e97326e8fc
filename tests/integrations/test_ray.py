"""Ray Train: jobs whose workers and nodes are killed are the job that was not.

With the cases B175 (each node looked at a directory of its own, and one had a part of the shards), B176 (a checkpoint
was said to be restored, and training began anew) and B177 (rank 0's part alone was kept).
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

if importlib.util.find_spec("ray") is None:
    pytest.skip("ray is not installed", allow_module_level=True)

import ray
import ray.train.torch
from ray.cluster_utils import Cluster
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

import unbroken
from integrations.ray_jobs import odd_ways, told_by, wait_until, with_ray
from unbroken.commit import SaveId
from unbroken.errors import UnbrokenError, UsageError
from unbroken.integrations.ray import Pointer, mend_records, pointer_of
from unbroken.integrations.ray.pointers import checked, write_pointer
from unbroken.integrations.ray.private import AT_LEAST, check_imported

JOBS = "integrations.ray_jobs"
UNTIL = 12


@pytest.fixture(scope="module", autouse=True)
def _for_workers():
    """Of the workers, which find the jobs as this process does."""
    before = dict(os.environ)
    paths = [str(Path(unbroken.__file__).parents[1]), str(Path(__file__).parents[1])]
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S"] = "0.3"
    # Right after a node was lost Ray still believes in it, and waits for workers there.
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = "12"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # Ray runs its workers at niceness 15: beside other tests they would starve, and starting one take minutes.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - Ray spells it so
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def cluster(_for_workers):
    """A Ray of several nodes on this machine: a head that takes no workers, and two nodes that take one each."""
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 100 << 20})
    ray.init(address=found.address, logging_level="ERROR", log_to_driver=False)
    add_node(found)
    add_node(found)
    yield found
    ray.shutdown()
    found.shutdown()


def add_node(cluster: Cluster) -> Any:
    return cluster.add_node(num_cpus=1, object_store_memory=100 << 20)


def trainer(function: Any, out: Path, workers: Any = 2, failures: int = -1, name: str = "run", **config: Any) -> Any:
    storage = str(out.parent / "ray")
    return ray.train.torch.TorchTrainer(
        function,
        train_loop_config={"out": str(out), "until": UNTIL, "storage": storage, **config},
        torch_config=ray.train.torch.TorchConfig(timeout_s=60),
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=run_config(out, failures, name),
    )


def run_config(out: Path, failures: int = -1, name: str = "run") -> RunConfig:
    return RunConfig(
        name=name,
        storage_path=str(out.parent / "ray"),
        failure_config=FailureConfig(max_failures=failures),
        checkpoint_config=CheckpointConfig(num_to_keep=2),
    )


def story(out: Path, rank: int) -> dict[Any, Any]:
    """What a rank told: of each step the last word, and how it ended."""
    said: dict[Any, Any] = {}
    for line in told_by(out, rank):
        said |= (
            {line["step"]: line} if "step" in line else {key: line[key] for key in ("final", "draws") if key in line}
        )
    return said


def restored(out: Path, rank: int = 0) -> list[int]:
    return [line["restored"] for line in told_by(out, rank) if "restored" in line]


def assert_undisturbed(ranks: Any, out: Path, until: int) -> None:
    """As the same job without Ray, which nobody disturbed."""
    whole = out.with_name("whole")
    ranks.run_all_well(f"{JOBS}:plain", 2, str(whole), until)
    for rank in (0, 1):
        assert story(out, rank) == story(whole, rank)


def test_lost_workers_damage_and_what_ray_forgets_change_nothing(ranks, cluster, tmp_path):
    out = tmp_path / "out"
    acts = [{"step": 6, "ranks": [1], "act": "die"}, {"step": 10, "ranks": [0, 1], "act": "die"}]
    result = trainer(with_ray, out, acts=acts).fit()
    assert restored(out) == [0, 4, 8]
    told = pointer_of(result.checkpoint)
    assert told == Pointer(str(out), "step-12", 12) and told.path.is_dir()
    assert result.metrics["loss"] == float.fromhex(story(out, 0)[12]["loss"])
    assert {path.name[:16] for path in told.path.glob("*.safetensors")} == {"g0003-rank-00000", "g0003-rank-00001"}
    kept = [pointer_of(checkpoint).step for checkpoint, _ in result.best_checkpoints]
    assert kept == [12]  # of the others the word was lost with the start that saved them

    # The newest checkpoint is damaged, and what Ray had of it is gone: Ray alone would not start any more.
    damaged = next((out / "step-12").glob("*rank-00001.safetensors"))
    data = bytearray(damaged.read_bytes())
    data[-5] ^= 1
    damaged.write_bytes(data)
    shutil.rmtree(result.checkpoint.path)
    with pytest.raises(ray.exceptions.ActorDiedError, match="does not exist anymore"):
        trainer(with_ray, out, until=14).fit()
    assert mend_records(run_config(out)) == [Path(result.checkpoint.path).name]
    assert mend_records(run_config(out)) == []
    (tmp_path / "own").mkdir()
    result = trainer(with_ray, out, until=14, own=str(tmp_path / "own")).fit()
    assert restored(out) == [0, 4, 8, 8]
    with pytest.raises(UnbrokenError, match="is no checkpoint that unbroken reported"):
        pointer_of(result.checkpoint)
    assert pointer_of(result.best_checkpoints[0][0]).step == 12  # 14 is saved by nobody
    assert_undisturbed(ranks, out, 14)

    # Ray remembers checkpoints, though its newest is not ours; this directory has none.
    with pytest.raises(ray.train.WorkerGroupError, match="NoUsableCheckpoint: Ray knows of a checkpoint of step 12"):
        trainer(with_ray, tmp_path / "elsewhere", failures=0).fit()


def test_odd_ways(cluster, tmp_path):
    out = tmp_path / "out"
    trainer(odd_ways, out).fit()  # it dies once, when all is told and saved
    for rank in (0, 1):
        for start, saved in enumerate((0, 2)):
            relative, apart, wrapped, plain = told_by(out, rank)[4 * start : 4 * start + 4]
            assert "UsageError: runs/x: give an absolute path" in relative["relative"]
            assert "DirectoryProblem: the run directory is not the same on all ranks" in apart["apart"]
            assert "_WrappedDataLoader has its own __iter__" in wrapped["wrapped"]
            assert plain == {"plain": saved}


def without_a_process_group(config: dict[str, Any]) -> None:
    from unbroken.integrations.ray import checkpointer

    checkpointer(config["out"], {"model": torch.nn.Linear(2, 2)}).restore()


def test_workers_that_torch_does_not_know_of_are_refused(cluster, tmp_path):
    made = DataParallelTrainer(
        without_a_process_group,
        train_loop_config={"out": str(tmp_path / "out")},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=run_config(tmp_path / "out", failures=0),
    )
    with pytest.raises(ray.train.WorkerGroupError, match=r"Ray runs 2 workers, but torch\.distributed knows of 1"):
        made.fit()


def test_metrics_that_ray_cannot_keep_are_named():
    assert checked({"loss": np.float32(0.5), "name": "x"}) == {"loss": 0.5, "name": "x"}
    with pytest.raises(UsageError, match="metrics: Ray keeps numbers and strings, but 'loss' is a Tensor"):
        checked({"loss": torch.zeros(())})


def test_pointers_of_one_step_do_not_meet_and_a_storage_that_is_not_seen_costs_no_save(tmp_path, caplog):
    storage = run_config(tmp_path / "out").storage_context
    one, other = (write_pointer(storage, tmp_path / run, SaveId(4, 0, 0), 1) for run in ("a", "b"))
    assert one.path != other.path
    assert [pointer_of(each).path for each in (one, other)] == [tmp_path / "a" / "step-4", tmp_path / "b" / "step-4"]
    shutil.rmtree(storage.experiment_fs_path)
    assert write_pointer(storage, tmp_path / "a", SaveId(8, 0, 0), 1) is None
    assert "Ray is not told of the checkpoint of step 8: this node does not see" in caplog.text


def test_local_mode_saves_and_resumes(tmp_path):
    """In a process of its own: it makes the process a worker for good."""
    script = (
        "import sys, pathlib, ray.train.torch; from integrations.ray_jobs import with_ray\n"
        "out = sys.argv[1]\n"
        "for until in (5, 9):\n"
        "    ray.train.torch.TorchTrainer(with_ray, train_loop_config={'out': out, 'until': until, 'storage': out},\n"
        "        scaling_config=ray.train.ScalingConfig(num_workers=0)).fit()\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "out")], check=True, timeout=120, cwd=tmp_path)
    assert restored(tmp_path / "out") == [0, 4]
    assert list(story(tmp_path / "out", 0)) == [*range(1, 6), "final", "draws", *range(6, 10)]


def snapshot(config: RunConfig, names: list[str], indices: list[int] | None = None) -> Path:
    """As Ray keeps its records, and a directory for each but the last."""
    results = [{"version": 0, "checkpoint_dir_name": name, "metrics": {"loss": float("nan")}} for name in names]
    path = Path(config.storage_context.checkpoint_manager_snapshot_path)
    for name in names[:-1]:
        (path.parent / name).mkdir(exist_ok=True)
    records = {
        "ray_version": ray.__version__,
        "checkpoint_results": results,
        "checkpoint_report_indices": list(range(len(names))) if indices is None else indices,
        "latest_checkpoint_result": results[-1],
        "pending_training_results": results[-1:],
        "pending_validation_specs": [True],
    }
    path.write_text(json.dumps(records))
    return path


def test_records_of_what_is_gone_are_dropped_and_the_rest_stays(tmp_path):
    config = run_config(tmp_path / "out")
    assert mend_records(config) == []
    path = snapshot(config, ["a", "b", "c"])
    assert mend_records(config) == ["c"]
    records = json.loads(path.read_text())
    assert [each["checkpoint_dir_name"] for each in records["checkpoint_results"]] == ["a", "b"]
    assert records["checkpoint_report_indices"] == [0, 1] and records["pending_training_results"] == []
    assert (
        records["latest_checkpoint_result"]["checkpoint_dir_name"] == "b" and records["pending_validation_specs"] == []
    )
    assert mend_records(config) == []


def test_torn_records_are_moved_aside_and_odd_ones_stay_as_they_are(tmp_path):
    config = run_config(tmp_path / "out")
    path = snapshot(config, ["a", "b"], indices=[0])
    odd = path.read_text()
    with pytest.raises(UsageError, match="is not as unbroken knows it from ray"):
        mend_records(config)
    assert path.read_text() == odd
    path.write_text(odd[:40])
    assert mend_records(config) == [path.name]
    assert not path.exists() and Path(f"{path}.torn").read_text() == odd[:40]


def test_what_is_no_pointer_is_told(tmp_path):
    for checkpoint in (None, ray.train.Checkpoint(str(tmp_path))):
        with pytest.raises(UnbrokenError, match=r"Ray has no checkpoint|is no checkpoint that unbroken reported"):
            pointer_of(checkpoint)


def test_outside_of_a_train_function_it_says_so(tmp_path):
    from unbroken.integrations.ray import checkpointer

    with pytest.raises(UsageError, match=r"inside the function that a ray\.train trainer runs"):
        checkpointer(tmp_path, {})


def test_a_changed_ray_is_refused_by_name(monkeypatch):
    check_imported()
    monkeypatch.delattr("ray.train.v2._internal.execution.context.get_train_context")
    with pytest.raises(UsageError, match=r"module\.get_train_context is not as unbroken knows it from ray 2\.60"):
        check_imported()
    assert AT_LEAST == "2.60"


class Fit:
    """A run in a thread of its own, while nodes come and go."""

    def __init__(self, made: Any) -> None:
        self._ended: list[Any] = []
        self._thread = threading.Thread(target=self._run, args=(made,), daemon=True)
        self._thread.start()

    def _run(self, made: Any) -> None:
        try:
            self._ended.append(made.fit())
        except BaseException as error:
            self._ended.append(error)

    def result(self) -> Any:
        self._thread.join(300)
        assert self._ended, "the run does not end"
        if isinstance(self._ended[0], BaseException):
            raise self._ended[0]
        return self._ended[0]


def reached(out: Path, step: int) -> Any:
    return lambda: all(step in story(out, rank) for rank in (0, 1))


def test_a_lost_node_and_one_whose_loss_is_announced_change_nothing(ranks, cluster, tmp_path):
    out = tmp_path / "out"
    first, second = list(cluster.worker_nodes)
    acts = [
        {"step": 6, "ranks": [0, 1], "act": "wait for the end"},
        {"step": 11, "ranks": [0, 1], "act": "wait for the notice"},
        {"step": 14, "ranks": [0, 1], "act": "wait for the end"},
    ]
    fit = Fit(trainer(with_ray, out, acts=acts, until=16, every=5))
    wait_until(reached(out, 6))
    cluster.remove_node(first, allow_graceful=False)
    add_node(cluster)
    wait_until(reached(out, 11))
    assert restored(out) == [0, 5]
    announce(second, seconds=8)
    wait_until(reached(out, 14))
    add_node(cluster)
    fit.result()
    assert restored(out)[:2] == [0, 5] and restored(out)[2:] in ([12], [13], [14]), "saved after the notice"
    assert_undisturbed(ranks, out, 16)


def announce(node: Any, seconds: float) -> None:
    """As the cloud's provider does of a machine that it takes back."""
    client = ray._raylet.GcsClient(address=ray.get_runtime_context().gcs_address)
    accepted, why = client.drain_node(node.node_id, 2, "a spot instance", int((time.time() + seconds) * 1000))
    assert accepted, why


@pytest.mark.slow  # its short twin is test_another_number_of_workers_trains_on_each_sample_once
def test_an_elastic_group_shrinks_with_its_nodes_and_grows_again(ranks, cluster, tmp_path):
    out = tmp_path / "out"
    acts = [
        {"step": 6, "ranks": [0, 1], "act": "wait for the end"},
        {"step": 10, "ranks": [0], "act": "wait for the end"},
    ]
    made = trainer(with_ray, out, workers=(1, 2), acts=acts)
    made.scaling_config.elastic_resize_monitor_interval_s = 2
    fit = Fit(made)
    wait_until(reached(out, 6))
    cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
    wait_until(lambda: 10 in story(out, 0))
    assert [line["world"] for line in told_by(out, 0) if "world" in line] == [2, 1]
    add_node(cluster)
    fit.result()
    assert [line["world"] for line in told_by(out, 0) if "world" in line] == [2, 1, 2]
    assert restored(out) == [0, 4, 8]
    assert_each_sample_once(out)


def test_another_number_of_workers_trains_on_each_sample_once(cluster, tmp_path):
    out = tmp_path / "out"
    trainer(with_ray, out, until=5).fit()
    trainer(with_ray, out, workers=1).fit()
    assert restored(out) == [0, 4]
    assert_each_sample_once(out)


def assert_each_sample_once(out: Path) -> None:
    """Twelve steps of four samples are one epoch; a step that was done again counts as it was done last."""
    worlds: dict[int, int] = {}
    for rank in (0, 1):
        world = 0
        for line in told_by(out, rank):
            world = line.get("world", world)
            if rank == 0 and "step" in line:
                worlds[line["step"]] = world
    seen = [story(out, rank)[step]["samples"] for step in range(1, 13) for rank in range(worlds[step])]
    assert sorted(sample for samples in seen for sample in samples) == list(range(48))
