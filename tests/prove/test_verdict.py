"""The verdict, as a pure function: it must find the first difference, name its part, and blame nobody falsely."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.prove.ledger import Event, Line
from unbroken.prove.verdict import Outcome, compare, compared, unseeded

STEPS, WORLD = 12, 2


def line(step, rank):
    state = {part: f"{part}{step}{rank}" for part in ("model", "optimizer", "rng")} if step % 5 == 0 else None
    return Line(step, rank, WORLD, float(step).hex(), [step, rank], f"rng{step}{rank}", state)


def run(*, final="f00d"):
    """An undisturbed run."""
    return Outcome({(s, r): [line(s, r)] for s in range(1, STEPS + 1) for r in range(WORLD)}, final)


def replayed(first, last):
    """A run that was struck after `last` and went on from the step before `first`."""
    outcome = run()
    for step in range(first, last + 1):
        for rank in range(WORLD):
            outcome.ledger[step, rank].append(line(step, rank))
    return outcome


def altered(outcome, step, rank, which=-1, **changes):
    lines = outcome.ledger[step, rank]
    lines[which] = msgspec.structs.replace(lines[which], **changes)
    return outcome


def test_a_run_that_did_steps_twice_and_alike_is_equal():
    assert compare(run(), replayed(4, 9), struck_at=9) is None


PARTS = {"loss": "0x1.8p+1", "samples": [99], "rng": "other", "world": 3}


@given(st.integers(2, STEPS), st.integers(0, WORLD - 1), st.sampled_from(sorted(PARTS)))
def test_any_altered_part_of_any_line_is_found(step, rank, part):
    difference = compare(run(), altered(run(), step, rank, **{part: PARTS[part]}))
    assert (difference.step, difference.parts, difference.ranks) == (step, (part,), (rank,))


@given(st.integers(4, 9), st.sampled_from([0, 1]))
def test_both_lines_of_a_step_that_was_done_twice_count(step, which):
    difference = compare(run(), altered(replayed(4, 9), step, 1, which, loss="0x0p+0"))
    assert (difference.step, difference.parts) == (step, ("loss",))


@pytest.mark.parametrize(("ours", "theirs"), [("0x0.0p+0", "-0x0.0p+0"), ("nan", "0x0.0p+0"), (None, "0x0.0p+0")])
def test_losses_are_compared_bit_for_bit(ours, theirs):
    reference = altered(run(), 3, 0, loss=ours)
    assert compare(reference, altered(run(), 3, 0, loss=theirs)).step == 3
    assert compare(reference, altered(run(), 3, 0, loss=ours)) is None


def test_the_first_of_several_differences_is_told():
    trial = altered(altered(run(), 9, 0, samples=[]), 7, 1, loss="0x0p+0")
    assert compare(run(), trial).step == 7


def test_causes_come_before_effects():
    trial = altered(run(), 5, 0, loss="0x0p+0", samples=[], rng="x", state={"model": "x", "optimizer": "y"})
    assert compare(run(), trial).parts == ("samples", "rng", "loss", "model", "optimizer")


def test_a_difference_between_two_digests_of_the_state_is_named_at_the_next_one():
    trial = altered(altered(run(), 7, 0, loss="0x0p+0"), 10, 0, state={**line(10, 0).state, "optimizer": "x"})
    difference = compare(run(), trial)
    assert (difference.step, difference.parts) == (7, ("loss",))
    assert (difference.later_step, difference.later) == (10, ("optimizer",))
    assert str(difference) == (
        "step 7 differs in loss on rank 0; at step 10, where the whole state is known, optimizer differ"
    )


def test_a_step_that_a_rank_never_did_is_missing():
    trial = run()
    del trial.ledger[6, 1]
    difference = compare(run(), trial)
    assert str(difference) == "step 6 was never done by rank 1"


def test_a_step_beyond_the_end_is_extra():
    trial = run()
    trial.ledger[STEPS + 1, 0] = [line(STEPS + 1, 0)]
    assert str(compare(run(), trial)) == f"step {STEPS + 1} of rank 0 does not exist in the undisturbed run"


@pytest.mark.parametrize("final", ["beef", None])
def test_final_weights_that_differ_or_are_not_told_are_found(final):
    difference = compare(run(), replace(run(), final=final))
    assert difference.parts == ("final",)


def test_without_ledgers_final_weights_alone_decide():
    assert compare(Outcome({}, "f00d"), Outcome({}, "f00d")) is None
    assert compare(Outcome({}, "f00d"), Outcome({}, "beef")).parts == ("final",)


def with_own_rng(outcome, rank):
    """As if the script left a generator of `rank` unseeded that nobody draws from."""
    for (_, of), lines in outcome.ledger.items():
        if of == rank:
            lines[:] = [
                msgspec.structs.replace(
                    each, rng=f"own{each.rng}", state=each.state and {**each.state, "rng": f"own{each.rng}"}
                )
                for each in lines
            ]
    return outcome


def test_an_unseeded_generator_that_changes_nothing_is_no_difference():
    trial = with_own_rng(replayed(4, 9), 1)
    assert unseeded(run(), trial) == {1: {"all"}}
    assert compare(run(), trial, struck_at=9) is None


def test_an_unseeded_generator_that_was_not_restored_is_found_where_a_step_was_done_twice():
    trial = altered(with_own_rng(replayed(4, 9), 1), 4, 1, rng="drawn anew")
    difference = compare(run(), trial, struck_at=9)
    assert (difference.step, difference.parts, difference.before_fault) == (4, ("rng",), False)


def test_a_seeded_generator_that_was_not_restored_is_found():
    assert unseeded(run(), altered(replayed(4, 9), 4, 1, rng="drawn anew")) == {}
    assert compare(run(), altered(replayed(4, 9), 4, 1, rng="drawn anew")).parts == ("rng",)


def test_a_script_that_differs_before_the_first_fault_is_told_apart():
    trial = altered(replayed(4, 9), 3, 0, loss="0x0p+0")
    assert compare(run(), trial, struck_at=9).before_fault
    assert "no fault had struck yet" in str(compare(run(), trial, struck_at=9))
    assert not compare(run(), altered(replayed(4, 9), 4, 0, loss="0x0p+0"), struck_at=9).before_fault


def test_what_was_compared_is_what_the_undisturbed_run_tells():
    assert compared(run()) == ("samples", "rng", "loss", "model", "optimizer", "final")
    assert compared(Outcome({(1, 0): [Line(1, 0, 1, loss="0x1p+0")]}, None)) == ("loss",)
    assert compared(Outcome({}, None)) == ()


def with_events(outcome, *events):
    return replace(outcome, events=[Event(kind, step, micro, rank, state) for kind, step, micro, rank, state in events])


STATE = {"model": "m", "optimizer": "o", "sched": "s"}


def test_what_a_restore_did_not_bring_back_is_named():
    trial = altered(replayed(4, 9), 4, 1, loss="0x0p+0")
    trial = with_events(trial, ("saved", 3, 0, 1, STATE), ("restored", 3, 0, 1, {**STATE, "sched": "anew"}))
    difference = compare(run(), trial, struck_at=9)
    assert (difference.not_restored, difference.restored_step) == (("sched",), 3)
    assert str(difference).endswith("right after the restore of step 3, sched was not as it had been saved")


def test_a_restore_that_changed_nothing_in_the_end_is_no_difference():
    """What the state was at a save may differ from what it was at the step: an evaluation may lie between them."""
    trial = with_events(replayed(4, 9), ("saved", 3, 0, 1, STATE), ("restored", 3, 0, 1, {**STATE, "sched": "anew"}))
    assert compare(run(), trial, struck_at=9) is None


def test_a_restore_after_the_difference_is_not_blamed():
    trial = altered(replayed(4, 9), 4, 1, loss="0x0p+0")
    trial = with_events(trial, ("saved", 8, 0, 1, STATE), ("restored", 8, 0, 1, {**STATE, "sched": "anew"}))
    assert compare(run(), trial, struck_at=9).not_restored == ()


def test_a_restore_is_held_against_the_save_of_its_own_rank_and_micro_step():
    trial = altered(replayed(4, 9), 4, 1, loss="0x0p+0")
    saved = [("saved", 3, 0, 0, {**STATE, "model": "zero"}), ("saved", 3, 1, 1, {**STATE, "model": "inside"})]
    trial = with_events(trial, *saved, ("saved", 3, 0, 1, STATE), ("restored", 3, 0, 1, STATE))
    assert compare(run(), trial, struck_at=9).not_restored == ()


def test_final_weights_that_differ_after_a_forgotten_object_are_explained():
    trial = with_events(replace(run(), final="beef"), ("saved", 12, 0, 0, STATE), ("restored", 12, 0, 0, {}))
    assert "model; optimizer; sched were not as" in str(compare(run(), trial, struck_at=12))


@pytest.mark.parametrize(
    ("samples", "lost"),
    [
        ([3, 4], True),  # the second half of the window, and nothing more
        ([3, 4, 5, 6], True),  # the second half, and then the next window's samples
        ([1, 2], False),
        ([5, 6, 7, 8], False),  # samples were left out, not a window's first half
        ([2, 1, 4, 3], False),
        (None, False),
    ],
)
def test_a_window_that_was_begun_in_its_middle_is_told_from_lost_samples(samples, lost):
    reference = altered(run(), 4, 1, samples=[1, 2, 3, 4])
    difference = compare(
        reference, altered(altered(replayed(4, 9), 4, 1, 0, samples=[1, 2, 3, 4]), 4, 1, samples=samples)
    )
    assert difference.parts == (("accumulation", "samples") if lost else ("samples",))


def with_generators(outcome, python):
    """As ledgers tell each generator; `python` is unseeded and differs from start to start."""
    for (step, rank), lines in outcome.ledger.items():
        told = {"python": f"{python}{step}", "torch": f"t{step}{rank}"}
        lines[:] = [msgspec.structs.replace(each, rng=f"{python}{step}", generators=told) for each in lines]
    return outcome


def test_a_generator_that_is_seeded_is_compared_though_another_is_not():
    """A script that seeds torch alone, and again after the restore, was only said to differ in its loss."""
    reference = with_generators(run(), "a")
    trial = with_generators(replayed(4, 9), "b")
    assert unseeded(reference, trial) == {0: {"python"}, 1: {"python"}}
    assert compare(reference, trial, struck_at=9) is None
    seeded_again = {"python": "b10", "torch": "anew"}
    difference = compare(reference, altered(trial, 10, 1, generators=seeded_again, loss="0x0p+0"), struck_at=9)
    assert (difference.step, difference.parts, difference.ranks) == (10, ("rng", "loss"), (1,))
