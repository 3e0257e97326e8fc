"""Transformers' Trainer: broken off anywhere and started again, it ends as if it had not been."""

import json
from itertools import chain

import pytest

from integrations.trainer_runs import Numbers, Restless, train
from unbroken.errors import UsageError

SETTINGS = {
    "as it comes": {},
    "no accumulation, workers": {
        "gradient_accumulation_steps": 1,
        "dataloader_num_workers": 2,
        "num_train_epochs": 2,
        "eval_steps": 9,
    },
    "max_steps in the middle of an epoch": {"max_steps": 16, "gradient_accumulation_steps": 1},
    "evaluated and logged each epoch": {
        "eval_strategy": "epoch",
        "logging_strategy": "epoch",
        "eval_on_start": True,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
    },
    "own checkpoints, best model": {
        "save_strategy": "steps",
        "save_steps": 4,
        "save_total_limit": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
    },
    "drop_last": {"dataloader_drop_last": True, "data_seed": 3},
    "bf16": {"bf16": True},
    "an iterable data set": {"stream": True, "max_steps": 15},
    "workers that persist, evaluated": {
        "dataloader_num_workers": 1,
        "dataloader_persistent_workers": True,
        "num_train_epochs": 2,
    },
    "callbacks that begin anew": {"callbacks": [Restless]},
    "compiled": {"torch_compile": True, "torch_compile_backend": "eager"},
    "lengths in groups": {"train_sampling_strategy": "group_by_length"},
}


def started_again(run, out, settings, broken_at, **more):
    """The same run, broken off at steps and started again each time."""
    for step in broken_at:
        run(out, settings, broken_at=step, **more)
    return run(out, settings, **more)


def alone(out, settings, **more):
    return train(0, 1, str(out), settings, **more)


def same(broken, whole):
    """All but what each process saw for itself."""
    differing = [key for key in whole if key != "seen" and broken[key] != whole[key]]
    assert not differing, {key: (broken[key], whole[key]) for key in differing}
    assert broken["seen"] == whole["seen"][len(whole["seen"]) - len(broken["seen"]) :]


@pytest.mark.parametrize("name", SETTINGS)
def test_broken_off_and_started_again_it_ends_the_same(tmp_path, name):
    whole = alone(tmp_path / "whole", SETTINGS[name])
    # In the middle of an epoch, right at its end and right after its beginning.
    steps = [3, 6, 7, 13] if whole["step"] == 18 else [5] if "persist" in name else [5, 12, 13]
    same(started_again(alone, tmp_path / "broken", SETTINGS[name], steps), whole)


def test_saving_at_every_step_equals_never_saving(tmp_path):
    same(alone(tmp_path / "often", {}, every=1), alone(tmp_path / "never", {}, every=0))


def test_a_finished_run_does_nothing_more(tmp_path):
    whole = alone(tmp_path, {"max_steps": 8}, every=1)
    again = alone(tmp_path, {"max_steps": 8}, every=1)
    assert again["seen"] == []
    assert (again["weights"], again["step"], again["rate"]) == (whole["weights"], 8, whole["rate"])


def test_a_run_of_more_steps_goes_on_where_a_shorter_one_ended(tmp_path):
    settings = {"lr_scheduler_type": "constant", "logging_steps": 1}
    whole = alone(tmp_path / "whole", {**settings, "max_steps": 14}, every=1)
    alone(tmp_path / "longer", {**settings, "max_steps": 8}, every=1)
    longer = alone(tmp_path / "longer", {**settings, "max_steps": 14}, every=1)
    assert longer["seen"] == whole["seen"][-len(longer["seen"]) :] and longer["step"] == 14
    assert longer["weights"] == whole["weights"]


def test_where_the_best_model_lies_is_not_compared_between_runs(tmp_path, monkeypatch):
    settings = {"save_strategy": "steps", "save_steps": 4, "max_steps": 8, "metric_for_best_model": "eval_loss"}
    digests = []
    for name in ("one", "another"):
        monkeypatch.setenv("UNBROKEN_LEDGER", str(tmp_path / name / "ledger"))
        alone(tmp_path / name, settings)
        (path,) = (tmp_path / name / "ledger").glob("*.jsonl")
        digests.append([json.loads(line)["state"] for line in path.read_text().splitlines()])
    assert digests[0] == digests[1] and len(digests[0]) == 8


def test_early_stopping_goes_on_counting_and_is_final(tmp_path):
    from transformers import EarlyStoppingCallback

    settings = {
        "callbacks": [lambda: EarlyStoppingCallback(2, 10.0)],
        "metric_for_best_model": "eval_loss",
        "load_best_model_at_end": True,
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_steps": 2,
    }
    whole = alone(tmp_path / "whole", settings, every=1)
    assert whole["step"] == 6
    same(started_again(alone, tmp_path / "broken", settings, [5], every=1), whole)
    again = alone(tmp_path / "broken", settings, every=1)
    assert (again["seen"], again["step"], again["weights"]) == ([], 6, whole["weights"])


@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP2"])
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_are_broken_off_end_the_same(ranks, tmp_path, world, sharded):
    case, settings = "integrations.trainer_runs:train", {"num_train_epochs": 4, "sharded": sharded}
    whole = ranks.run_all_well(case, world, str(tmp_path / "whole"), settings)
    for step in (3, 5):
        ranks.run_all_well(case, world, str(tmp_path / "broken"), settings, step)
    broken = ranks.run_all_well(case, world, str(tmp_path / "broken"), settings)
    for one, other in zip(broken, whole, strict=True):
        same(one, other)
    assert whole[0]["kinds"] == ["DTensor" if sharded else "Parameter"]


@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP2"])
def test_each_sample_comes_once_whatever_the_number_of_ranks(ranks, tmp_path, sharded):
    """2 ranks, then 1, then 2, within an epoch; the global batch stays 8."""
    settings = {"num_train_epochs": 2, "gradient_accumulation_steps": 1, "sharded": sharded}
    case = "integrations.trainer_runs:train"
    whole = ranks.run_all_well(case, 2, str(tmp_path / "whole"), settings, None, 1)
    expected = global_batches(whole)
    assert len(expected) == 12
    begin = 0
    for world, step in ((2, 3), (1, 5), (2, None)):
        part = ranks.run_all_well(case, world, str(tmp_path / "broken"), settings, step, 1)
        batches = global_batches(part)
        # Where it was broken off, the newest save may not have been durable.
        begin = next(at for at in range(begin + 1) if expected[at] == batches[0]) if begin else 0
        assert batches == expected[begin : begin + len(batches)]
        begin += len(batches)
    assert begin == 12
    assert [rank["rate"] for rank in part] == [rank["rate"] for rank in whole]
    assert part[0]["step"] == 12


def global_batches(results):
    """By step: the samples of all ranks. Of a padded batch, too."""
    return [sorted(chain.from_iterable(batches)) for batches in zip(*(rank["seen"] for rank in results), strict=True)]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"accelerator_config": {"split_batches": True}}, "split_batches"),
        ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches"),
    ],
)
def test_what_makes_an_exact_resume_impossible_is_named_at_the_start(tmp_path, settings, named):
    with pytest.raises(UsageError, match=named):
        alone(tmp_path, settings)


def test_a_changed_trainer_is_refused_by_the_name_of_the_method(tmp_path, monkeypatch):
    from transformers import Trainer

    monkeypatch.setattr(Trainer, "_run_epoch", lambda self, model, epoch: None)
    with pytest.raises(UsageError, match=r"Trainer\._run_epoch is not as unbroken knows it"):
        alone(tmp_path, {})


def test_the_private_names_are_there():
    """If this fails, a newer Transformers moved something: see integrations/transformers/trainer.py."""
    import inspect

    from transformers import Trainer

    from unbroken.integrations.transformers.trainer import METHODS

    for name, parameters in METHODS.items():
        assert tuple(inspect.signature(getattr(Trainer, name)).parameters)[1:] == parameters, name


def test_an_export_is_loaded_by_from_pretrained(tmp_path):
    import torch
    from transformers import AutoModelForSequenceClassification, BertConfig, Trainer, TrainingArguments
    from typer.testing import CliRunner

    import unbroken
    from unbroken.cli.main import app
    from unbroken.integrations.transformers import attach

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = AutoModelForSequenceClassification.from_config(BertConfig(vocab_size=64, **sizes))
    arguments = TrainingArguments(
        str(tmp_path / "own"), use_cpu=True, max_steps=2, save_strategy="no", report_to=[], disable_tqdm=True
    )
    trainer = Trainer(model, arguments, train_dataset=Numbers())
    attach(trainer, tmp_path / "run", every=unbroken.Every(steps=2))
    trainer.train()
    out = tmp_path / "exported"
    done = CliRunner().invoke(app, ["export", str(tmp_path / "run"), str(out), "--to", "transformers"])
    assert done.exit_code == 0, done.output
    loaded = AutoModelForSequenceClassification.from_pretrained(out)
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in model.state_dict().items())
