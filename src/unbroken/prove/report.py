"""A proof's result, for people and for machines. Both say the same; nothing here decides anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from unbroken.prove.run import Report
from unbroken.prove.trial import Strike, Trial
from unbroken.prove.verdict import ACCUMULATION, EXTRA, MISSING, Difference

RepeatCommand = Callable[[int], str]
"""The command line that repeats one trial, by its number."""


def print_report(report: Report, repeat: RepeatCommand, console: Console) -> None:
    """The verdict, and how each trial went, at most 80 columns wide where lines can be broken."""
    console.print(_table(report))
    for trial in report.trials:
        if not trial.passed:
            console.print(_failure(trial, repeat), soft_wrap=True)
    console.print(_verdict(report), soft_wrap=True)


def report_json(report: Report, repeat: RepeatCommand) -> dict[str, Any]:
    """The same as plain JSON values."""
    settings, reference = report.settings, report.reference
    return {
        "verdict": "PASS" if report.passed else "FAIL",
        "nodes": settings.nodes,
        "nodes_are": report.nodes,
        "world_size": settings.world_size,
        "faults": list(report.kinds),
        "seed": settings.seed,
        "steps": reference.steps,
        "seconds": round(reference.seconds, 3),
        "final": reference.outcome.final,
        "compared": list(report.compared),
        "uncovered": report.uncovered or None,
        "unseeded": sorted(_unseeded(report)),
        "directory": str(settings.directory),
        "trials": [_trial_json(trial, report, repeat) for trial in report.trials],
    }


def _trial_json(trial: Trial, report: Report, repeat: RepeatCommand) -> dict[str, Any]:
    difference = trial.difference
    return {
        "trial": trial.number,
        "passed": trial.passed,
        "faults": [
            {
                "fault": strike.fault.kind,
                "victim": strike.fault.victim,
                "how": strike.how or None,
                "step": strike.step,
                "restored": strike.restored,
                "steps_lost": strike.steps_lost,
            }
            for strike in trial.strikes
        ],
        "seconds_lost": round(max(0.0, trial.seconds - report.reference.seconds), 3),
        "problem": trial.problem or None,
        "output": trial.output or None,
        "difference": _difference_json(difference),
        "nondeterministic": trial.nondeterministic,
        "directory": str(trial.place.root),
        "repeat": repeat(trial.number),
    }


def _difference_json(difference: Difference | None) -> dict[str, Any] | None:
    if difference is None:
        return None
    return {
        "step": difference.step,
        "parts": list(difference.parts),
        "ranks": list(difference.ranks),
        "later_step": difference.later_step,
        "later": list(difference.later),
        "restored_step": difference.restored_step,
        "not_restored": list(difference.not_restored),
        "before_fault": difference.before_fault,
        "text": str(difference),
    }


def _table(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("trial", "fault", "at", "restored", "steps lost", "s lost", "result"):
        table.add_column(title, justify="left" if title in ("fault", "result") else "right", no_wrap=title != "fault")
    for trial in report.trials:
        strikes: list[Strike | None] = [*trial.strikes] or [None]
        for index, strike in enumerate(strikes):
            first, last = index == 0, index == len(strikes) - 1
            table.add_row(
                str(trial.number) if first else "",
                *_strike_cells(strike),
                f"{max(0.0, trial.seconds - report.reference.seconds):.1f}" if last else "",
                _result(trial) if last else "",
            )
    return table


def _strike_cells(strike: Strike | None) -> tuple[str, str, str, str]:
    if strike is None:
        return ("none", "-", "-", "-")
    struck_at = "start" if strike.step is None else f"step {strike.step}"
    restored = "-" if strike.restored is None else f"step {strike.restored}"
    return (str(strike.fault), struck_at, restored, "-" if strike.steps_lost is None else str(strike.steps_lost))


def _result(trial: Trial) -> Text:
    return Text("equal", style="green") if trial.passed else Text("FAIL", style="bold red")


def _failure(trial: Trial, repeat: RepeatCommand) -> RenderableType:
    lines = [Text(""), Text(f"trial {trial.number}: {trial.problem or trial.difference}", style="bold")]
    if trial.nondeterministic:
        lines.append(
            Text(
                "the script does not repeat itself: two undisturbed runs differ, so nothing is shown about resuming. "
                "Seed every generator, and make kernels deterministic"
            )
        )
    elif trial.difference is not None and (hint := _what_to_do(trial.difference)):
        lines.append(Text(hint))
    if trial.output:
        lines += [Text("the job's last lines:"), Text(trial.output)]
    lines += [Text(f"what it wrote and printed: {trial.place.root}"), Text(f"repeat it: {repeat(trial.number)}")]
    return Group(*lines)


def _what_to_do(difference: Difference) -> str:
    """How such a difference comes about, if its parts tell; what was not restored tells most."""
    parts = difference.not_restored or difference.parts
    if any(part.startswith("unregistered") for part in parts):
        return "what is unregistered is in no checkpoint: add it to the state that the Checkpointer is given"
    if ACCUMULATION in parts:
        return (
            "the job went on in the middle of an accumulation window without its gradients: tell the Checkpointer of "
            "every micro-step with step(accumulating=True)"
        )
    if "samples" in parts:
        return "the loader went on elsewhere: iterate unbroken.resumable(loader), and register it"
    if parts[0] == "rng":
        return "something seeds or draws random numbers between restore() and the next step, or draws more than before"
    if difference.restored_step is not None and parts[0] not in (MISSING, EXTRA):
        return (
            "samples and random numbers agree, and all that is registered was restored as it had been saved: something "
            "else decides the result: a counter or an average in a plain variable (register what holds it), something "
            "registered that changes after ckpt.step(), like a scheduler (call ckpt.step() last), or a step() inside "
            "an accumulation window (say step(accumulating=True))"
        )
    return ""


def _verdict(report: Report) -> RenderableType:
    reference = report.reference
    if not report.passed:
        return Group(Text(""), Text("FAIL", style="bold red"))
    faults = sum(len(trial.strikes) for trial in report.trials)
    what = f"PASS: {_count(len(report.trials), 'trial')}, {_count(faults, 'fault')}; every run equals the undisturbed"
    steps = f" ({_count(reference.steps, 'step')}, {_count(report.settings.world_size, 'rank')})"
    lines = [Text(""), Text(f"{what} one{steps if reference.steps else ''}", style="bold green")]
    lines.append(Text(f"compared: {', '.join(report.compared)}"))
    lines.append(Text(f"nodes: {report.settings.nodes}, {report.nodes}"))
    if reference.outcome.final:
        lines.append(Text(f"final {reference.outcome.final}"))
    if names := _unseeded(report):
        told = ", ".join(sorted(names))
        lines.append(Text(f"rng: {told} left unseeded by the script, so compared only where a step was done twice"))
    if not any(strike.restored for trial in report.trials for strike in trial.strikes):
        lines.append(Text("but no trial went on from a checkpoint, as far as the script tells: every run began anew"))
    if report.uncovered:
        lines.append(Text(f"but the script was told: {report.uncovered}"))
    lines.append(Text("not seen: state that is not registered and changes neither losses, samples nor final weights"))
    if not reference.steps:
        lines.append(Text("the script keeps no ledger: only its final weights were compared"))
    return Group(*lines)


def _unseeded(report: Report) -> frozenset[str]:
    return frozenset[str]().union(*(trial.unseeded for trial in report.trials))


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
