"""The orders in which independent calls of a trace could have happened, and the file systems they lead to.

Two calls are independent if no chain of threads' own order, messages and quiet moments leads from one to the other
(L. Lamport, "Time, Clocks, and the Ordering of Events in a Distributed System", CACM 21(7), 1978). Ranks write at the
same time, and rank 0 sweeps while the next save is being written: what happened in one order may happen in another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from crash.filesystem import FileSystem
from crash.recorder import TRAINING, Call, Event, Message, Promise, Quiet


@dataclass(frozen=True, slots=True)
class Step:
    """A call or promise of a trace, and what comes before it."""

    number: int
    """Its place in the trace, from 1 on."""
    actor: str
    what: Call | Promise
    after: dict[str, int]
    """By actor, how many of its steps come before this one."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A file system that a run may be stopped in, and the newest step it had promised by then."""

    system: FileSystem
    promised: int | None


def steps_of(trace: Sequence[Event]) -> list[Step]:
    """The calls and promises of a trace, with their order."""
    made: Counter[str] = Counter()
    clocks: dict[str, dict[str, int]] = {}
    posted: dict[str, dict[str, int]] = {}
    all_before: dict[str, int] = {}
    steps = []
    for number, event in enumerate(trace, 1):
        # A thread begins after what the training thread, which started it, did so far.
        begins_at = clocks.get(TRAINING, all_before)
        clock = clocks.setdefault(event.actor, dict(begins_at))
        _join(clock, all_before)
        if isinstance(event.what, Quiet):
            all_before = dict(made)
            _join(clock, all_before)
        elif isinstance(event.what, Message) and event.what.sent:
            _join(posted.setdefault(event.what.key, {}), clock)
        elif isinstance(event.what, Message):
            _join(clock, posted.get(event.what.key, {}))
        elif isinstance(event.what, (Call, Promise)):
            steps.append(Step(number, event.actor, event.what, dict(clock)))
            made[event.actor] += 1
            clock[event.actor] = made[event.actor]
    return steps


def in_order(trace: Sequence[Event], since: int, start: Moment, first: int = 1) -> Iterator[Moment]:
    """The moments of a trace as it happened, from `since` events on; `start` is the moment before its first event.

    first  number of the first event; above all numbers that `start` has seen
    """
    system, promised = start.system.copy(), start.promised
    if since == 0:
        yield Moment(system.copy(), promised)
    for number, event in enumerate(trace, first):
        if isinstance(event.what, Call):
            system.apply(event.what, number)
        elif isinstance(event.what, Promise):
            promised = max(promised or 0, event.what.step)
        if number - first + 1 >= since and isinstance(event.what, (Call, Promise, Quiet)):
            yield Moment(system.copy(), promised)


def in_any_order(trace: Sequence[Event], since: int, start: Moment) -> Iterator[Moment]:
    """The moments of every order of the independent calls after `since` events, at which all was quiet.

    Orders in which a call would fail (a file before its directory) did not happen and are left out.
    """
    assert since == 0 or isinstance(trace[since - 1].what, Quiet)
    steps = steps_of(trace)
    begin = list(in_order(trace[:since], since, start))[-1]
    by_actor: dict[str, list[Step]] = {}
    for step in steps:
        by_actor.setdefault(step.actor, []).append(step)
    done = {actor: sum(step.number <= since for step in own) for actor, own in by_actor.items()}
    seen = set()
    waiting = [(done, begin)]
    while waiting:
        done, moment = waiting.pop()
        key = (tuple(done.items()), moment.promised, moment.system.fingerprint())
        if key in seen:
            continue
        seen.add(key)
        yield moment
        for actor, own in by_actor.items():
            step = own[done[actor]] if done[actor] < len(own) else None
            if step is not None and all(done[other] >= count for other, count in step.after.items()):
                following = _after(moment, step)
                if following is not None:
                    waiting.append(({**done, actor: done[actor] + 1}, following))


def _after(moment: Moment, step: Step) -> Moment | None:
    if isinstance(step.what, Promise):
        return Moment(moment.system, max(moment.promised or 0, step.what.step))
    system = moment.system.copy()
    try:
        system.apply(step.what, step.number)
    except LookupError:
        return None
    return Moment(system, moment.promised)


def _join(clock: dict[str, int], other: dict[str, int]) -> None:
    for actor, count in other.items():
        clock[actor] = max(clock.get(actor, 0), count)
