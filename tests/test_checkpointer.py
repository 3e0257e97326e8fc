"""The facade in one process: the headline promises, and what a new user does wrong."""

import json
import multiprocessing
import os
import signal
import sys
import threading
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import unbroken
from toy import make_job, make_model, train
from unbroken import generations
from unbroken.directory import RUN_DIRECTORY
from unbroken.errors import (
    DirectoryProblem,
    HistoryExists,
    NewerFormat,
    NoUsableCheckpoint,
    Preempted,
    SaveFailed,
    StateMismatch,
    TakenOver,
    UnsupportedValue,
    UsageError,
)
from unbroken.ledger import VARIABLE
from unbroken.store.local import LocalStore

STEPS = 60


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run that never saves and never stops."""
    job = train(make_job(tmp_path_factory.mktemp("straight"), 0, 1), STEPS)
    job.ckpt.close()
    return job


def same(job, reference, steps) -> None:
    for step in steps:
        assert job.samples[step] == reference.samples[step], f"samples of step {step}"
        assert job.losses[step] == reference.losses[step], f"loss of step {step}"


def test_a_run_that_saves_at_every_step_equals_one_that_never_saves(tmp_path, undisturbed):
    job = make_job(tmp_path, 0, 1, every=unbroken.Every(steps=1))
    assert job.ckpt.restore() is None
    train(job, STEPS).ckpt.close()
    same(job, undisturbed, range(1, STEPS + 1))
    assert job.weights() == undisturbed.weights()


# 24 and 48 are epoch edges: 96 samples in batches of 4.
@pytest.mark.parametrize("stop", [1, 7, 23, 24, 25, 30, 47, 48, 49])
def test_a_run_that_stops_anywhere_equals_one_that_never_stops(tmp_path, undisturbed, stop):
    first = make_job(tmp_path, 0, 1, every=unbroken.Every(steps=1))
    first.ckpt.restore()
    train(first, stop).ckpt.close()
    second = make_job(tmp_path, 0, 1, seed=77, every=unbroken.Every(steps=10))
    restored = second.ckpt.restore()
    assert restored.step == second.ckpt.global_step == stop
    assert str(restored) == f"restored step {stop} from {tmp_path}/step-{stop}"
    train(second, STEPS).ckpt.close()
    same(second, undisturbed, range(stop + 1, STEPS + 1))
    assert second.weights() == undisturbed.weights()


def test_stops_in_one_epoch_add_up(tmp_path, undisturbed):
    for start, until in enumerate((3, 5, 11, 12, 29, 31, STEPS)):
        job = make_job(tmp_path, 0, 1, seed=start, every=unbroken.Every(steps=1))
        job.ckpt.restore()
        begun = job.ckpt.global_step
        train(job, until).ckpt.close()
        same(job, undisturbed, range(begun + 1, until + 1))
    assert job.weights() == undisturbed.weights()


def test_resuming_a_finished_run_does_nothing(tmp_path):
    for seed in (0, 1):
        job = make_job(tmp_path, 0, 1, seed=seed, every=unbroken.Every(steps=5))
        job.ckpt.restore()
        train(job, 10).ckpt.close()
        assert sorted(job.losses) == ([] if seed else list(range(1, 11)))


def test_partial_gradients_of_an_accumulation_window_are_restored(tmp_path):
    def window(job, stop_inside):
        for micro, rows in enumerate(torch.arange(24.0).view(3, 1, 8)):
            if micro < job.done:
                continue
            job.model(torch.cat([rows, rows + 1])).sum().backward()
            if micro < 2:
                job.ckpt.step(accumulating=True)
                if stop_inside and micro == 1:
                    job.ckpt.save()
                    job.ckpt.wait()
                    return
        job.optimizer.step()
        job.ckpt.step()

    straight = make_job(tmp_path / "a", 0, 1)
    straight.done = 0
    window(straight, stop_inside=False)
    first = make_job(tmp_path / "b", 0, 1)
    first.done = 0
    window(first, stop_inside=True)
    assert (tmp_path / "b/step-0.2/manifest.json").exists()
    first.ckpt.close()
    second = make_job(tmp_path / "b", 0, 1, seed=9)
    restored = second.ckpt.restore()
    assert str(restored).startswith("restored step 0 + 2 micro-steps from")
    assert restored.micro_step == second.ckpt.micro_step == 2
    second.done = second.ckpt.micro_step
    window(second, stop_inside=False)
    assert second.weights() == straight.weights()
    second.ckpt.close()


def test_saving_by_hand_at_step_0_works_and_twice_is_once(tmp_path):
    job = make_job(tmp_path, 0, 1)
    job.ckpt.save()
    job.ckpt.save()
    job.ckpt.wait()
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-0"]
    job.ckpt.close()


def test_as_a_context_manager_it_closes_and_an_error_passes_through(tmp_path):
    job = make_job(tmp_path, 0, 1)
    with pytest.raises(KeyError, match="mine"), job.ckpt as ckpt:
        ckpt.restore()
        raise KeyError("mine")
    with pytest.raises(UsageError, match="closed"):
        job.ckpt.save()


def test_every_by_minutes_and_auto_save_without_steps(tmp_path):
    for name, every in (("minutes", unbroken.Every(minutes=1e-9)), ("auto", "auto")):
        job = make_job(tmp_path / name, 0, 1, every=every)
        job.ckpt.restore()
        job.ckpt._schedule._interval_s = 0.0
        train(job, 3).ckpt.close()
        assert (tmp_path / name / "step-1/manifest.json").exists()
        assert (tmp_path / name / "step-3/manifest.json").exists() == (name == "minutes"), "auto waits for its interval"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_preempted_job_saves_leaves_and_goes_on(tmp_path, undisturbed, number):
    before = signal.getsignal(number)
    job = make_job(tmp_path, 0, 1)
    job.ckpt.restore()
    with pytest.raises(Preempted) as left:
        train(job, STEPS, before={9: lambda: os.kill(os.getpid(), number)})
    assert left.value.code == 75
    assert left.value.step == 9
    assert "SIG" in str(left.value)
    assert "start the job again" in str(left.value)
    assert signal.getsignal(number) == before
    again = make_job(tmp_path, 0, 1, seed=4)
    assert again.ckpt.restore().step == 9
    train(again, STEPS).ckpt.close()
    same(again, undisturbed, range(10, STEPS + 1))


def test_a_job_that_did_not_restore_is_stopped_at_its_first_save(tmp_path):
    first = make_job(tmp_path, 0, 1, every=unbroken.Every(steps=2))
    train(first, 4).ckpt.close()
    second = make_job(tmp_path, 0, 1, every=unbroken.Every(steps=2))
    with pytest.raises(HistoryExists, match=r"up to step 4.*did not call restore\(\).*or give a new directory"):
        train(second, 4)
    second.ckpt.close()
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-2", "step-4"]


def test_the_older_of_two_jobs_on_one_directory_stops_saving_and_says_so(tmp_path, caplog):
    old = make_job(tmp_path, 0, 1, every=unbroken.Every(steps=2))
    old.ckpt.restore()
    train(old, 4)
    old.ckpt.wait()
    new = make_job(tmp_path, 0, 1, every=unbroken.Every(steps=2))
    assert new.ckpt.restore().step == 4
    train(old, 6)
    with pytest.raises(TakenOver, match=r"generation 2 has taken over.*this job saves no more"):
        old.ckpt.wait()
    train(old, 10).ckpt.close()
    assert not (tmp_path / "step-8").exists()
    assert caplog.text.count("taken over") == 1, "said once, not at every save"
    train(new, 6).ckpt.close()
    assert make_job(tmp_path, 0, 1).ckpt.restore().generation == 2


def damage(path, size=None, byte=None):
    data = bytearray(path.read_bytes())
    if byte is not None:
        data[byte] ^= 0x10
    path.write_bytes(data[:size])


def run_to(path, until, **options):
    job = make_job(path, 0, 1, every=unbroken.Every(steps=1), **options)
    job.ckpt.restore()
    train(job, until).ckpt.close()
    return job


@pytest.mark.parametrize(
    "what", ["cut", "empty", "missing", "bit flip", "manifest cut", "manifest empty", "manifest missing"]
)
def test_a_damaged_newest_checkpoint_costs_its_own_steps_only(tmp_path, what, caplog):
    run_to(tmp_path, 5)
    manifest, file = tmp_path / "step-5/manifest.json", tmp_path / "step-5/g0001-rank-00000.safetensors"
    {
        "cut": lambda: damage(file, size=-1),
        "empty": lambda: damage(file, size=0),
        "missing": file.unlink,
        "bit flip": lambda: damage(file, byte=-20),
        "manifest cut": lambda: damage(manifest, size=200),
        "manifest empty": lambda: damage(manifest, size=0),
        "manifest missing": manifest.unlink,
    }[what]()
    job = make_job(tmp_path, 0, 1)
    restored = job.ckpt.restore()
    assert restored.step == 4
    if what == "manifest missing":
        assert restored.skipped == (), "it was never committed"
    else:
        assert len(restored.skipped) == 1
        assert "step-5" in str(restored)
        assert "step-5" in caplog.text
    job.ckpt.close()


def test_when_nothing_is_whole_the_error_lists_each_and_nothing_starts_anew(tmp_path):
    run_to(tmp_path, 2)
    for step in (1, 2):
        damage(tmp_path / f"step-{step}/g0001-rank-00000.safetensors", byte=-20)
    job = make_job(tmp_path, 0, 1)
    with pytest.raises(NoUsableCheckpoint, match=r"step-2 cannot be used.*bytes.*step-1 cannot be used.*new directory"):
        job.ckpt.restore()
    assert not (tmp_path / "generations/0002.json").exists()


@pytest.mark.parametrize("lost", ["cut", "deleted", "all deleted"])
def test_a_lost_generation_record_costs_no_step_and_its_number_is_not_given_out_again(tmp_path, lost):
    """Checkpoints of a generation without its record were passed over; a new start took the number a second time."""
    run_to(tmp_path, 3)
    for until in (6, 9):
        job = make_job(tmp_path, 0, 1, seed=until, every=unbroken.Every(steps=1), keep=unbroken.Keep(last=2))
        job.ckpt.restore()
        train(job, until).ckpt.close()
    assert {path.name for path in tmp_path.glob("step-*")} == {"step-8", "step-9"}, "all of generation 3"
    for record in sorted((tmp_path / "generations").glob("*.json"))[0 if lost == "all deleted" else -1 :]:
        record.write_bytes(record.read_bytes()[:50]) if lost == "cut" else record.unlink()
    job = make_job(tmp_path, 0, 1, seed=4, every=unbroken.Every(steps=1))
    restored = job.ckpt.restore()
    assert (restored.step, restored.generation) == (9, 3)
    assert "tells the lineage instead" in str(restored)
    train(job, 11).ckpt.close()
    assert list(tmp_path.glob("step-11/g0004-rank-00000.safetensors")), "the next number after all that were used"
    assert make_job(tmp_path, 0, 1).ckpt.restore().step == 11


def test_checkpoints_that_no_history_reaches_are_no_fresh_start(tmp_path):
    run_to(tmp_path, 3)
    generations.begin(LocalStore(tmp_path), None, 1)
    (tmp_path / "generations/0001.json").unlink()
    with pytest.raises(NoUsableCheckpoint, match="step-3 and what is older belong to an abandoned history"):
        make_job(tmp_path, 0, 1).ckpt.restore()
    with pytest.raises(HistoryExists, match="up to step 3"):
        make_job(tmp_path, 0, 1).ckpt.save()


def test_a_newer_format_is_not_taken_for_damage(tmp_path):
    run_to(tmp_path, 2)
    path = tmp_path / "step-2/manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"version":1', b'"version":7', 1))
    with pytest.raises(NewerFormat, match=r"version 7.*upgrade"):
        make_job(tmp_path, 0, 1).ckpt.restore()


def with_model(path, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return unbroken.Checkpointer(path, {"model": model, "optimizer": optimizer})


def saved_model(path):
    model = make_model()
    ckpt = with_model(path, model)
    ckpt.restore()
    ckpt.save()
    ckpt.close()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: nn.Sequential(*list(m)[:-1]), r"5\.weight"),
        (lambda m: nn.Sequential(*m, nn.Linear(1, 1)), r"6\.weight"),
        (lambda m: nn.ModuleDict({"body": m}), r"body\.0\.weight"),
        (lambda _m: make_model(width=16), r"0\.weight"),
        (lambda m: m.double(), r"float64"),
    ],
    ids=["one layer less", "one layer more", "other names", "other width", "other dtype"],
)
def test_a_model_that_does_not_fit_is_refused_by_name_and_nothing_is_touched(tmp_path, change, text):
    saved_model(tmp_path)
    model = change(make_model())
    before = [value.clone() for value in model.state_dict().values()]
    on_disk = sorted((path.name, path.read_bytes()) for path in tmp_path.rglob("*") if path.is_file())
    with pytest.raises(StateMismatch, match=text) as refused:
        with_model(tmp_path, model).restore()
    assert len(str(refused.value)) < 600, "one or two lines"
    assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))
    assert on_disk == sorted((path.name, path.read_bytes()) for path in tmp_path.rglob("*") if path.is_file())


def test_what_was_not_saved_and_what_is_not_registered_are_both_named(tmp_path):
    saved_model(tmp_path)
    model = make_model()
    with pytest.raises(StateMismatch, match="ema"):
        unbroken.Checkpointer(tmp_path, {"model": model, "ema": make_model()}).restore()
    with pytest.raises(StateMismatch, match="optimizer"):
        unbroken.Checkpointer(tmp_path, {"model": model}).restore()


def test_wrong_paths_are_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DirectoryProblem, match="is a file, not a directory"):
        make_job(tmp_path / "file", 0, 1).ckpt.restore()
    saved_model(tmp_path / "run")
    with pytest.raises(DirectoryProblem, match=r"is a single checkpoint; give the run directory above it"):
        make_job(tmp_path / "run/step-0", 0, 1).ckpt.restore()
    with pytest.raises(DirectoryProblem, match=r"cannot write to the run directory /proc/none"):
        make_job("/proc/none", 0, 1).ckpt.restore()
    with pytest.raises(UsageError, match="object stores are not supported yet"):
        make_job("s3://bucket/run", 0, 1)


def test_a_small_save_is_durable_before_the_next_step_counts(tmp_path, monkeypatch):
    """A kill cost the steps since the last save and one more, which ended while that save was being written."""
    job = make_job(tmp_path, 0, 1, every=unbroken.Every(steps=5))
    job.ckpt.restore()
    for step in range(1, 31):
        job.ckpt.step()
        if step % 5 == 1 and step > 1:
            assert (tmp_path / f"step-{step - 1}/manifest.json").exists()
    job.ckpt.close()


def test_a_large_save_is_never_waited_for_by_the_next_step(tmp_path, monkeypatch):
    monkeypatch.setattr("unbroken.session.SMALL_BYTES", 10)
    job = make_job(tmp_path, 0, 1, every=unbroken.Every(steps=5))
    job.ckpt.restore()
    go_on = threading.Event()
    real = job.ckpt._session.store.create
    monkeypatch.setattr("unbroken.session.SMALL_WAIT_S", 600)
    job.ckpt._session.store.create = lambda name, data: (go_on.wait(30), real(name, data))
    for _ in range(8):
        job.ckpt.step()
    assert not (tmp_path / "step-5/manifest.json").exists()
    go_on.set()
    job.ckpt.close()
    assert (tmp_path / "step-5/manifest.json").exists()


def test_a_forgotten_step_is_said_at_the_end(tmp_path, caplog):
    job = make_job(tmp_path, 0, 1, every=unbroken.Every(steps=2))
    job.ckpt.restore()
    job.ckpt.close()
    assert "step() was never called" in caplog.text


def test_a_plain_loader_is_refused_with_what_to_do(tmp_path):
    with pytest.raises(UsageError, match=r"register unbroken\.resumable\(loader\)"):
        unbroken.Checkpointer(tmp_path, {"loader": DataLoader([1, 2, 3])})


def test_what_is_planted_in_the_way_of_a_save_costs_the_save_only(tmp_path):
    """A link where the step's directory should be raised ValueError in the writer, and no vote was cast."""
    job = make_job(tmp_path / "run", 0, 1, every=unbroken.Every(steps=1))
    job.ckpt.restore()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run/step-1").symlink_to(tmp_path / "elsewhere")
    train(job, 1)
    with pytest.raises(SaveFailed, match="links inside a run directory are refused"):
        job.ckpt.wait()
    train(job, 2).ckpt.close()
    assert (tmp_path / "run/step-2/manifest.json").exists()
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_forked_child_ends_on_sigterm_and_saves_nothing(tmp_path):
    """A pool's workers inherited the handler, which only sets a flag: Pool.terminate() never returned."""
    job = make_job(tmp_path, 0, 1)
    job.ckpt.restore()
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    child = context.Process(target=lambda: (ready.set(), threading.Event().wait()))
    child.start()
    assert ready.wait(30)  # Python drops signals that come while it forks
    child.terminate()
    child.join(30)
    assert child.exitcode == -signal.SIGTERM
    ended = context.Process(target=sys.exit)
    ended.start()
    ended.join(30)
    assert ended.exitcode == 0
    job.ckpt.save()
    job.ckpt.close()
    assert (tmp_path / "step-0/manifest.json").exists()


def test_a_script_whose_own_handler_is_replaced_is_told(tmp_path, caplog):
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        job = make_job(tmp_path, 0, 1)
        job.ckpt.restore()
        job.ckpt.close()
        assert "own handler of SIGUSR1 is not called until close()" in caplog.text
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_wrong_arguments_are_said():
    model = make_model()
    for options in ({"every": 100}, {"keep": 3}, {"on_error": "ignore"}):
        with pytest.raises(UsageError):
            unbroken.Checkpointer("x", {"model": model}, **options)


def test_restore_comes_first_and_once(tmp_path):
    job = make_job(tmp_path, 0, 1)
    job.ckpt.restore()
    with pytest.raises(UsageError, match="once"):
        job.ckpt.restore()
    job.ckpt.close()
    late = make_job(tmp_path / "other", 0, 1)
    late.ckpt.step()
    with pytest.raises(UsageError, match="before the first step"):
        late.ckpt.restore()


class Strange:
    def state_dict(self):
        return {"hook": lambda: None}

    def load_state_dict(self, state):
        raise AssertionError


def test_a_value_that_cannot_be_stored_is_refused_at_the_first_save_by_its_path(tmp_path):
    ckpt = unbroken.Checkpointer(tmp_path, {"model": make_model(), "thing": Strange()})
    ckpt.restore()
    with pytest.raises(UnsupportedValue, match=r"thing.*hook"):
        ckpt.save()
    ckpt.close()
    assert not list(tmp_path.glob("step-*/manifest.json"))


def test_a_full_disk_costs_the_save_not_the_training(tmp_path, caplog):
    job = make_job(tmp_path, 0, 1, every=unbroken.Every(steps=1))
    job.ckpt.restore()
    train(job, 2)
    job.ckpt.wait()
    with file_size_limit(3000):
        train(job, 3)
        with pytest.raises(SaveFailed, match=r"step 3 was not saved.*older checkpoints are intact"):
            job.ckpt.wait()
    assert not list(tmp_path.glob("step-3/*")), "the space of the failed try is freed"
    assert "step 3 was not saved" in caplog.text
    train(job, 4).ckpt.close()
    assert (tmp_path / "step-4/manifest.json").exists()
    assert (tmp_path / "step-2/manifest.json").exists()


def test_with_on_error_raise_a_failed_save_reaches_the_loop(tmp_path):
    job = make_job(tmp_path, 0, 1, every=unbroken.Every(steps=1), on_error="raise")
    job.ckpt.restore()
    with file_size_limit(3000):
        train(job, 1)
        job.ckpt._session.wait()
        with pytest.raises(SaveFailed, match="step 1 was not saved"):
            train(job, 2)
    with pytest.raises(SaveFailed):
        job.ckpt.close()


class file_size_limit:
    """Writes past `size` bytes of a file fail with EFBIG, as on a full disk."""

    def __init__(self, size):
        self.size = size

    def __enter__(self):
        import resource

        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
        self.handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, self.before[1]))

    def __exit__(self, *_):
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)
        signal.signal(signal.SIGXFSZ, self.handler)


def test_step_without_a_due_save_touches_no_file_and_no_device(tmp_path, monkeypatch):
    job = make_job(tmp_path, 0, 1, every=unbroken.Every(steps=1000))
    job.ckpt.restore()

    class Untouchable:
        def __float__(self):
            raise AssertionError("the loss is read only for the ledger")

    monkeypatch.setattr(os, "open", lambda *_a, **_k: pytest.fail("a file was opened"))
    for _ in range(100):
        job.ckpt.step(loss=Untouchable())
    monkeypatch.undo()
    job.ckpt.close()


def test_the_ledger_has_a_line_for_every_step(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "ledger"))
    job = make_job(tmp_path / "run", 0, 1)
    job.ckpt.restore()
    train(job, 12).ckpt.close()
    (path,) = (tmp_path / "ledger").glob("*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert {line["step"]: line["loss"] for line in lines} == job.losses
    assert {line["step"]: line["samples"] for line in lines} == job.samples
    assert all(line["rank"] == 0 and line["world"] == 1 and line["rng"] for line in lines)
    assert set(lines[4]["state"]) == {"model", "optimizer", "scheduler", "loader", "rng"}


def test_the_environment_can_name_the_run_directory(tmp_path, monkeypatch):
    monkeypatch.setenv(RUN_DIRECTORY, str(tmp_path / "elsewhere"))
    job = make_job(tmp_path / "ignored", 0, 1)
    job.ckpt.save()
    job.ckpt.close()
    assert (tmp_path / "elsewhere/step-0/manifest.json").exists()
    assert not (tmp_path / "ignored").exists()


def test_threads_end_with_the_checkpointer(tmp_path):
    before = set(threading.enumerate())
    for index in range(3):
        job = make_job(tmp_path / str(index), 0, 1, every=unbroken.Every(steps=1))
        job.ckpt.restore()
        train(job, 2).ckpt.close()
    assert set(threading.enumerate()) == before


def test_a_difference_of_the_machine_is_one_warning(tmp_path, caplog, monkeypatch):
    saved_model(tmp_path)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 63)
    with_model(tmp_path, make_model()).restore()
    assert [r.message for r in caplog.records if r.levelname == "WARNING"] == [
        f"rank 0 goes on from step 0, but: num_threads was {torch.get_num_threads() and 1} and is 63"
    ]


def test_a_kill_right_after_save_never_costs_the_older_checkpoint(tmp_path):
    """The write is slow and the process dies: nothing was deleted, nothing half-written counts."""
    job = make_job(tmp_path, 0, 1, every=unbroken.Every(steps=1), keep=unbroken.Keep(last=1))
    job.ckpt.restore()
    train(job, 2)
    job.ckpt.wait()
    entered, go_on = threading.Event(), threading.Event()
    real = job.ckpt._session.store.create

    def slow(name, data):
        entered.set()
        go_on.wait(30)
        return real(name, data)

    job.ckpt._session.store.create = slow
    began = time.monotonic()
    train(job, 3)
    assert time.monotonic() - began < 20, "step returned while the write was still going on"
    entered.wait(30)
    assert [path.name for path in tmp_path.glob("step-*/manifest.json")] == ["manifest.json"]
    assert (tmp_path / "step-2/manifest.json").exists()
    go_on.set()
    job.ckpt.close()
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-3"]
