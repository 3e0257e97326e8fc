"""Lightning's Trainer with `UnbrokenCheckpoint`: killed and resumed, it equals a run that was left alone."""

import os
import signal

import pytest

pytest.importorskip("lightning")

import lightning as L
import torch
from torch.utils.data import DataLoader

import unbroken
from integrations.lightning_jobs import Job, Model, assert_same, run
from processes import Raised
from unbroken.errors import UsageError
from unbroken.integrations.lightning import UnbrokenCheckpoint, private
from unbroken.store.local import LocalStore

RUNS = "integrations.lightning_jobs:on_rank"
CHEAP = {"max_epochs": 2}

JOBS = {
    "plain": (Job(), {"batch": 15}),
    "in a window": (Job(every=2), {"batch": 18}),
    "at an epoch's last batch": (Job(), {"epoch_end": 0}),
    "before an epoch's first batch": (Job(), {"batch": 12}),
    "plateau at an epoch's end": (Job(plateau=True, trainer={"val_check_interval": 1.0}), {"epoch_end": 1}),
    "max_steps": (Job(trainer={"max_steps": 9, "max_epochs": -1}), {"batch": 14}),
    "part of an epoch": (Job(trainer={"limit_train_batches": 7}), {"batch": 7}),
    "bf16": (Job(trainer={"precision": "bf16-mixed", **CHEAP}), {"batch": 9}),
    "compiled": (Job(compiled=True, trainer=CHEAP), {"batch": 9}),
    "a scaler": (Job(scaled=True, trainer=CHEAP), {"batch": 15}),
    "a stream": (Job(stream=True, trainer={"max_steps": 14, "max_epochs": -1}), {"batch": 15}),
    "a stream, at its end": (
        Job(stream=True, trainer={"max_steps": 14, "max_epochs": -1, "val_check_interval": 1.0}),
        {"epoch_end": 0},
    ),
    "two optimizers": (Job("TwoOptimizers", trainer={"accumulate_grad_batches": 1}), {"batch": 17}),
    "one optimizer adds up": (Job("AddingUp", trainer={"accumulate_grad_batches": 1}), {"batch": 17}),
    "frozen under way": (Job("Freezing", trainer={"accumulate_grad_batches": 1}), {"batch": 16}),
    "two loaders": (Job("TwoLoaders"), {"batch": 9}),
    "two loaders, one of them at its end": (Job("TwoLoaders"), {"batch": 8}),
    "an average of weights": (Job(average=True), {"batch": 15}),
    "windows that grow": (Job(doubling=True), {"batch": 17}),
    "early stopping": (Job(patience=2), {"batch": 6}),
    "resumable already": (Job(resumable_already=True, trainer=CHEAP), {"batch": 9}),
}


@pytest.mark.parametrize("name", JOBS)
def test_a_killed_run_equals_one_that_was_left_alone(tmp_path, name):
    job, killed_at = JOBS[name]
    straight = run(tmp_path / "straight", job)
    killed = run(tmp_path / "run", job, **killed_at)
    assert killed.batches and not killed.weights, "nothing was killed"
    resumed = run(tmp_path / "run", job)
    assert resumed.batches.keys() < straight.batches.keys(), "nothing was resumed"
    assert_same(killed, resumed, straight)


def test_saving_at_every_step_equals_never_saving(tmp_path):
    often, never = run(tmp_path / "often", Job(every=1)), run(tmp_path / "never", Job(every=None))
    assert often == never


def test_a_finished_run_trains_no_more(tmp_path):
    job = Job(every=7, trainer=CHEAP)
    finished = run(tmp_path, job)
    again = run(tmp_path, job)
    assert again.batches == {}
    assert (again.weights, again.place, again.metrics) == (finished.weights, finished.place, finished.metrics)


def test_a_loaders_own_seed_decides_the_order(tmp_path):
    asked, other = (run(tmp_path / str(own), Job(resumable_already=own, trainer=CHEAP)) for own in (True, False))
    assert asked.batches != other.batches


def test_a_tuner_tries_learning_rates_and_leaves_nothing(tmp_path):
    model = Model(Job())
    model.lr = 0.1
    trainer = trainer_with(tmp_path)
    L.pytorch.tuner.Tuner(trainer).lr_find(model, num_training=5, early_stop_threshold=None)
    assert not (tmp_path / "run").exists() and trainer.global_step == 0
    trainer.fit(model)
    assert trainer.global_step == 12 and (tmp_path / "run").exists()


def test_workers_give_the_same_randomness(tmp_path):
    job = Job(workers=2, trainer={"max_epochs": 2, "limit_val_batches": 1})
    straight = run(tmp_path / "straight", job)
    killed = run(tmp_path / "run", job, batch=9)
    assert_same(killed, run(tmp_path / "run", job), straight)


class SaveAt(L.Callback):
    """Asks for a save in a batch."""

    def __init__(self, batch):
        self.batch = batch

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.fit_loop.total_batch_idx == self.batch:
            next(one for one in trainer.callbacks if isinstance(one, UnbrokenCheckpoint)).save()


def test_half_a_window_is_saved_by_hand_and_goes_on(tmp_path):
    job = Job(every=None, trainer=CHEAP | {"accumulate_grad_batches": 3})
    straight = run(tmp_path / "straight", job)
    killed = run(tmp_path / "run", job, batch=9, callbacks=[SaveAt(7)])
    resumed = run(tmp_path / "run", job)
    assert min(resumed.batches) == 8, "batches 6 and 7 of the window 6, 7, 8 are in the checkpoint"
    assert_same(killed, resumed, straight)


@pytest.mark.parametrize(
    ("job", "killed_at"),
    [
        (Job(trainer={"val_check_interval": 2}), {"batch": 9}),
        (Job(trainer={"val_check_interval": 1.0}), {"epoch_end": 0}),
        (Job(sharded=True, batch_norm=False, trainer=CHEAP), {"batch": 7}),
    ],
    ids=["ddp", "ddp at an epoch's end", "fsdp2"],
)
def test_two_ranks_resume_bit_for_bit(ranks, tmp_path, job, killed_at):
    straight = ranks.run_all_well(RUNS, 2, str(tmp_path / "straight"), job)
    killed = ranks.run_all_well(
        RUNS, 2, str(tmp_path / "run"), job, *(killed_at.get(k) for k in ("batch", "epoch_end"))
    )
    resumed = ranks.run_all_well(RUNS, 2, str(tmp_path / "run"), job)
    for each in zip(killed, resumed, straight, strict=True):
        assert min(each[1].batches) > 0, "nothing was resumed"
        assert_same(*each)


def samples_of(*runs):
    """Samples by batch, over all ranks."""
    return {
        number: sorted(sample for one in runs for sample in one.batches[number][0])
        for number in sorted(set.intersection(*(set(one.batches) for one in runs)))
    }


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_a_rank_goes_and_comes_back_in_the_middle_of_an_epoch(ranks, tmp_path, sharded):
    job = Job(batch_norm=False, sharded=sharded, trainer=CHEAP | {"accumulate_grad_batches": 1})
    straight = samples_of(*ranks.run_all_well(RUNS, 2, str(tmp_path / "straight"), job))
    seen = samples_of(*ranks.run_all_well(RUNS, 2, str(tmp_path / "run"), job, 2))
    seen |= samples_of(*ranks.run_all_well(RUNS, 1, str(tmp_path / "run"), job, 4))
    last = ranks.run_all_well(RUNS, 2, str(tmp_path / "run"), job)
    seen |= samples_of(*last)
    assert seen == straight
    first_epoch = [sample for number in range(6) for sample in seen[number]]
    assert sorted(first_epoch) == list(range(46)), "each sample once"
    assert last[0].place[0] == 12 and len({one.weights for one in last}) == 1


def trainer_with(tmp_path, *callbacks, **options):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": 1}
    own = UnbrokenCheckpoint(tmp_path / "run", every=unbroken.Every(steps=1))
    return L.Trainer(accelerator="cpu", callbacks=[own, *callbacks], enable_model_summary=False, **{**quiet, **options})


class Lazy(Model):
    def training_step(self, dataloader_iter):
        raise AssertionError("never reached")


@pytest.mark.parametrize(
    ("callbacks", "options", "fit", "told"),
    [
        ([], {"reload_dataloaders_every_n_epochs": 1}, {}, "reload_dataloaders_every_n_epochs"),
        ([L.pytorch.callbacks.StochasticWeightAveraging(1e-2)], {}, {}, "use WeightAveraging"),
        ([L.pytorch.callbacks.BackboneFinetuning()], {}, {}, "BaseFinetuning"),
        ([L.pytorch.callbacks.LearningRateFinder()], {}, {}, "call Tuner"),
        ([UnbrokenCheckpoint("elsewhere")], {}, {}, "one UnbrokenCheckpoint"),
        ([], {}, {"train_dataloaders": [torch.ones(2)]}, "give torch DataLoaders"),
    ],
)
def test_what_cannot_be_resumed_exactly_is_refused_by_name(tmp_path, callbacks, options, fit, told):
    trainer = trainer_with(tmp_path, *callbacks, **options)
    with pytest.raises(UsageError, match=told):
        trainer.fit(Model(Job()), **fit)


def test_a_checkpoint_of_lightnings_is_not_resumed(tmp_path):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    theirs = L.Trainer(accelerator="cpu", max_steps=1, enable_model_summary=False, **quiet)
    theirs.fit(Model(Job()))
    theirs.save_checkpoint(tmp_path / "last.ckpt")
    with pytest.raises(UsageError, match=r"fit\(ckpt_path=…\): leave it out"):
        trainer_with(tmp_path).fit(Model(Job()), ckpt_path=tmp_path / "last.ckpt")


def test_a_training_step_that_fetches_ahead_is_refused(tmp_path):
    with pytest.raises(UsageError, match="dataloader_iter"):
        trainer_with(tmp_path).fit(Lazy(Job()))


def test_a_time_between_validations_is_told(tmp_path, caplog):
    trainer_with(tmp_path, val_check_interval="00:01:00:00", max_steps=1).fit(Model(Job()))
    assert "val_check_interval is a time" in caplog.text


def test_lightnings_own_checkpoints_go_on_beside(tmp_path):
    own = L.pytorch.callbacks.ModelCheckpoint(tmp_path / "own", monitor="val_loss", save_last=True)
    trainer = trainer_with(tmp_path, own, enable_checkpointing=True, max_epochs=2)
    model = Model(Job())
    trainer.fit(model)
    assert own.best_model_path and (tmp_path / "own" / "last.ckpt").exists()
    (tested,) = trainer.validate(model, ckpt_path="best", verbose=False)
    assert tested["val_loss"] > 0
    again = L.pytorch.callbacks.ModelCheckpoint(tmp_path / "own", monitor="val_loss", save_last=True)
    trainer_with(tmp_path, again, enable_checkpointing=True, max_epochs=2).fit(Model(Job()))
    assert again.best_model_score == own.best_model_score


def test_a_trainer_is_given_back_as_it_was(tmp_path):
    trainer = trainer_with(tmp_path, max_steps=1)
    kinds = type(trainer.fit_loop), type(trainer.fit_loop.epoch_loop)
    trainer.fit(Model(Job()))
    assert (type(trainer.fit_loop), type(trainer.fit_loop.epoch_loop)) == kinds
    assert "_prepare_dataloader" not in vars(trainer._data_connector)


class Tell(L.Callback):
    """Sends this process a notice of preemption in a batch."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.fit_loop.total_batch_idx == 8:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_job_that_is_told_to_leave_saves_its_step_and_goes_on(tmp_path):
    job, handler = Job(every=100, trainer=CHEAP), signal.getsignal(signal.SIGTERM)
    straight = run(tmp_path / "straight", job)
    with pytest.raises(unbroken.Preempted) as left:
        run(tmp_path / "run", job, callbacks=[Tell()])
    assert (left.value.code, left.value.step) == (75, 5), "at the end of the window of batches 8 and 9"
    resumed = run(tmp_path / "run", job)
    assert min(resumed.batches) == 10
    assert (resumed.weights, resumed.place, resumed.metrics) == (straight.weights, straight.place, straight.metrics)
    assert signal.getsignal(signal.SIGTERM) == handler


def test_fit_may_be_called_again_with_the_same_trainer(tmp_path):
    trainer, model = trainer_with(tmp_path, max_epochs=1), Model(Job(trainer=CHEAP))
    trainer.fit(model)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model)
    assert sorted(model.batches) == list(range(24)) and trainer.current_epoch == 2


def test_a_last_save_that_fails_does_not_end_training(tmp_path, monkeypatch, caplog):
    create = LocalStore.create_in_parts

    def full(store, name, *args, **kwargs):
        if name.endswith(".safetensors"):
            raise OSError(28, "No space left on device")
        return create(store, name, *args, **kwargs)

    trainer = trainer_with(tmp_path, max_steps=2)
    monkeypatch.setattr(LocalStore, "create_in_parts", full)
    trainer.fit(Model(Job()))
    assert trainer.global_step == 2 and "was not saved" in caplog.text


def test_fast_dev_run_leaves_no_checkpoint(tmp_path):
    trainer_with(tmp_path, fast_dev_run=True).fit(Model(Job()))
    assert not (tmp_path / "run").exists()


def test_the_private_names_are_as_lightning_has_them():
    private.check(L.Trainer(accelerator="cpu", logger=False))


def test_another_lightning_is_refused_by_the_name_that_it_lacks(monkeypatch):
    trainer = L.Trainer(accelerator="cpu", logger=False)
    monkeypatch.delattr(trainer, "_logger_connector")
    with pytest.raises(UsageError, match=r"Trainer\._logger_connector\._progress_bar_metrics is not as unbroken knows"):
        private.check(trainer)
    monkeypatch.setitem(private.NAMES, "lightning.pytorch.loops.fit_loop:_FitLoop", ("gone",))
    with pytest.raises(UsageError, match=r"_FitLoop\.gone .* or install lightning 2\.6\.6"):
        private.check(trainer)


def test_a_state_of_the_users_is_saved_too_and_may_not_hide_ours(tmp_path):
    generator = torch.Generator().manual_seed(3)
    own = UnbrokenCheckpoint(tmp_path / "run", every=unbroken.Every(steps=1), state={"model": generator})
    trainer = L.Trainer(accelerator="cpu", callbacks=[own], logger=False, enable_checkpointing=False, max_steps=1)
    with pytest.raises(UsageError, match="the Trainer's own model is saved by that name"):
        trainer.fit(Model(Job()), DataLoader([0]))


def test_ranks_that_lack_a_divisor_are_told(ranks, tmp_path):
    job = Job(batch_norm=False, batch_size=5, trainer=CHEAP)
    ranks.run_all_well(RUNS, 1, str(tmp_path), job, 7)
    for result in ranks.run(RUNS, 2, str(tmp_path), job):
        assert isinstance(result, Raised) and result.kind == "StateMismatch" and "cannot be divided" in result.text
