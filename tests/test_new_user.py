"""What a new user does wrong: an error of one or two lines, what to do, and nothing on disk is lost."""

import signal

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import unbroken
from toy import make_job, make_model, run_to, train
from unbroken.errors import (
    DirectoryProblem,
    HistoryExists,
    NewerFormat,
    SaveFailed,
    StateMismatch,
    TakenOver,
    UnsupportedValue,
    UsageError,
)


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


def test_a_forgotten_step_is_said_at_the_end(tmp_path, caplog):
    job = make_job(tmp_path, 0, 1, every=unbroken.Every(steps=2))
    job.ckpt.restore()
    job.ckpt.close()
    assert "step() was never called" in caplog.text


def test_a_plain_loader_is_refused_with_what_to_do(tmp_path):
    with pytest.raises(UsageError, match=r"register unbroken\.resumable\(loader\)"):
        unbroken.Checkpointer(tmp_path, {"loader": DataLoader([1, 2, 3])})


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


def test_a_difference_of_the_machine_is_one_warning(tmp_path, caplog, monkeypatch):
    saved_model(tmp_path)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 63)
    with_model(tmp_path, make_model()).restore()
    assert [r.message for r in caplog.records if r.levelname == "WARNING"] == [
        f"rank 0 goes on from step 0, but: num_threads was {torch.get_num_threads() and 1} and is 63"
    ]


def test_a_strict_job_that_was_accepted_once_is_not_stopped_when_it_starts_again(tmp_path, caplog):
    """A generator that had not moved by the first save of the first start may have by that of the second."""

    def start(draws):
        torch.manual_seed(0)
        model, noise = nn.Linear(2, 2), torch.Generator()
        with unbroken.Checkpointer(tmp_path, {"model": model}, strict=True) as ckpt:
            ckpt.restore()
            if draws:
                torch.rand(1, generator=noise)
            ckpt.step()
            ckpt.save()

    start(False)
    start(True)
    assert "generator `noise` (Generator)" in caplog.text
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-1", "step-2"]
