"""Lightning's Trainer: broken off anywhere and started again, it ends as if it had not been."""

import pytest

from integrations.lightning_runs import train

SETTINGS = {
    "as it comes": {},
    "accumulation, validation within epochs": {"accumulate_grad_batches": 2, "val_check_interval": 5},
    "max_steps in the middle of an epoch": {"max_steps": 20, "max_epochs": -1, "workers": 1},
    "no validation": {"limit_val_batches": 0},
    "own checkpoints": {"enable_checkpointing": True},
    "bf16": {"precision": "bf16-mixed"},
    "a stream without a length": {"stream": True},
    "several optimizers, by hand": {"manual": True},
}
CASE = "integrations.lightning_runs:train"


def alone(out, settings, **more):
    settings = {"default_root_dir": str(out), **settings}
    return train(0, 1, str(out), settings, **more)


def same(broken, whole):
    """What each process saw for itself is the end of what the whole run saw."""
    differing = [key for key in whole if key not in ("seen", "validated") and broken[key] != whole[key]]
    assert not differing, {key: (broken[key], whole[key]) for key in differing}
    for key in ("seen", "validated"):
        assert broken[key] == whole[key][len(whole[key]) - len(broken[key]) :], key


@pytest.mark.parametrize("name", SETTINGS)
def test_broken_off_and_started_again_it_ends_the_same(tmp_path, name):
    whole = alone(tmp_path / "whole", SETTINGS[name])
    # Of 12 batches an epoch: within one, at its end, and after its beginning.
    for batches in (5, 12, 14) if "workers" in SETTINGS[name] else (5, 11, 12, 13, 24):
        alone(tmp_path / "broken", SETTINGS[name], broken_at=batches, every=1)
    same(alone(tmp_path / "broken", SETTINGS[name], every=1), whole)


def test_saving_at_every_step_equals_never_saving(tmp_path):
    same(alone(tmp_path / "often", {}, every=1), alone(tmp_path / "never", {}, every=0))


def test_a_finished_run_does_nothing_more(tmp_path):
    whole = alone(tmp_path, {}, every=1)
    again = alone(tmp_path, {}, every=1)
    assert again["seen"] == []
    assert (again["weights"], again["rate"]) == (whole["weights"], whole["rate"])


def test_early_stopping_goes_on_counting(tmp_path):
    settings = {"stopping": 3, "max_epochs": 9}
    whole = alone(tmp_path / "whole", settings)
    assert whole["steps"][1] == 4
    for batches in (13, 25, 37):
        alone(tmp_path / "broken", settings, broken_at=batches, every=1)
    same(alone(tmp_path / "broken", settings, every=1), whole)


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_are_broken_off_end_the_same(ranks, tmp_path, world):
    settings = {"accumulate_grad_batches": 2, "default_root_dir": str(tmp_path)}
    whole = ranks.run_all_well(CASE, world, str(tmp_path / "whole"), settings)
    for batches in (3, 6):
        ranks.run_all_well(CASE, world, str(tmp_path / "broken"), settings, batches, 1)
    broken = ranks.run_all_well(CASE, world, str(tmp_path / "broken"), settings, None, 1)
    for one, other in zip(broken, whole, strict=True):
        same(one, other)


def test_each_sample_comes_once_whatever_the_number_of_ranks(ranks, tmp_path):
    """2 ranks, then 1, then 2, within an epoch; the global batch stays 8."""
    settings = {"limit_val_batches": 0, "max_epochs": 2, "default_root_dir": str(tmp_path)}
    whole = ranks.run_all_well(CASE, 2, str(tmp_path / "whole"), settings)
    expected = global_batches(whole)
    assert len(expected) == 12
    begin = 0
    for world, batches in ((2, 3), (1, 5), (2, None)):
        part = global_batches(ranks.run_all_well(CASE, world, str(tmp_path / "broken"), settings, batches, 1))
        begin = next(at for at in range(begin + 1) if expected[at] == part[0])
        assert part == expected[begin : begin + len(part)]
        begin += len(part)
    assert begin == 12


def global_batches(results):
    """By step: the samples of all ranks."""
    by_step = zip(*(rank["seen"] for rank in results), strict=True)
    return [sorted(sample for batch in batches for sample in batch) for batches in by_step]
