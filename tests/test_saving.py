"""Saving and committing with ranks as threads: session, writer, coordinator, manifest, retention."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest
import safetensors.torch
import torch

from ranks import clusters, on_all, replica
from unbroken import generations
from unbroken.agreement import Claim, Details, compare_details
from unbroken.candidates import candidates, find_tip, saved_for
from unbroken.commit import SaveId
from unbroken.errors import HistoryExists
from unbroken.manifest import MANIFEST, Manifest, decode
from unbroken.planning import structure_of
from unbroken.policy import Keep, Settings
from unbroken.reading import read_tensors, targets_of
from unbroken.session import Session
from unbroken.state.captured import Captured, LiveTensor
from unbroken.store.local import LocalStore

ROWS = 3000


def sessions(root: Path, world_size: int, keep: Keep | None = None, deadline_s: float = 20) -> list[Session]:
    made = [
        Session(
            c,
            c.channel("t", threading.Event()),
            LocalStore(root),
            Settings(keep, deadline_s, 20),
            {},
            threading.Event(),
        )
        for c in clusters(world_size)
    ]
    root.mkdir(exist_ok=True)
    return made


def state(rank: int, step: int) -> Captured:
    weights = torch.randn(ROWS, 128, generator=torch.Generator().manual_seed(step))
    captured = Captured()
    captured.tensors["model/w"] = replica(weights, 1)
    captured.tensors["model/bias"] = replica(torch.arange(5.0) + step, 1)
    captured.tensors["optimizer/state/model/w/step"] = replica(torch.tensor(float(step)), 1)
    captured.tensors["rng/torch"] = LiveTensor(torch.full((10,), (rank + step) % 256, dtype=torch.uint8))
    captured.values["scheduler"] = {"kind": "object", "state": {"last_epoch": step}}
    captured.values["rng"] = {"kind": "generator", "sort": "global", "state": rng_state(rank)}
    return captured


def rng_state(rank: int) -> dict:
    """As `state.rng` encodes it, with one tensor in place of three."""
    words = {"$": "array", "name": "rng/torch", "dtype": "|u1", "shape": [10], "order": "C"}
    return {
        "python": {"version": 3, "internal": words, "gauss_next": None},
        "numpy": {"bit_generator": "MT19937", "state": {"key": words, "pos": rank}, "has_gauss": 0, "gauss": 0.0},
        "torch": {"$": "tensor", "name": "rng/torch", "device": "cpu"},
    }


def over(captured: Captured, world_size: int) -> Captured:
    """The same with its replicas on all ranks."""
    for name, live in captured.tensors.items():
        if live.spread is not None:
            captured.tensors[name] = replica(live.tensor, world_size)
    return captured


def save_all(ranks: list[Session], step: int, attempt: int = 0, make=state) -> list:
    def act(session):
        session.save(SaveId(step, 0, attempt), over(make(session.cluster.rank, step), session.cluster.world_size))
        assert session.wait()
        return session.outcomes.popleft()

    return on_all(ranks, act)


def close_all(ranks: list[Session]) -> None:
    on_all(ranks, lambda session: session.close(abandon=False))


def start(root: Path, world_size: int, restored: Manifest | None = None, **settings) -> list[Session]:
    ranks = sessions(root, world_size, **settings)
    results = on_all(ranks, lambda s: s.begin(restored, restored.step if restored else 0))
    assert not [r for r in results if isinstance(r, Exception)], results
    return ranks


def newest(root: Path) -> Manifest | None:
    store = LocalStore(root)
    tip, _ = find_tip(store)
    return next((c.manifest for c in candidates(store, tip) if c.manifest), None)


def restore(root: Path, manifest: Manifest, rank: int, world_size: int) -> dict[str, torch.Tensor]:
    records = saved_for(manifest, rank, world_size).records
    targets = {name: torch.zeros(record.shape, dtype=getattr(torch, record.dtype)) for name, record in records.items()}
    places = {name: targets_of(target, None, rank) for name, target in targets.items()}
    read_tensors(LocalStore(root), f"step-{manifest.step}", manifest, records, places)
    return targets


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_rank_reads_back_what_all_ranks_wrote(tmp_path, world_size):
    ranks = start(tmp_path, world_size)
    outcomes = save_all(ranks, 10)
    assert all(outcome.committed for outcome in outcomes), outcomes
    close_all(ranks)
    manifest = newest(tmp_path)
    for rank in range(world_size):
        expected = state(rank, 10)
        restored = restore(tmp_path, manifest, rank, world_size)
        assert restored.keys() == expected.tensors.keys()
        for name, live in expected.tensors.items():
            assert torch.equal(restored[name], live.tensor), name
        assert manifest.values_of(rank) == expected.values


def test_ranks_share_the_writing_of_what_they_all_hold(tmp_path):
    ranks = start(tmp_path, 4)
    save_all(ranks, 1)
    close_all(ranks)
    sizes = [path.stat().st_size for path in sorted(tmp_path.glob("step-1/*.safetensors"))]
    assert len(sizes) == 4
    assert max(sizes) < 1.1 * ROWS * 128 * 4 / 4 + 20_000
    parts = [safetensors.torch.load_file(path) for path in sorted(tmp_path.glob("step-1/*.safetensors"))]
    rows = [value for part in parts for name, value in sorted(part.items()) if name.startswith("model/w[")]
    assert torch.equal(torch.cat(rows), state(0, 1).tensors["model/w"].tensor)


def test_two_saves_of_one_state_have_the_same_bytes(tmp_path):
    for run in ("a", "b"):
        ranks = start(tmp_path / run, 2)
        save_all(ranks, 3)
        close_all(ranks)
    for path in (tmp_path / "a/step-3").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "b/step-3" / path.name).read_bytes()


def test_a_write_that_fails_on_one_rank_commits_nothing_anywhere(tmp_path):
    ranks = start(tmp_path, 3)
    assert save_all(ranks, 1)[0].committed

    def full(*_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    ranks[1].store.create_in_parts = full
    outcomes = save_all(ranks, 2)
    assert not any(outcome.committed for outcome in outcomes)
    assert {outcome.reason for outcome in outcomes} == {outcomes[0].reason}
    assert "rank 1: cannot write step-2/g0001-rank-00001.safetensors" in outcomes[0].reason
    assert "No space left" in outcomes[0].reason
    assert not list(tmp_path.glob("step-2/*")), "the space of the failed try is given back"
    assert newest(tmp_path).step == 1
    del ranks[1].store.create_in_parts
    assert save_all(ranks, 2, attempt=1)[0].committed, "the next save tries again"
    close_all(ranks)
    assert newest(tmp_path).step == 2


def test_a_save_that_one_rank_did_not_enter_names_it_within_the_deadline(tmp_path):
    ranks = start(tmp_path, 3, deadline_s=0.3)
    for session in ranks:
        session.planner._agreed = "agreed before"
    outcomes = save_all(ranks[:1] + ranks[2:], 5)
    texts = {outcome.reason for outcome in outcomes}
    assert any("rank(s) 1 did not enter the save of step 5 within 0.3 s" in text for text in texts), texts
    assert not list(tmp_path.glob("step-5/manifest.json"))
    on_all(ranks, lambda session: session.close(abandon=True))


def test_a_save_that_rank_0_did_not_enter_ends_within_the_deadline(tmp_path):
    """Rank 0 decides the outcome; without it the others waited for the write deadline, an hour."""
    ranks = start(tmp_path, 3, deadline_s=0.3)
    for session in ranks:
        session.planner._agreed = structure_of(over(state(0, 5), 3), shared_only=True)
    outcomes = save_all(ranks[1:], 5)
    assert {outcome.reason for outcome in outcomes} == {
        "rank 0 did not enter the save of step 5 within 0.3 s; do all ranks call step() and save() alike?"
    }
    on_all(ranks, lambda session: session.close(abandon=True))


def test_a_rank_that_cannot_take_part_says_why_on_all_ranks(tmp_path):
    ranks = start(tmp_path, 2)

    def act(session):
        if session.cluster.rank == 1:
            session.save(SaveId(7, 0, 0), None, "scheduler.state_dict() raised KeyError")
        else:
            session.save(SaveId(7, 0, 0), state(0, 7))
        assert session.wait()
        return session.outcomes.popleft()

    outcomes = on_all(ranks, act)
    assert [o.committed for o in outcomes] == [False, False]
    assert all("rank 1: scheduler.state_dict() raised KeyError" in o.reason for o in outcomes)
    assert save_all(ranks, 8)[0].committed
    close_all(ranks)


def test_a_replica_that_differs_is_named_and_every_rank_keeps_its_own(tmp_path, caplog):
    def corrupt(rank, step):
        captured = state(rank, step)
        if rank == 2:
            captured.tensors["model/bias"].tensor[3] += 1
        return captured

    ranks = start(tmp_path, 3)
    assert save_all(ranks, 4, make=corrupt)[0].committed
    close_all(ranks)
    assert "1 tensors that should be equal on all ranks are not: model/bias on rank(s) 2" in caplog.text
    manifest = newest(tmp_path)
    for rank in range(3):
        expected = corrupt(rank, 4).tensors["model/bias"].tensor
        assert torch.equal(restore(tmp_path, manifest, rank, 3)["model/bias"], expected)


def test_replicas_that_drift_apart_later_are_found_and_then_kept_each(tmp_path, caplog):
    """A schedule that follows each rank's own loss: equal at the first save, different afterwards."""

    def drifting(rank, step):
        captured = state(rank, step)
        if rank == 1 and step >= 2:
            captured.tensors["model/bias"].tensor[0] += 1
        return captured

    ranks = start(tmp_path, 3)
    assert save_all(ranks, 1, make=drifting)[0].committed
    outcomes = save_all(ranks, 2, make=drifting)
    assert not any(outcome.committed for outcome in outcomes), "a mixture of ranks is no checkpoint"
    assert "differ on rank(s) 1 since the save before" in outcomes[0].reason
    [session.planner.forget() for session in ranks if outcomes[0].replan]
    assert save_all(ranks, 3, make=drifting)[0].committed
    close_all(ranks)
    assert "model/bias on rank(s) 1" in caplog.text
    for rank in range(3):
        expected = drifting(rank, 3).tensors["model/bias"].tensor
        assert torch.equal(restore(tmp_path, newest(tmp_path), rank, 3)["model/bias"], expected)


def test_a_structure_that_changes_on_one_rank_only_fails_once_and_heals(tmp_path):
    def grown(rank, step):
        captured = state(rank, step)
        if rank == 0 or step > 2:
            captured.tensors["model/new"] = replica(torch.ones(3), 1)
        return captured

    ranks = start(tmp_path, 2)
    assert save_all(ranks, 1)[0].committed
    outcomes = save_all(ranks, 2, make=grown)
    assert [o.committed for o in outcomes] == [False, False]
    assert "structure on rank(s) 0 but not on 1" in outcomes[0].reason
    assert all(outcome.replan for outcome in outcomes)
    [session.planner.forget() for session in ranks]
    assert save_all(ranks, 3, make=grown)[0].committed
    close_all(ranks)
    assert torch.equal(restore(tmp_path, newest(tmp_path), 1, 2)["model/new"], torch.ones(3))


def test_what_only_one_rank_has_may_come_and_go(tmp_path):
    def growing(rank, step):
        captured = state(rank, step)
        if rank == 1 and step == 2:
            captured.tensors["gradients/model/w"] = LiveTensor(torch.ones(3))
        return captured

    ranks = start(tmp_path, 2)
    assert [save_all(ranks, step, make=growing)[0].committed for step in (1, 2, 3)] == [True, True, True]
    close_all(ranks)


def test_a_module_that_is_registered_without_its_ddp_wrapper_is_told_once(tmp_path, caplog):
    def bare(rank, step):
        captured = Captured(values={"model": {"kind": "module"}})
        captured.tensors["model/w"] = LiveTensor(torch.zeros(step))
        return captured

    ranks = start(tmp_path, 2)
    assert [save_all(ranks, step, make=bare)[0].committed for step in (1, 2)] == [True, True]
    close_all(ranks)
    assert caplog.text.count("no registered module is a DistributedDataParallel: each of 2 ranks") == 1


def test_details_tell_missing_and_differing_tensors_apart():
    same = Claim("float32", "[2]", "all", True, "0-2", "aa")
    meshes = {"all": [0, 1, 2]}
    details = [
        Details({"w": same, "b": same, "only": same}, meshes),
        Details({"w": same, "b": Claim("float32", "[2]", "all", True, "0-2", "bb")}, meshes),
        Details({"w": same, "b": same, "only": Claim("float32", "[3]", "all", True, "0-2", "aa")}, meshes),
    ]
    plan = compare_details(["one", "two", "three"], dict(enumerate(details)))
    assert plan.apart == ["b", "only"]
    assert plan.differing == ["b on rank(s) 1"]


def test_a_newer_generation_fences_off_the_older_one(tmp_path):
    old = start(tmp_path, 2)
    save_all(old, 10)
    new = start(tmp_path, 2, restored=newest(tmp_path))
    outcomes = save_all(old, 20)
    assert not outcomes[0].committed
    assert outcomes[0].taken_over_by == 2
    assert "generation 2 has taken over" in outcomes[0].reason
    assert newest(tmp_path).step == 10
    assert save_all(new, 20)[0].committed
    assert newest(tmp_path).generation == 2
    close_all(old)
    close_all(new)


def test_what_the_old_process_commits_late_is_never_restored(tmp_path, monkeypatch):
    """The fence was passed just before the new generation began: the manifest appears, off the lineage."""
    old = start(tmp_path, 1)
    save_all(old, 10)
    new = start(tmp_path, 1, restored=newest(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr("unbroken.commit.newest_number", lambda _store: 1)
        assert save_all(old, 20)[0].committed
    assert newest(tmp_path).step == 10
    assert save_all(new, 20)[0].committed, "the step is saved by the new generation all the same"
    manifest = newest(tmp_path)
    assert (manifest.step, manifest.generation) == (20, 2)
    assert (tmp_path / "step-20/manifest.g0001.json").exists(), "moved aside, not destroyed"
    with monkeypatch.context() as patch:
        patch.setattr("unbroken.commit.newest_number", lambda _store: 1)
        late = save_all(old, 20, attempt=1)[0]
    assert not late.committed, "and now the old one finds the newer manifest"
    assert newest(tmp_path).generation == 2
    close_all(old)
    close_all(new)


def test_a_damaged_manifest_does_not_block_the_step(tmp_path):
    ranks = start(tmp_path, 1)
    save_all(ranks, 10)
    save_all(ranks, 20)
    close_all(ranks)
    path = tmp_path / "step-20" / MANIFEST
    path.write_bytes(path.read_bytes()[:100])
    manifest = newest(tmp_path)
    assert manifest.step == 10
    again = start(tmp_path, 1, restored=manifest)
    assert save_all(again, 20)[0].committed
    close_all(again)
    assert newest(tmp_path).step == 20


def test_retention_counts_recorded_steps_not_times_or_names(tmp_path):
    ranks = start(tmp_path, 2, keep=Keep(last=3))
    for step in (9, 10, 99, 100, 1000):
        assert save_all(ranks, step)[0].committed
    close_all(ranks)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-100", "step-1000", "step-99"]


def test_retention_leaves_an_abandoned_history_and_strange_directories_alone(tmp_path):
    old = start(tmp_path, 1)
    for step in (500, 600, 700):
        save_all(old, step)
    close_all(old)
    (tmp_path / "step-best").mkdir()
    (tmp_path / "step-800").mkdir()
    (tmp_path / "step-800/manifest.json").write_text("not ours")
    new = start(tmp_path, 1, keep=Keep(last=2))
    for step in (100, 200, 300):
        assert save_all(new, step)[0].committed
    close_all(new)
    names = {path.name for path in tmp_path.glob("step-*")}
    assert names == {"step-200", "step-300", "step-500", "step-600", "step-700", "step-800", "step-best"}


def test_leftovers_of_dead_generations_are_swept_and_the_living_ones_kept(tmp_path):
    old = start(tmp_path, 1)
    save_all(old, 10)
    close_all(old)
    for name in ("step-15/g0001-rank-00000.safetensors", "step-10/g0001-rank-00000-1.safetensors", "step-15/.tmp-ab12"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"cut off")
    new = start(tmp_path, 1, restored=newest(tmp_path), keep=Keep(last=3))
    (tmp_path / "step-30").mkdir()
    (tmp_path / "step-30/g0002-rank-00000.safetensors").write_bytes(b"being written now")
    save_all(new, 20)
    close_all(new)
    assert not (tmp_path / "step-15").exists()
    assert not (tmp_path / "step-10/g0001-rank-00000-1.safetensors").exists()
    assert (tmp_path / "step-30/g0002-rank-00000.safetensors").exists()
    assert newest(tmp_path).step == 20


def test_a_sweep_removes_what_killed_starts_left_but_not_the_probe_of_the_next_one(tmp_path):
    """Probes and temporary records of starts that were killed stayed for ever."""
    ranks = start(tmp_path, 1, keep=Keep(last=1))
    left = [".probe-0001-00ff", ".tmp-00ff", ".probe-0002-00ff", "notes.txt"]
    for name in left:
        (tmp_path / "generations" / name).touch()
    assert save_all(ranks, 5)[0].committed
    close_all(ranks)
    assert LocalStore(tmp_path).list("generations") == [".probe-0002-00ff", "0001.json", "notes.txt"]


def test_a_sweep_leaves_the_empty_directory_of_the_next_save_alone(tmp_path):
    """A rank had just made step-6 when the sweep after step 5 removed it as empty; its file could not be created."""
    ranks = start(tmp_path, 1, keep=Keep(last=1))
    (tmp_path / "step-6").mkdir()
    (tmp_path / "step-4").mkdir()
    assert save_all(ranks, 5)[0].committed
    assert (tmp_path / "step-6").is_dir()
    close_all(ranks)
    assert not (tmp_path / "step-4").exists(), "what a crash left behind is removed"


def test_the_last_good_checkpoint_is_never_deleted(tmp_path):
    ranks = start(tmp_path, 1, keep=Keep(last=1))
    for step in (1, 2, 3):
        save_all(ranks, step)
        assert newest(tmp_path).step == step
    close_all(ranks)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-3"]


def test_a_fresh_generation_over_checkpoints_is_refused(tmp_path):
    ranks = start(tmp_path, 2)
    save_all(ranks, 10)
    close_all(ranks)
    errors = on_all(sessions(tmp_path, 2), lambda session: session.begin_fresh(0))
    assert all(isinstance(error, HistoryExists) for error in errors)
    assert "up to step 10" in str(errors[1])
    assert "call it before training" in str(errors[1])
    assert generations.newest_number(LocalStore(tmp_path)) == 1


def test_the_manifest_on_disk_is_json_that_decodes(tmp_path):
    ranks = start(tmp_path, 2)
    save_all(ranks, 10)
    close_all(ranks)
    manifest = decode((tmp_path / "step-10" / MANIFEST).read_bytes(), "x")
    assert [file.name for file in manifest.files] == ["g0001-rank-00000.safetensors", "g0001-rank-00001.safetensors"]
    assert len(manifest.values["scheduler"]) == 1, "equal values of all ranks are stored once"
    assert len(manifest.values["rng"]) == 2
