"""The proof: one undisturbed run, then trials in which the job is struck, started again until it ends, and compared.

A trial that goes wrong ends the proof; what its job wrote and printed stays in its directory. Before resuming is
blamed for a difference, a second undisturbed run shows whether the script repeats itself at all. No process and no
namespace survives `prove`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from unbroken.errors import UsageError
from unbroken.prove.faults import DEFAULT, INSIDE, Fault, plan_trial
from unbroken.prove.faults import Job as PlannedJob
from unbroken.prove.launch import Command, Job, Place, start
from unbroken.prove.ledger import Progress, last_step, read_events, read_ledger
from unbroken.prove.nodes import open_nodes
from unbroken.prove.processes import require_proc
from unbroken.prove.trial import GRACE_S, Ground, Reference, Trial, run_trial
from unbroken.prove.verdict import Outcome, compare, compared, unseeded

MOST_TRIES = 5
"""How often a trial is planned earlier and earlier because its job had ended before the fault."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What to prove, and how hard."""

    command: Command
    nodes: int
    kinds: Sequence[str]
    """Of faults, see faults.KINDS; empty: those that the script can meet."""
    trials: int
    """How many disturbed runs; a trial's plan follows from its number, their count and the seed."""
    seed: int
    directory: Path
    """For all that is written; must be empty or not exist."""
    deadline_s: float
    """Of each start of the job."""
    only: int | None = None
    """Run this trial alone, from 1; None for all."""
    grace_s: float = GRACE_S
    loopback: bool = False
    """True: no network namespaces, whatever the system allows."""

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.nodes * self.command.workers_per_node

    @property
    def numbers(self) -> Sequence[int]:
        """The trials to run."""
        return range(1, self.trials + 1) if self.only is None else [self.only]


@dataclass(frozen=True, slots=True)
class Report:
    """What the proof found."""

    settings: Settings
    kinds: Sequence[str]
    """Of the faults that were tried."""
    reference: Reference
    nodes: str
    """What stood for nodes: "network namespaces" or "processes on loopback"."""
    trials: list[Trial]
    """In order, up to the first that did not pass."""
    uncovered: str = ""
    """What the undisturbed run was told is in no checkpoint; empty if nothing."""

    @property
    def passed(self) -> bool:
        """True if every trial passed."""
        return all(trial.passed for trial in self.trials)

    @property
    def compared(self) -> tuple[str, ...]:
        """The parts of the state that were compared."""
        return compared(self.reference.outcome)


def prove(settings: Settings, tell: Callable[[str], None] = lambda _: None) -> Report:
    """Run the whole proof. `tell` hears one line at each stage.

    Raises UsageError if the script fails or hangs undisturbed, or leaves nothing that could be compared.
    """
    require_proc()
    if settings.directory.exists() and (not settings.directory.is_dir() or any(settings.directory.iterdir())):
        raise UsageError(f"{settings.directory} is not empty; give a new directory, every proof needs its own")
    marker = secrets.token_hex(8)
    with open_nodes(settings.nodes, marker, loopback=settings.loopback) as nodes:
        ground = Ground(settings.command, nodes, marker, settings.deadline_s, settings.grace_s)
        return _Proof(settings, ground, tell).run()


@dataclass(frozen=True, slots=True)
class _Proof:
    settings: Settings
    ground: Ground
    tell: Callable[[str], None]

    def run(self) -> Report:
        kind = self.ground.nodes[0].kind
        self.tell(f"undisturbed run, world size {self.settings.world_size}, nodes {self.settings.nodes} ({kind})")
        reference = self._undisturbed("reference")
        self.tell(f"undisturbed run took {reference.seconds:.1f} s")
        kinds = self._kinds(reference.outcome)
        uncovered = Place(self.settings.directory / "reference").uncovered()
        report = Report(self.settings, kinds, reference, kind, [], uncovered)
        for number in self.settings.numbers:
            trial = self._trial(number, kinds, reference)
            report.trials.append(trial)
            if not trial.passed:
                break
        return report

    def _kinds(self, outcome: Outcome) -> Sequence[str]:
        """The kinds of faults to try. Raises UsageError if the script cannot meet one that was asked for."""
        saves = any(event.event == "saved" for event in outcome.events)
        asked = self.settings.kinds or [kind for kind in DEFAULT if saves or kind not in INSIDE]
        inside = [kind for kind in asked if kind in INSIDE]
        if inside and not saves:
            raise UsageError(
                f"--faults {','.join(inside)}: they strike inside the saves and restores of a Checkpointer, and this "
                "script has not saved with one; leave them out"
            )
        return asked

    def _undisturbed(self, name: str) -> Reference:
        place = Place(self.settings.directory / name)
        place.ledger.mkdir(parents=True)
        progress = Progress(place.ledger)
        job = start(self.ground.command, self.ground.nodes, place, 1, self.ground.marker, {})
        steps: list[float] = []
        """When each was first seen, in seconds since the start."""
        try:
            ended = self.ground.until(job, lambda: _note(progress, job, steps))
            seconds = time.monotonic() - job.started_at
        finally:
            job.end()
        if ended == "late":
            raise UsageError(
                f"the script did not end within {self.settings.deadline_s:g} s undisturbed; "
                f"give --deadline more, if it needs more. Its last lines:\n{place.last_lines()}"
            )
        outcome = _outcome(place)
        if any(job.codes()) and outcome.final is None:
            codes = ", ".join(map(str, job.codes()))
            raise UsageError(f"the script fails undisturbed (exit code {codes}). Its last lines:\n{place.last_lines()}")
        if not compared(outcome):
            raise UsageError(
                "the script leaves nothing to compare: it neither trains with a Checkpointer, which keeps a ledger "
                "where UNBROKEN_LEDGER says, nor prints a line `final <sha256 of the weights>`"
            )
        return _timed(outcome, seconds, steps)

    def _trial(self, number: int, kinds: Sequence[str], reference: Reference) -> Trial:
        settings = self.settings
        job = PlannedJob(settings.nodes, settings.world_size, reference.steps)
        faults = plan_trial(settings.seed, number, settings.trials, kinds, job)
        self.tell(f"trial {number}: {'; '.join(map(str, faults))}")
        for attempt in range(MOST_TRIES):
            again = f"-again-{attempt}" if attempt else ""
            trial = Trial(number, Place(settings.directory / f"trial-{number:03d}{again}"))
            run_trial(self.ground, trial, faults, reference)
            if trial.problem or not any(fault.required for fault in faults[len(trial.strikes) :]):
                break
            faults = [fault.earlier() for fault in faults]
        else:
            trial.problem = _never_struck(faults[len(trial.strikes)])
        if not trial.problem:
            self._judge(trial, reference)
        return trial

    def _judge(self, trial: Trial, reference: Reference) -> None:
        outcome = _outcome(trial.place)
        trial.difference = compare(reference.outcome, outcome, trial.strikes[0].step)
        trial.unseeded = frozenset().union(*unseeded(reference.outcome, outcome).values())
        if trial.difference is None:
            return
        if trial.difference.before_fault:
            trial.nondeterministic = True
        else:
            self.tell(
                f"trial {trial.number} differs; a second undisturbed run, to see whether the script repeats itself"
            )
            again = self._undisturbed("undisturbed-again").outcome
            trial.nondeterministic = compare(reference.outcome, again) is not None


def _never_struck(fault: Fault) -> str:
    needs = f", which needs {fault.checkpoints} checkpoints: save more often, keep more" if fault.checkpoints else ""
    return f"the job always ended before {fault} could strike{needs}; give it more steps"


def _outcome(place: Place) -> Outcome:
    return Outcome(read_ledger(place.ledger), place.final(), read_events(place.ledger))


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
