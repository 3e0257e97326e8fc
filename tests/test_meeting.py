import threading

import pytest

from ranks import channels, on_all
from unbroken.errors import DeadlineExceeded
from unbroken.meeting import Meetings


def meetings(world_size: int, deadline_s: float = 30) -> list[Meetings]:
    return [Meetings(channel, deadline_s) for channel in channels(world_size)]


def run_steps(meeting: Meetings, lockstep: threading.Barrier, ask_at: dict[int, tuple[int, str]], last: int = 10_000):
    """A training loop in lockstep with the others, as an all-reduce would keep it."""
    met = []
    meeting.start(0)
    try:
        for step in range(1, last):
            lockstep.wait(30)
            wish = ask_at.get(meeting.channel.rank)
            if wish and step >= wish[0]:
                meeting.ask(wish[1])
            purpose = meeting.now(step)
            if purpose:
                met.append((step, purpose))
                if purpose == "leave":
                    break
                ask_at.pop(meeting.channel.rank, None)
                if len(met) == 1 and not ask_at:
                    break
        return met
    finally:
        meeting.stop()


@pytest.mark.parametrize("asking", [0, 2])
def test_one_rank_asks_and_all_meet_at_one_step(asking):
    lockstep = threading.Barrier(3)
    results = on_all(meetings(3), lambda m: run_steps(m, lockstep, {asking: (5, "leave")}))
    assert results[0] == results[1] == results[2]
    ((step, purpose),) = results[0]
    assert step >= 5
    assert purpose == "leave"


def test_leaving_wins_when_ranks_ask_for_different_things():
    lockstep = threading.Barrier(2)
    results = on_all(meetings(2), lambda m: run_steps(m, lockstep, {0: (3, "save"), 1: (3, "leave")}))
    assert results[0] == results[1]
    assert results[0][-1][1] == "leave"


def test_nobody_asks_and_nobody_meets():
    lockstep = threading.Barrier(2)
    assert on_all(meetings(2), lambda m: run_steps(m, lockstep, {}, last=50)) == [[], []]


def test_a_single_process_meets_itself_at_once():
    (channel,) = channels(1)
    meeting = Meetings(channel, 1)
    meeting.start(0)
    assert meeting.now(1) is None
    meeting.ask("save")
    assert meeting.now(2) == "save"
    assert meeting.now(3) is None
    meeting.ask("save")
    meeting.ask("leave")
    assert meeting.now(4) == "leave"


def test_stopping_ends_a_meeting_that_nobody_comes_to():
    """close() at the end of a job waited for the deadline if a meeting had been asked for just before."""
    alone = meetings(2, deadline_s=600)[0]
    alone.start(0)
    alone.ask("save")
    while alone._answered is None:
        alone._look.set()
    alone.stop()
    assert not alone._thread.is_alive()


def test_a_rank_that_never_answers_is_an_error_within_the_deadline():
    alone = meetings(2, deadline_s=0.3)[0]
    alone.start(0)
    alone.ask("leave")
    try:
        with pytest.raises(DeadlineExceeded, match="could not agree on a step"):
            for step in range(1, 10_000_000):
                alone.now(step)
    finally:
        alone.stop()
