"""Compare a disturbed run with the undisturbed one. Pure: no files, no processes.

Equal means equal to the last bit: losses are compared as hexadecimal text, state by its digests. Every line of every
rank counts, also those of steps that were done twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from unbroken.prove.ledger import Ledger, Line, last_step

LINE_PARTS = ("world", "samples", "rng", "loss")
"""Parts that every line has, in the order in which a difference of one causes a difference of the next."""
FINAL = "final"
MISSING = "missing"
EXTRA = "extra"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run left to be compared."""

    ledger: Ledger
    """Empty if the script keeps none."""
    final: str | None
    """The digest in its `final <sha256>` line, if it printed one."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a run first differs from the undisturbed one."""

    step: int
    """The first step that differs; that of the last line for the final weights."""
    parts: tuple[str, ...]
    """What differs there: `samples`, `rng`, `loss`, names of registered objects (`model`, `optimizer`, …), `final`,
    `missing` (a rank never did the step), `extra` (the undisturbed run has no such step)."""
    ranks: tuple[int, ...]
    """Where; empty for the final weights."""
    later: tuple[str, ...] = ()
    """What else differs at `later_step`, the first step from there on whose lines hold the whole state."""
    later_step: int | None = None

    def __str__(self) -> str:
        if self.parts == (FINAL,):
            return "the final weights differ, though every line of the ledger that there is agrees"
        where = f"step {self.step} differs in {', '.join(self.parts)} on {_ranks(self.ranks)}"
        if self.parts == (MISSING,):
            where = f"step {self.step} was never done by {_ranks(self.ranks)}"
        elif self.parts == (EXTRA,):
            where = f"step {self.step} of {_ranks(self.ranks)} does not exist in the undisturbed run"
        if self.later:
            where += f"; at step {self.later_step}, where the whole state is known, {', '.join(self.later)} differ"
        return where


def compare(reference: Outcome, trial: Outcome) -> Difference | None:
    """The first difference, or None if nothing that both runs tell differs.

    reference  the undisturbed run: it holds each step of each rank once
    """
    found: dict[int, dict[str, set[int]]] = {}
    """Parts that differ, with ranks, by step."""
    for (step, rank), lines in trial.ledger.items():
        expected = reference.ledger.get((step, rank))
        parts = {part for line in lines for part in _differing(expected[0], line)} if expected else {EXTRA}
        _note(found, step, rank, parts)
    for step, rank in reference.ledger.keys() - trial.ledger.keys():
        _note(found, step, rank, {MISSING})
    if found:
        return _first(found)
    if reference.final != trial.final:
        return Difference(last_step(reference.ledger), (FINAL,), ())
    return None


def compared(reference: Outcome) -> tuple[str, ...]:
    """What a comparison with this run covers, for the report; empty if there is nothing to compare."""
    lines = [lines[0] for lines in reference.ledger.values()]
    parts = [part for part in ("samples", "rng", "loss") if any(getattr(line, part) is not None for line in lines)]
    parts += sorted({part for line in lines for part in line.state or ()} - set(parts))
    return (*parts, *([FINAL] if reference.final else []))


def _differing(expected: Line, line: Line) -> Iterator[str]:
    for part in LINE_PARTS:
        if getattr(expected, part) != getattr(line, part):
            yield part
    if expected.state is not None and line.state is not None:
        for part in sorted(expected.state.keys() | line.state.keys()):
            if expected.state.get(part) != line.state.get(part):
                yield part


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
