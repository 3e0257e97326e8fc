"""The proof: one undisturbed run, then trials in which the job is struck, started again until it ends, and compared.

A trial that goes wrong ends the proof; what its job wrote and printed stays in its directory. Every wait has a
deadline, and a job that hangs is a finding like any other. No process and no namespace survives `prove`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from unbroken.errors import UsageError
from unbroken.prove.faults import Fault, plan_trial, strike
from unbroken.prove.launch import POLL_S, Command, Job, Place, start
from unbroken.prove.ledger import Progress, last_step, read_ledger
from unbroken.prove.nodes import Node, open_nodes
from unbroken.prove.processes import require_proc
from unbroken.prove.verdict import Difference, Outcome, compare, compared, unseeded

GRACE_S = 10.0
"""How long the survivors of a fault may take to fail by themselves, in seconds."""
MOST_STARTS = 20
"""A job that was started this often in one trial and still wants more never ends."""
MOST_TRIES = 5
"""How often a trial is planned earlier and earlier because its job had ended before the fault."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What to prove, and how hard."""

    command: Command
    nodes: int
    kinds: Sequence[str]
    """Of faults, see faults.KINDS."""
    trials: Sequence[int]
    """Numbers of the trials to run, from 1; a trial's plan follows from its number and the seed."""
    seed: int
    directory: Path
    """For all that is written; must be empty or not exist."""
    deadline_s: float
    """Of each start of the job."""
    grace_s: float = GRACE_S
    loopback: bool = False
    """True: no network namespaces, whatever the system allows."""

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.nodes * self.command.workers_per_node


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
    restored: int | None = None
    """The step from which the job went on; None if nothing tells."""

    @property
    def steps_lost(self) -> int | None:
        """Steps that had to be done again."""
        return None if self.step is None or self.restored is None else max(0, self.step - self.restored)


@dataclass(slots=True)
class Trial:
    """One disturbed run."""

    number: int
    place: Place
    strikes: list[Strike] = field(default_factory=list)
    seconds: float = 0.0
    problem: str = ""
    """Why the job did not come to its end, if it did not."""
    output: str = ""
    """The last lines of a job that did not come to its end."""
    difference: Difference | None = None
    unseeded: bool = False
    """True if the script leaves a random generator unseeded: see verdict.unseeded."""

    @property
    def passed(self) -> bool:
        """True if the run came to its end and nothing differs."""
        return not self.problem and self.difference is None


@dataclass(frozen=True, slots=True)
class Report:
    """What the proof found."""

    settings: Settings
    reference: Reference
    nodes: str
    """What stood for nodes: "network namespaces" or "processes on loopback"."""
    trials: list[Trial]
    """In order, up to the first that did not pass."""

    @property
    def passed(self) -> bool:
        """True if every trial passed."""
        return all(trial.passed for trial in self.trials)

    @property
    def compared(self) -> tuple[str, ...]:
        """The parts of the state that were compared."""
        return compared(self.reference.outcome)


@dataclass(frozen=True, slots=True)
class _Start:
    """One start of a trial's job, when it is over."""

    struck: bool
    """True if the fault struck."""
    struck_at: int | None
    """The highest step of any rank then."""
    hung: bool
    """True if neither a fault nor the job itself ended it before the deadline."""
    codes: Sequence[int]
    """Exit codes of the launchers that ended by themselves."""
    preempted: bool
    """True if the job left in order to be started again."""
    restored: int | None
    """The step it went on from; None if nothing tells."""


def prove(settings: Settings, tell: Callable[[str], None] = lambda _: None) -> Report:
    """Run the whole proof. `tell` hears one line at each stage.

    Raises UsageError if the script fails or hangs undisturbed, or leaves nothing that could be compared.
    """
    require_proc()
    if settings.directory.exists() and (not settings.directory.is_dir() or any(settings.directory.iterdir())):
        raise UsageError(f"{settings.directory} is not empty; give a new directory, every proof needs its own")
    marker = secrets.token_hex(8)
    with open_nodes(settings.nodes, marker, loopback=settings.loopback) as nodes:
        return _Proof(settings, nodes, marker, tell).run()


@dataclass(frozen=True, slots=True)
class _Proof:
    settings: Settings
    nodes: list[Node]
    marker: str
    tell: Callable[[str], None]

    def run(self) -> Report:
        kind = self.nodes[0].kind
        self.tell(f"undisturbed run, {self.settings.world_size} ranks, nodes {self.settings.nodes} ({kind})")
        reference = self._reference()
        self.tell(f"undisturbed run took {reference.seconds:.1f} s")
        report = Report(self.settings, reference, kind, [])
        for number in self.settings.trials:
            trial = self._trial(number, reference)
            report.trials.append(trial)
            if not trial.passed:
                break
        return report

    def _reference(self) -> Reference:
        place = Place(self.settings.directory / "reference")
        place.ledger.mkdir(parents=True)
        progress = Progress(place.ledger)
        job = start(self.settings.command, self.nodes, place, 1, self.marker)
        steps: list[float] = []
        """When each was first seen, in seconds since the start."""
        try:
            ended = self._until(job, lambda: _note(progress, job, steps))
            seconds = time.monotonic() - job.started_at
        finally:
            job.end()
        if ended == "late":
            raise UsageError(
                f"the script did not end within {self.settings.deadline_s:g} s undisturbed; "
                f"give --deadline more, if it needs more. Its last lines:\n{place.last_lines()}"
            )
        outcome = Outcome(read_ledger(place.ledger), place.final())
        if any(job.codes()) and outcome.final is None:
            codes = ", ".join(map(str, job.codes()))
            raise UsageError(f"the script fails undisturbed (exit code {codes}). Its last lines:\n{place.last_lines()}")
        if not compared(outcome):
            raise UsageError(
                "the script leaves nothing to compare: it neither trains with a Checkpointer, which keeps a ledger "
                "where UNBROKEN_LEDGER says, nor prints a line `final <sha256 of the weights>`"
            )
        return _timed(outcome, seconds, steps)

    def _trial(self, number: int, reference: Reference) -> Trial:
        settings = self.settings
        faults = plan_trial(settings.seed, number, settings.kinds, settings.nodes, settings.world_size, reference.steps)
        self.tell(f"trial {number}: {', '.join(map(str, faults))}")
        for attempt in range(MOST_TRIES):
            again = f"-again-{attempt}" if attempt else ""
            trial = Trial(number, Place(settings.directory / f"trial-{number:03d}{again}"))
            self._run_trial(trial, list(faults), reference)
            if trial.strikes or trial.problem:
                break
            faults = [fault.earlier() for fault in faults]
        else:
            trial.problem = f"the job always ended before {faults[0]} could strike; give it more steps"
        if not trial.problem:
            outcome = Outcome(read_ledger(trial.place.ledger), trial.place.final())
            trial.difference = compare(reference.outcome, outcome, trial.strikes[0].step)
            trial.unseeded = bool(unseeded(reference.outcome, outcome))
        return trial

    def _run_trial(self, trial: Trial, faults: list[Fault], reference: Reference) -> None:
        """Start the job, strike it, start it again, until it ends by itself."""
        began = time.monotonic()
        for number in range(1, MOST_STARTS + 1):
            this = self._start(trial.place, number, faults[0] if faults else None, reference)
            for earlier in trial.strikes:
                earlier.restored = this.restored if earlier.restored is None else earlier.restored
            if this.struck:
                trial.strikes.append(Strike(faults.pop(0), this.struck_at))
                continue
            if this.hung:
                trial.problem = f"the job hangs: start {number} did not end within {self.settings.deadline_s:g} s"
            elif this.preempted:
                continue
            elif any(this.codes) and not _complete(trial.place, reference):
                codes = ", ".join(map(str, this.codes))
                trial.problem = f"the job fails when it is started again (start {number}, exit code {codes})"
            break
        else:
            trial.problem = f"the job was started {MOST_STARTS} times and did not come to its end"
        trial.seconds = time.monotonic() - began
        if trial.problem:
            trial.output = trial.place.last_lines()

    def _start(self, place: Place, number: int, fault: Fault | None, reference: Reference) -> _Start:
        place.ledger.mkdir(parents=True, exist_ok=True)
        progress = Progress(place.ledger)
        job = start(self.settings.command, self.nodes, place, number, self.marker)
        struck, struck_at, hung = False, None, False
        try:
            if fault is not None and self._until(job, _moment(fault, job, progress, reference)) == "arrived":
                # Between its moment and the strike the job may end, or the rank may not have been started yet.
                struck = self._until(job, lambda: strike(fault, self.nodes, self.marker)) == "arrived"
            if struck:
                struck_at = progress.look()
                job.wait(time.monotonic() + self.settings.grace_s)
            else:
                hung = self._until(job, lambda: False) == "late"
            codes = job.codes()
        finally:
            job.end()
        progress.look()
        restored = job.restored_step()
        if restored is None and progress.first is not None:
            restored = progress.first - 1
        return _Start(struck, struck_at, hung, codes, job.preempted(), restored)

    def _until(self, job: Job, arrived: Callable[[], bool]) -> Literal["arrived", "ended", "late"]:
        """Wait until `arrived()` is true, the job has ended, or its deadline has come, whichever is first."""
        deadline = job.started_at + self.settings.deadline_s
        while not arrived():
            if job.ended():
                return "ended"
            if time.monotonic() > deadline:
                return "late"
            time.sleep(POLL_S)
        return "arrived"


def _moment(fault: Fault, job: Job, progress: Progress, reference: Reference) -> Callable[[], bool]:
    """Whether the moment of the fault has come."""
    reached_at: float | None = job.started_at if fault.after_step == 0 else None
    delay_s = fault.delay * (reference.first_step_s if fault.after_step == 0 else reference.step_s)

    def arrived() -> bool:
        nonlocal reached_at
        if reached_at is None and (progress.look() or 0) >= fault.after_step:
            reached_at = time.monotonic()
        return reached_at is not None and time.monotonic() >= reached_at + delay_s

    return arrived


def _note(progress: Progress, job: Job, steps: list[float]) -> bool:
    """Write down when each step was first seen; never "arrived"."""
    seen = progress.look() or 0
    steps.extend([time.monotonic() - job.started_at] * (seen - len(steps)))
    return False


def _timed(outcome: Outcome, seconds: float, steps: list[float]) -> Reference:
    count = last_step(outcome.ledger)
    if not count or not steps:
        return Reference(outcome, 0, seconds, seconds, 0.0)
    return Reference(outcome, count, seconds, steps[0], (steps[-1] - steps[0]) / max(1, count - 1))


def _complete(place: Place, reference: Reference) -> bool:
    """Whether a job whose exit code says otherwise did all its work.

    Some backends abort in their own clean-up after everything was written (DeepSpeed's ZeRO-3 does at times).
    """
    return place.final() is not None and last_step(read_ledger(place.ledger)) >= reference.steps
