"""Compare a disturbed run with the undisturbed one. Pure: no files, no processes.

Equal means equal to the last bit: losses are compared as hexadecimal text, state by its digests. Every line of every
rank counts, also those of steps that were done twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from unbroken.prove.ledger import Event, Ledger, Line, last_step

LINE_PARTS = ("world", "samples", "rng", "loss")
"""Parts that every line has, in the order in which a difference of one causes a difference of the next."""
FINAL = "final"
MISSING = "missing"
EXTRA = "extra"
ACCUMULATION = "accumulation"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run left to be compared."""

    ledger: Ledger
    """Empty if the script keeps none."""
    final: str | None
    """The digest in its `final <sha256>` line, if it printed one."""
    events: Sequence[Event] = ()
    """Saves and restores, in order of time."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a run first differs from the undisturbed one."""

    step: int
    """The first step that differs; that of the last line for the final weights."""
    parts: tuple[str, ...]
    """What differs there: `accumulation` (a window was begun in its middle), `samples`, `rng`, `loss`, names of
    registered objects (`model`, `optimizer`, …) and of what is not registered but looks like state, `final`,
    `missing` (a rank never did the step), `extra` (the undisturbed run has no such step)."""
    ranks: tuple[int, ...]
    """Where; empty for the final weights."""
    later: tuple[str, ...] = ()
    """What else differs at `later_step`, the first step from there on whose lines hold the whole state."""
    later_step: int | None = None
    not_restored: tuple[str, ...] = ()
    """Parts of the state that were not as they had been saved, right after the restore of `restored_step`."""
    restored_step: int | None = None
    """Of the last restore before the difference whose state can be held against what was saved; None if there is none.
    If nothing is in `not_restored`, all that is registered was brought back."""
    before_fault: bool = False
    """True if the run had not been struck yet: two undisturbed runs of the script differ, and resuming is not to
    blame."""

    def __str__(self) -> str:
        if self.parts == (FINAL,):
            return "the final weights differ, though every line of the ledger that there is agrees" + self._restore()
        where = f"step {self.step} differs in {', '.join(self.parts)} on {_ranks(self.ranks)}"
        if self.parts == (MISSING,):
            where = f"step {self.step} was never done by {_ranks(self.ranks)}"
        elif self.parts == (EXTRA,):
            where = f"step {self.step} of {_ranks(self.ranks)} does not exist in the undisturbed run"
        if self.later:
            where += f"; at step {self.later_step}, where the whole state is known, {', '.join(self.later)} differ"
        where += self._restore()
        if self.before_fault:
            where += "; no fault had struck yet: the script gives other results each time it is started"
        return where

    def _restore(self) -> str:
        if not self.not_restored:
            return ""
        verb = "was" if len(self.not_restored) == 1 else "were"
        return (
            f"; right after the restore of step {self.restored_step}, {'; '.join(self.not_restored)} {verb} not as it "
            "had been saved"
        )


def compare(reference: Outcome, trial: Outcome, struck_at: int | None = None) -> Difference | None:
    """The first difference, or None if nothing that both runs tell differs.

    reference  the undisturbed run: it holds each step of each rank once
    trial      lines of one step and rank are ordered by time
    struck_at  the highest step of any rank when the first fault struck; None if it was none
    """
    found: dict[int, dict[str, set[int]]] = {}
    """Parts that differ, with ranks, by step."""
    before_fault: set[int] = set()
    own_rng = unseeded(reference, trial)
    for (step, rank), lines in trial.ledger.items():
        expected = _expected(reference, step, rank, lines[0], own_rng.get(rank, frozenset()))
        differing = [_differing(expected, line) for line in lines]
        _note(found, step, rank, set().union(*differing))
        if differing[0] and step < (struck_at or 0):
            before_fault.add(step)
    for step, rank in reference.ledger.keys() - trial.ledger.keys():
        _note(found, step, rank, {MISSING})
    difference = None
    if found:
        difference = replace(_first(found), before_fault=min(found) in before_fault)
        difference = _window_begun_anew(difference, reference, trial)
    elif reference.final != trial.final:
        difference = Difference(last_step(reference.ledger), (FINAL,), ())
    return difference if difference is None or difference.before_fault else _blame(difference, trial)


def _blame(difference: Difference, trial: Outcome) -> Difference:
    """Name what the last restore before the difference did not bring back, where the script's events tell."""
    saved: dict[tuple[int, int, int], Event] = {}
    parts: dict[int, set[str]] = {}
    for event in trial.events:
        key = (event.step, event.micro_step, event.rank)
        if event.event == "saved":
            saved[key] = event
        elif key in saved and event.step < max(difference.step, 1) + (difference.parts == (FINAL,)):
            was = saved[key].state
            names = {name for name in was.keys() | event.state.keys() if was.get(name) != event.state.get(name)}
            parts.setdefault(event.step, set()).update(names)
    at = max((step for step, names in parts.items() if names), default=max(parts, default=None))
    return difference if at is None else replace(difference, not_restored=tuple(sorted(parts[at])), restored_step=at)


def _window_begun_anew(difference: Difference, reference: Outcome, trial: Outcome) -> Difference:
    """Tell a lost accumulation window from lost samples.

    A job that was saved inside a window and forgot it goes on in the middle of the step's samples: it has the last ones
    of the undisturbed run, without the first, whose gradients are gone.
    """
    for rank in difference.ranks if "samples" in difference.parts else ():
        expected = reference.ledger[difference.step, rank][0].samples
        for line in trial.ledger[difference.step, rank]:
            if _continues_inside(expected, line.samples):
                return replace(difference, parts=(ACCUMULATION, *difference.parts))
    return difference


def _continues_inside(expected: Any, samples: Any) -> bool:
    if not isinstance(expected, list) or not isinstance(samples, list) or expected == samples:
        return False
    shifts = range(1, len(expected))
    return any(samples[: len(expected) - shift] == expected[shift:] for shift in shifts)


def unseeded(reference: Outcome, trial: Outcome) -> dict[int, frozenset[str]]:
    """By rank: generators on whose state two fresh starts disagree, because the script leaves them unseeded.

    If nobody draws from one (Python's `random` in a script that only seeds torch), that changes nothing else. Its state
    can still be held against itself: a step that was done twice must have left the same one. Ledgers that do not tell
    the generators apart have one, `all`.
    """
    first = min((step for step, _ in reference.ledger), default=0)
    both = (key for key in trial.ledger if key[0] == first and key in reference.ledger)
    found = {rank: _disagreeing(reference.ledger[step, rank][0], trial.ledger[step, rank][0]) for step, rank in both}
    return {rank: names for rank, names in found.items() if names}


def _disagreeing(one: Line, other: Line) -> frozenset[str]:
    if one.generators is None or other.generators is None:
        return frozenset() if one.rng == other.rng else frozenset({"all"})
    names = one.generators.keys() | other.generators.keys()
    return frozenset(name for name in names if one.generators.get(name) != other.generators.get(name))


def compared(reference: Outcome) -> tuple[str, ...]:
    """What a comparison with this run covers, for the report; empty if there is nothing to compare."""
    lines = [lines[0] for lines in reference.ledger.values()]
    parts = [part for part in ("samples", "rng", "loss") if any(getattr(line, part) is not None for line in lines)]
    parts += sorted({part for line in lines for part in line.state or ()} - set(parts))
    return (*parts, *([FINAL] if reference.final else []))


def _expected(reference: Outcome, step: int, rank: int, own: Line, unseeded: frozenset[str]) -> Line | None:
    """The reference's line; with the state of the generators that are `unseeded` as in `own`."""
    expected = reference.ledger[step, rank][0] if (step, rank) in reference.ledger else None
    if expected is None or not unseeded:
        return expected
    state, generators = expected.state, expected.generators
    if state is not None and own.state is not None and "rng" in own.state:
        state = {**state, "rng": own.state["rng"]}
    if generators is not None and own.generators is not None:
        generators = {**generators, **{name: own.generators[name] for name in unseeded & own.generators.keys()}}
    return msgspec.structs.replace(expected, rng=own.rng, state=state, generators=generators)


def _differing(expected: Line | None, line: Line) -> set[str]:
    """The parts in which a line is not as expected."""
    if expected is None:
        return {EXTRA}
    parts = {part for part in LINE_PARTS if getattr(expected, part) != getattr(line, part)}
    if expected.generators is not None and line.generators is not None and expected.generators != line.generators:
        parts.add("rng")
    if expected.state is not None and line.state is not None:
        names = expected.state.keys() | line.state.keys()
        parts |= {name for name in names if expected.state.get(name) != line.state.get(name)}
    return parts


def _note(found: dict[int, dict[str, set[int]]], step: int, rank: int, parts: set[str]) -> None:
    for part in parts:
        found.setdefault(step, {}).setdefault(part, set()).add(rank)


def _first(found: dict[int, dict[str, set[int]]]) -> Difference:
    step = min(found)
    ranks = tuple(sorted(set().union(*found[step].values())))
    parts = _ordered(found[step])
    # Most lines hold no digests of the state: the next one that does says which part went astray.
    if not _state_parts(parts):
        for later_step in sorted(found):
            later = _state_parts(found[later_step])
            if later:
                return Difference(step, parts, ranks, later, later_step)
    return Difference(step, parts, ranks)


def _ordered(parts: dict[str, set[int]]) -> tuple[str, ...]:
    """Causes before effects: a missing step, the samples, the RNG, the loss, then the state by name."""
    first = (MISSING, EXTRA, *LINE_PARTS)
    return tuple(sorted(parts, key=lambda part: (first.index(part) if part in first else len(first), part)))


def _state_parts(parts: dict[str, set[int]] | tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted(set(parts) - {*LINE_PARTS, MISSING, EXTRA, FINAL}))


def _ranks(ranks: tuple[int, ...]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:8]))}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
