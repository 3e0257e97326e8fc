"""Scripts with Lightning Fabric: stopped anywhere and resumed, they equal ones that were left alone."""

import pytest

pytest.importorskip("lightning")

from integrations.fabric_runs import Script, run

RUNS = "integrations.fabric_runs:on_rank"
STEPS = 14


def assert_same(parts, straight):
    """Runs in several parts equal one in one piece."""
    steps = {step: told for part in parts for step, told in part.steps.items()}
    assert steps == straight.steps
    assert {step: epoch for part in parts for step, epoch in part.epochs.items()} == straight.epochs
    assert parts[-1].weights == straight.weights


@pytest.mark.parametrize(
    ("script", "stops"),
    [
        (Script(), (4, 9)),
        (Script(accumulate=1), (12, 13)),
        (Script(workers=2), (5,)),
        (Script(stream=True), (6, 7)),
        (Script(shuffle=False, options={"precision": "bf16-mixed"}), (5,)),
    ],
    ids=["windows", "at an epoch's edge", "workers", "stream", "bf16 in order"],
)
def test_a_stopped_script_equals_one_that_was_left_alone(tmp_path, script, stops):
    straight = run(tmp_path / "straight", script, STEPS)
    parts = [run(tmp_path / "run", script, until) for until in (*stops, STEPS)]
    assert [part.begun_at for part in parts] == [0, *stops]
    assert_same(parts, straight)


def test_saving_at_every_step_equals_never_saving(tmp_path):
    often, never = run(tmp_path / "a", Script(every=1), 8), run(tmp_path / "b", Script(every=None), 8)
    assert often == never


def test_half_a_window_goes_on(tmp_path):
    script = Script(accumulate=3, every=None)
    straight = run(tmp_path / "straight", script, 7)
    run(tmp_path / "run", script, 4, saved_in_window=True)
    resumed = run(tmp_path / "run", script, 7)
    assert resumed.begun_at == 3 and resumed.weights == straight.weights
    assert resumed.steps[4] == straight.steps[4][1:]


@pytest.mark.parametrize("script", [Script(), Script(sharded=True)], ids=["ddp", "fsdp2"])
def test_two_ranks_resume_bit_for_bit(ranks, tmp_path, script):
    straight = ranks.run_all_well(RUNS, 2, str(tmp_path / "straight"), script, STEPS)
    parts = [ranks.run_all_well(RUNS, 2, str(tmp_path / "run"), script, until) for until in (5, STEPS)]
    for rank in range(2):
        assert_same([part[rank] for part in parts], straight[rank])


def samples_of(runs):
    """Samples by step, over all ranks."""
    told = {}
    for one in runs:
        for step, batches in one.steps.items():
            told[step] = sorted([*told.get(step, []), *(sample for ids, _ in batches for sample in ids)])
    return told


def test_a_rank_goes_and_comes_back_in_the_middle_of_an_epoch(ranks, tmp_path):
    script = Script(accumulate=1)
    straight = samples_of(ranks.run_all_well(RUNS, 2, str(tmp_path / "straight"), script, 6))
    told = {}
    for world, until in ((2, 2), (1, 4), (2, 6)):
        told |= samples_of(ranks.run_all_well(RUNS, world, str(tmp_path / "run"), script, until))
    assert told == straight
    assert sorted(sample for samples in told.values() for sample in samples) == list(range(46)), "each sample once"
