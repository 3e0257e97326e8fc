"""Every crash of every story: the newest committed checkpoint is there, whole, and the job goes on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from crash import stories
from crash.explore import EMPTY, Verdicts, every_cut, explore
from crash.filesystem import Cuts
from crash.judge import Judge, write
from crash.lives import RUN, start
from crash.orders import Moment, in_any_order, in_order
from crash.recorder import Call, Promise, Recorder

NAMES = ("mkdir", "create", "link", "rename", "unlink", "rmdir")
"""Calls that change a directory."""
STORIES = {
    "first save": (stories.first_save, 1),
    "restart and second save": (stories.second_save, 1),
    "keeping one": (stories.keeping(1), 1),
    "keeping two": (stories.keeping(2), 2),
    "a step of an abandoned generation": (stories.abandoned, 1),
    "the restored step again": (stories.saved_again, 1),
}
"""By name: the story, and how many checkpoints it keeps once there is one."""


def assert_survives(verdicts: Verdicts) -> None:
    print(f"{verdicts.moments} moments, {verdicts.states} crash states")
    assert verdicts.states > 1
    assert not verdicts.problems, f"{len(verdicts.problems)} of {verdicts.states}: {sorted(set(verdicts.problems))}"


def judge_story(base: Path, name: str, world_size: int, every: Cuts | None = None, any_order: bool = True) -> Verdicts:
    story, kept = STORIES[name]
    recording = stories.play(story, base / "story", world_size)
    orders = in_any_order if any_order else in_order
    moments = orders(recording.trace, recording.since, EMPTY)
    return explore(moments, Judge(base / "judge", world_size), kept, every)


IN_ANY_ORDER = [("first save", 1), ("first save", 2), ("restart and second save", 1), ("restart and second save", 2)]
IN_ANY_ORDER += [("keeping one", 1), ("the restored step again", 1)]
IN_ORDER = [("keeping two", 1), ("a step of an abandoned generation", 1)]


@pytest.mark.parametrize(("name", "world_size"), IN_ANY_ORDER)
def test_after_a_crash_in_any_order_of_calls_the_newest_committed_checkpoint_is_restored(base, name, world_size):
    assert_survives(judge_story(base, name, world_size))


@pytest.mark.parametrize(("name", "world_size"), IN_ORDER)
def test_after_a_crash_at_any_moment_the_newest_committed_checkpoint_is_restored(base, name, world_size):
    assert_survives(judge_story(base, name, world_size, any_order=False))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", STORIES)
def test_of_every_story_in_every_order_the_newest_committed_checkpoint_is_restored(base, name, world_size):
    assert_survives(judge_story(base, name, world_size))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", ["first save", "restart and second save"])
def test_after_a_crash_at_any_byte_the_newest_committed_checkpoint_is_restored(base, name, world_size):
    assert_survives(judge_story(base, name, world_size, every_cut))


def full_disks(base: Path, world_size: int, again: bool) -> int:
    """Fail each call of a save once; returns how many calls there were."""
    judge = Judge(base / "judge", world_size)
    for nth in range(1, 100):
        reached: list[int] = []
        recording = stories.play(stories.disk_full(nth, reached, again), base / "story", world_size)
        if not reached:
            return nth - 1
        assert_survives(explore(in_order(recording.trace, recording.since, EMPTY), judge))
        shutil.rmtree(recording.base)
    raise AssertionError("a save makes fewer calls than that")


def test_a_full_disk_at_any_call_and_then_a_crash_cost_nothing_that_was_committed(base):
    assert full_disks(base, world_size=1, again=False) > 8


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_full_disk_and_the_same_step_saved_again_and_then_a_crash_cost_nothing_either(base, world_size):
    assert full_disks(base, world_size, again=True) > 8


def killed_and_then_cut_off(base: Path, world_size: int, kinds: tuple[str, ...]) -> Verdicts:
    """Kill a job at each of its calls, let it start again, and cut the power once that one has committed.

    What the killed process had not synced is still not synced: the second one must not rely on it.
    """
    recording = stories.play(stories.first_save, base / "story", world_size)
    judge, total = Judge(base / "judge", world_size), Verdicts()
    for number, event in enumerate(recording.trace, 1):
        if not (isinstance(event.what, Call) and event.what.kind in kinds):
            continue
        killed = list(in_order(recording.trace[:number], number, EMPTY))[-1]
        write(killed.system.now(), base / "again")
        with Recorder(base / "again") as recorder:
            job = start(base / "again" / RUN, world_size, recorder=recorder)
            restored = job.restored.manifest
            job.save(restored.step + 1 if restored else 1)  # the step that was being saved
            job.close()
        since = next(place for place, again in enumerate(recorder.trace, 1) if isinstance(again.what, Promise))
        verdicts = explore(in_order(recorder.trace, since, killed, first=number + 1), judge)
        total.moments += verdicts.moments
        total.states += verdicts.states
        total.problems += verdicts.problems
    return total


def test_a_power_cut_after_a_kill_costs_nothing_that_was_committed_since(base):
    """A directory that a killed process had made was taken as durable by the next one."""
    assert_survives(killed_and_then_cut_off(base, 1, NAMES))


@pytest.mark.slow
def test_a_power_cut_after_a_kill_at_any_call_of_two_ranks_costs_nothing_that_was_committed_since(base):
    assert_survives(killed_and_then_cut_off(base, 2, (*NAMES, "write", "sync")))


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_without_hard_links_a_crash_costs_nothing_that_was_committed(base, world_size):
    """A manifest may then be cut. It is passed over, and the save before it is restored."""
    recording = stories.play(stories.without_hard_links, base / "story", world_size)
    moments = in_order(recording.trace, recording.since, EMPTY)
    assert_survives(explore(moments, Judge(base / "judge", world_size, atomic=False)))


def test_a_moment_before_anything_was_done_is_a_fresh_start(base):
    assert not Judge(base / "judge", 1).verdict({}, None)
    assert Moment(EMPTY.system, 1).system.now() == {}
    assert "step 1 was committed, but nothing is the newest" in Judge(base / "judge", 1).verdict({}, 1)
