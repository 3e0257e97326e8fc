"""Every crash of a recorded story, judged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from crash.filesystem import Cuts, FileSystem, digest
from crash.judge import Judge
from crash.orders import Moment

EMPTY = Moment(FileSystem(), None)
"""Before a story begins."""


@dataclass
class Verdicts:
    """What came of all crashes."""

    moments: int = 0
    """File systems that the run could have been stopped in."""
    states: int = 0
    """Distinct trees that a crash in one of them could leave."""
    problems: list[str] = field(default_factory=list)
    """One line for each state that is not as it must be."""


def few_cuts(size: int) -> list[int]:
    """Where a write may be torn: nothing, the first byte, half, all but the last byte, all."""
    return sorted({0, min(1, size), size // 2, max(0, size - 1), size})


def every_cut(size: int) -> list[int]:
    """Every byte."""
    return list(range(size + 1))


def explore(moments: Iterable[Moment], judge: Judge, at_least: int = 1, every: Cuts | None = None) -> Verdicts:
    """Judge whatever a crash at any of `moments` may leave; `every` and `at_least` as in `crashes` and `verdict`."""
    moments = list(moments)
    problems = list(judged(moments, judge, at_least, every))
    return Verdicts(len(moments), len(problems), [problem for problem in problems if problem])


def judged(moments: Iterable[Moment], judge: Judge, at_least: int = 1, every: Cuts | None = None) -> Iterator[str]:
    """The verdict on each distinct state, one after another; empty if the state is as it must be."""
    seen = set()
    for moment in moments:
        for tree in moment.system.crashes(few_cuts, every):
            key = (digest(tree), moment.promised)
            if key not in seen:
                seen.add(key)
                yield judge.verdict(tree, moment.promised, at_least)
