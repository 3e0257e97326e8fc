"""The facade in one process: the headline promises."""

import json
import multiprocessing
import os
import signal
import sys
import threading
import time

import pytest
import torch

import unbroken
from toy import make_job, train
from unbroken.directory import RUN_DIRECTORY
from unbroken.errors import (
    Preempted,
    UsageError,
)
from unbroken.ledger import VARIABLE

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


def test_resuming_a_finished_run_does_nothing(tmp_path, caplog):
    for seed in (0, 1):
        job = make_job(tmp_path, 0, 1, seed=seed, every=unbroken.Every(steps=5))
        job.ckpt.restore()
        train(job, 10).ckpt.close()
        assert sorted(job.losses) == ([] if seed else list(range(1, 11)))
    assert "never called" not in caplog.text


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
    real = job.ckpt._session.store.create_in_parts
    monkeypatch.setattr("unbroken.session.SMALL_WAIT_S", 600)
    job.ckpt._session.store.create_in_parts = lambda name, data: (go_on.wait(30), real(name, data))
    for _ in range(8):
        job.ckpt.step()
    assert not (tmp_path / "step-5/manifest.json").exists()
    go_on.set()
    job.ckpt.close()
    assert (tmp_path / "step-5/manifest.json").exists()


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


def test_a_kill_right_after_save_never_costs_the_older_checkpoint(tmp_path):
    """The write is slow and the process dies: nothing was deleted, nothing half-written counts."""
    job = make_job(tmp_path, 0, 1, every=unbroken.Every(steps=1), keep=unbroken.Keep(last=1))
    job.ckpt.restore()
    train(job, 2)
    job.ckpt.wait()
    entered, go_on = threading.Event(), threading.Event()
    real = job.ckpt._session.store.create_in_parts

    def slow(name, data):
        entered.set()
        go_on.wait(30)
        return real(name, data)

    job.ckpt._session.store.create_in_parts = slow
    began = time.monotonic()
    train(job, 3)
    assert time.monotonic() - began < 20, "step returned while the write was still going on"
    entered.wait(30)
    assert [path.name for path in tmp_path.glob("step-*/manifest.json")] == ["manifest.json"]
    assert (tmp_path / "step-2/manifest.json").exists()
    go_on.set()
    job.ckpt.close()
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-3"]
