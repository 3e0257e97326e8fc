"""The proof can fail: scripts that forget a part of their state are caught, and the part is named.

Each is run here up to a step, lost, and started again, with its ledger; `tests/soak/test_forgetful_proof.py` does the
same with `unbroken prove`, real processes and real kills.
"""

import contextlib
from pathlib import Path

import pytest

from prove.forgetful import Lost, train
from unbroken.prove.ledger import read_events, read_ledger
from unbroken.prove.verdict import Outcome, compare

STEPS, EVERY, LOST = 24, 4, 14


def outcome(directory, forget, *lost, ranks=None):
    """What a run leaves that was lost after each of the steps `lost` and started again."""
    final = ""
    for lost_after in (*lost, None):
        if ranks is None:
            final = start(0, 1, str(directory), forget, lost_after)
        else:
            final, _ = ranks.run_all_well("prove.test_forgetful:start", 2, str(directory), forget, lost_after)
    return Outcome(read_ledger(directory / "ledger"), final, read_events(directory / "ledger"))


def start(rank, world_size, directory, forget, lost_after):
    """One start of the job."""
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Lost):
        patch.setenv("UNBROKEN_LEDGER", f"{directory}/ledger")
        return train(Path(directory) / "run", STEPS, EVERY, forget, rank, world_size, lost_after)


def difference(tmp_path, forget, ranks=None):
    reference = outcome(tmp_path / "undisturbed", forget, ranks=ranks)
    return compare(reference, outcome(tmp_path / "disturbed", forget, LOST, ranks=ranks), LOST)


def test_a_script_that_forgets_nothing_is_equal(tmp_path):
    assert difference(tmp_path, "nothing") is None


@pytest.mark.parametrize(
    ("forget", "named"),
    [
        ("scheduler", "unregistered scheduler `scheduler` (CosineAnnealingLR)"),
        ("scaler", "unregistered scaler `scaler` (GradScaler)"),
        ("ema", "unregistered module `ema` (AveragedModel)"),
        ("generator", "unregistered generator `noise` (Generator)"),
    ],
)
def test_an_object_that_was_not_registered_is_named(tmp_path, forget, named):
    found = difference(tmp_path, forget)
    assert found.step == 13
    assert found.not_restored == (named,)
    assert found.restored_step == 12
    assert not found.before_fault


@pytest.mark.parametrize("forget", ["loader", "plain loader"])
def test_a_forgotten_loader_is_named_by_its_samples(tmp_path, forget):
    found = difference(tmp_path, forget)
    assert found.step == 13
    assert found.parts[0] == "samples"


def test_one_ranks_random_numbers_are_named_with_the_rank(tmp_path, ranks):
    found = difference(tmp_path, "rank rng", ranks)
    assert found.step == 13
    assert found.parts[0] == "rng"
    assert 1 in found.ranks
    assert found.not_restored == ()


def test_a_save_inside_a_window_that_forgets_its_gradients_is_named(tmp_path):
    found = difference(tmp_path, "window")
    assert found.step == 13
    assert found.parts[0] == "accumulation"


def test_a_generator_without_a_seed_is_not_blamed_on_resuming(tmp_path):
    found = difference(tmp_path, "seed")
    assert found.before_fault
    assert found.not_restored == ()
