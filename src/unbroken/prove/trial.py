"""One disturbed run: the job is started, struck, and started again until it comes to its end.

Every wait has a deadline, and a job that hangs is a finding like any other. Whatever happens, `Job.end` leaves none of
its processes. Used by one thread.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from unbroken.prove.faults import INSIDE, OF_ONE_WORKER, Fault
from unbroken.prove.launch import POLL_S, Command, Job, Place, start
from unbroken.prove.ledger import Progress, last_step, read_ledger
from unbroken.prove.nodes import Node
from unbroken.prove.strike import arm, may_strike, strike
from unbroken.prove.verdict import Difference, Outcome

GRACE_S = 10.0
"""How long the survivors of a fault may take to fail by themselves, in seconds."""
MOST_STARTS = 20
"""A job that was started this often in one trial and still wants more never ends."""


@dataclass(frozen=True, slots=True)
class Reference:
    """The undisturbed run."""

    outcome: Outcome
    steps: int
    """0 if the script keeps no ledger."""
    seconds: float
    """From the start of the launchers to their end."""
    first_step_s: float
    """From the start to the first step; `seconds` without a ledger."""
    step_s: float
    """Of one step, on average; 0 without a ledger."""


@dataclass(slots=True)
class Strike:
    """A fault that struck."""

    fault: Fault
    step: int | None
    """The highest step of any rank since the job was last started; None if it had not done any."""
    how: str = ""
    """More than the fault's kind says: a point inside the job, what was damaged."""
    after: Progress | None = None
    """What the job does since; None if it was not to go on by itself."""
    restored: int | None = None
    """The step from which the job went on; None if nothing tells."""

    @property
    def steps_lost(self) -> int | None:
        """Steps that had to be done again; None if nothing tells, or if the job was to go on by itself."""
        if self.step is None or self.restored is None or not self.fault.ends_the_job:
            return None
        return max(0, self.step - self.restored)


@dataclass(slots=True)
class Trial:
    """One disturbed run, and what came of it."""

    number: int
    place: Place
    strikes: list[Strike] = field(default_factory=list)
    seconds: float = 0.0
    problem: str = ""
    """Why the job did not come to its end, if it did not."""
    output: str = ""
    """The last lines of a job that did not come to its end."""
    difference: Difference | None = None
    unseeded: frozenset[str] = frozenset()
    """Random generators that the script leaves unseeded: see verdict.unseeded."""
    nondeterministic: bool = False
    """True if two undisturbed runs differ from each other; found out only when this one differs."""

    @property
    def passed(self) -> bool:
        """True if the run came to its end and nothing differs."""
        return not self.problem and self.difference is None


@dataclass(frozen=True, slots=True)
class Ground:
    """What all starts of a proof's jobs share."""

    command: Command
    nodes: list[Node]
    marker: str
    deadline_s: float
    """Of each start of the job."""
    grace_s: float

    def survives(self, fault: Fault) -> bool:
        """Whether the job itself starts again what the fault takes."""
        return self.command.launcher == "none" and fault.kind in OF_ONE_WORKER

    def until(self, job: Job, arrived: Callable[[], bool]) -> Literal["arrived", "ended", "late"]:
        """Wait until `arrived()` is true, the job has ended, or its deadline has come, whichever is first."""
        deadline = job.started_at + self.deadline_s
        while not arrived():
            if job.ended():
                return "ended"
            if time.monotonic() > deadline:
                return "late"
            time.sleep(POLL_S)
        return "arrived"


@dataclass(frozen=True, slots=True)
class _Start:
    """One start of a trial's job, when it is over."""

    struck: Sequence[Strike]
    """The faults that struck, in order."""
    hung: bool
    """True if neither a fault nor the job itself ended it before the deadline."""
    done: bool
    """True if the job came to its end in spite of what struck it."""
    codes: Sequence[int]
    """Exit codes of the launchers that ended by themselves."""
    preempted: bool
    """True if the job left in order to be started again."""
    restored: int | None
    """The step it went on from; None if nothing tells."""


def run_trial(ground: Ground, trial: Trial, faults: Sequence[Fault], reference: Reference) -> None:
    """Start the job, strike it, start it again, until it ends by itself; what happened is noted in `trial`."""
    began = time.monotonic()
    remaining = list(faults)
    for number in range(1, MOST_STARTS + 1):
        this = _start(ground, trial, number, remaining, reference)
        for earlier in trial.strikes:
            earlier.restored = this.restored if earlier.restored is None else earlier.restored
        trial.strikes += this.struck
        del remaining[: len(this.struck)]
        trial.problem = _problem(ground, trial, this, number, reference)
        if trial.problem or not (this.struck or this.preempted) or (this.done and not remaining):
            break
    else:
        trial.problem = f"the job was started {MOST_STARTS} times and did not come to its end"
    trial.seconds = time.monotonic() - began
    if trial.problem:
        trial.output = trial.place.last_lines()


def _problem(ground: Ground, trial: Trial, this: _Start, number: int, reference: Reference) -> str:
    """What is wrong with the way a start ended; empty if it may be started again, or is done."""
    if this.hung:
        return f"the job hangs: start {number} did not end within {ground.deadline_s:g} s"
    if this.struck or this.preempted or not any(this.codes) or complete(trial.place, reference):
        return ""
    codes = ", ".join(map(str, this.codes))
    return f"the job fails when it is started again (start {number}, exit code {codes})"


def _start(ground: Ground, trial: Trial, number: int, faults: Sequence[Fault], reference: Reference) -> _Start:
    place = trial.place
    place.ledger.mkdir(parents=True, exist_ok=True)
    progress = first = Progress(place.ledger)
    told = place.root / f"struck-{number:03d}"
    draw = random.Random(f"damage/{trial.number}/{number}")
    armed = arm(faults[0] if faults else None, told)
    job = start(ground.command, ground.nodes, place, number, ground.marker, armed)
    struck: list[Strike] = []
    try:
        for number_here, fault in enumerate(faults):
            if number_here and fault.kind in INSIDE:
                break  # it is armed when the job is started
            moment = told.exists if fault.kind in INSIDE else _moment(fault, job, progress, place, reference)
            if ground.until(job, moment) != "arrived" and not _told_late(fault, moment):
                break
            # Between its moment and the strike the job may end, or the rank may not have been started yet.
            how = _strike(ground, job, fault, place, draw)
            if how is None:
                break
            struck.append(Strike(fault, progress.look(), how))
            if ground.survives(fault):
                struck[-1].after = progress = Progress(place.ledger)
            elif fault.ends_the_job:
                break
        last = struck[-1] if struck else None
        hung = _let_end(ground, job, last, more=len(struck) < len(faults))
        codes = job.codes()
    finally:
        job.end()
    for survived in (each for each in struck if each.after is not None):
        survived.restored = _went_on_from(survived.after)
    done = last is not None and last.after is not None and len(codes) == len(job.launchers) and not any(codes)
    restored = job.restored_step()
    return _Start(struck, hung, done, codes, job.preempted(), _went_on_from(first) if restored is None else restored)


def _went_on_from(progress: Progress | None) -> int | None:
    """The step before the first that was done; None if none was."""
    if progress is not None:
        progress.look()
    return None if progress is None or progress.first is None else progress.first - 1


def _told_late(fault: Fault, moment: Callable[[], bool]) -> bool:
    """A fault inside the job may end it before anybody looked."""
    return fault.kind in INSIDE and moment()


def _strike(ground: Ground, job: Job, fault: Fault, place: Place, draw: random.Random) -> str | None:
    """Strike as soon as it is possible; None if the job ended before."""
    how: list[str] = []

    def done() -> bool:
        found = strike(fault, ground.nodes, ground.marker, place, draw)
        how.extend([] if found is None else [found])
        return bool(how)

    return how[0] if ground.until(job, done) == "arrived" else None


def _let_end(ground: Ground, job: Job, last: Strike | None, more: bool) -> bool:
    """Wait for the job's end; True if it hangs. Whoever was not killed gets a moment to fail by itself.

    last  what struck it last
    more  whether another start is to be struck
    """
    after = last.after if last is not None else None
    if after is not None:
        # It goes on by itself: to its end, or, if there is more to strike in another start, until that is seen.
        return ground.until(job, lambda: more and after.look() is not None) == "late"
    if last is not None and last.fault.ends_the_job and last.fault.kind != "sigterm":
        job.wait(time.monotonic() + ground.grace_s)
        return False
    return ground.until(job, lambda: False) == "late"


def _moment(fault: Fault, job: Job, progress: Progress, place: Place, reference: Reference) -> Callable[[], bool]:
    """Whether the moment of the fault has come."""
    reached_at: float | None = job.started_at if fault.after_step == 0 else None
    delay_s = fault.delay * (reference.first_step_s if fault.after_step == 0 else reference.step_s)

    def arrived() -> bool:
        nonlocal reached_at
        if reached_at is None and (progress.look() or 0) >= fault.after_step:
            reached_at = time.monotonic()
        if reached_at is None or time.monotonic() < reached_at + delay_s:
            return False
        return may_strike(fault, place.run)

    return arrived


def complete(place: Place, reference: Reference) -> bool:
    """Whether a job whose exit code says otherwise did all its work.

    Some backends abort in their own clean-up after everything was written (DeepSpeed's ZeRO-3 does at times).
    """
    return place.final() is not None and last_step(read_ledger(place.ledger)) >= reference.steps
