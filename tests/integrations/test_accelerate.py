"""Loops with Accelerate: broken off anywhere and started again, they end as if they had not been."""

import pytest

from integrations.accelerate_runs import train
from unbroken.errors import UsageError

TRAIN = "integrations.accelerate_runs:train"
SETTINGS = {
    "plain": {},
    "no accumulation": {"accumulate": 1},
    "bf16": {"precision": "bf16"},
    "compiled": {"compiled": "eager"},
    "a scaler": {"scaled": True},
    "an evaluation whose workers were to persist": {"lasting_workers": 1},
    "a seedable sampler": {"loader": {"use_seedable_sampler": True, "data_seed": 4}},
    "a stateful loader": {"loader": {"use_stateful_dataloader": True}, "all_loaders": True},
    "a stream": {"stream": True, "steps": 15, "loader": {"dispatch_batches": False}},
}


def run(name, out, **more):
    return train(0, 1, str(out), SETTINGS[name], **more)


def same(broken, whole):
    differing = [key for key in whole if key not in ("seen", "evaluated") and broken[key] != whole[key]]
    assert not differing, {key: (broken[key], whole[key]) for key in differing}
    for key in {"seen", "evaluated"} & whole.keys():
        assert broken[key] == whole[key][len(whole[key]) - len(broken[key]) :], key


@pytest.mark.parametrize("name", SETTINGS)
def test_broken_off_and_started_again_it_ends_the_same(tmp_path, name):
    whole = run(name, tmp_path / "whole")
    for steps in (3, 6, 7, 13):
        run(name, tmp_path / "broken", broken_at=steps)
    same(run(name, tmp_path / "broken"), whole)


def test_saving_at_every_step_equals_never_saving(tmp_path):
    same(run("plain", tmp_path / "often"), run("plain", tmp_path / "never", every=0))


@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP2"])
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_are_broken_off_end_the_same(ranks, tmp_path, world, sharded):
    settings = {"steps": 9, "sharded": sharded}
    whole = ranks.run_all_well(TRAIN, world, str(tmp_path / "whole"), settings)
    for steps in (2, 5):
        ranks.run_all_well(TRAIN, world, str(tmp_path / "broken"), settings, steps)
    broken = ranks.run_all_well(TRAIN, world, str(tmp_path / "broken"), settings)
    for one, other in zip(broken, whole, strict=True):
        same(one, other)
    assert whole[0]["kinds"] == ["DTensor" if sharded else "Parameter"]


@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP2"])
def test_each_sample_comes_once_whatever_the_number_of_ranks(ranks, tmp_path, sharded):
    """2 ranks, then 1, then 2, within an epoch; the global batch stays 8."""
    settings = {"accumulate": 1, "steps": 12, "sharded": sharded}
    whole = ranks.run_all_well(TRAIN, 2, str(tmp_path / "whole"), settings)
    expected = global_batches(whole)
    assert len(expected) == 12
    begin = 0
    for world, steps in ((2, 3), (1, 5), (2, None)):
        told = ranks.run_all_well(TRAIN, world, str(tmp_path / "broken"), settings, steps)
        part = global_batches(told)
        begin = next(at for at in range(begin + 1) if expected[at] == part[0])
        assert part == expected[begin : begin + len(part)]
        begin += len(part)
    assert begin == 12
    assert [rank["rate"] for rank in told] == [rank["rate"] for rank in whole], "two steps of the scheduler in each"


def global_batches(results):
    """By step: the samples of all ranks."""
    by_step = zip(*(rank["seen"] for rank in results), strict=True)
    return [sorted(sample for batch in batches for sample in batch) for batches in by_step]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"loader": {"use_stateful_dataloader": True}}, "use_stateful_dataloader"),
        ({"stream": True, "steps": 5}, "dispatch_batches"),
        ({"rng_types": ["torch"]}, "rng_types"),
        ({"loader": {"split_batches": True}}, "split_batches"),
    ],
)
def test_what_makes_an_exact_resume_impossible_is_named_at_the_start(tmp_path, settings, named):
    with pytest.raises(UsageError, match=named):
        train(0, 1, str(tmp_path), settings)
