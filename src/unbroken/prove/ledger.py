"""Read the ledgers of a run: what every rank did at every step.

Comes in: a directory of `.jsonl` files, one per process, as `unbroken.ledger` writes them. Goes out: lines by step and
rank. A step may have several lines of one rank, when it was replayed after a fault. Nothing here changes a file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec

from unbroken.errors import UnbrokenError

T = TypeVar("T")


class Line(msgspec.Struct, frozen=True):
    """What one rank says of one optimizer step. Keys that later versions add are ignored."""

    step: int
    rank: int
    world: int
    loss: str | None = None
    """`float.hex()`."""
    samples: Any = None
    """Ids, or a digest of them."""
    rng: str | None = None
    """Digest of all random generators after the step."""
    state: dict[str, str] | None = None
    """Digest of each part of the state (`model`, `optimizer`, …); only every few steps."""
    generators: dict[str, str] | None = None
    """Digest of each global random generator: `python`, `numpy`, `torch`, `cuda`."""


class Event(msgspec.Struct, frozen=True):
    """What the state of one rank was at a save, or right after a restore."""

    event: str
    """`saved` or `restored`."""
    step: int
    micro_step: int
    rank: int
    state: dict[str, str]
    """Digests by part."""


Ledger: TypeAlias = dict[tuple[int, int], list[Line]]
"""Lines by (step, rank)."""


def read_ledger(directory: Path) -> Ledger:
    """Every line in `directory`, by step and rank, in order of time; empty if there are none.

    Raises UnbrokenError for a line that is no ledger line.
    """
    ledger: Ledger = {}
    for path in _in_order(directory, "*.jsonl"):
        for line in read_lines(path, Line):
            ledger.setdefault((line.step, line.rank), []).append(line)
    return ledger


def read_events(directory: Path) -> list[Event]:
    """Every event in `directory`, in order of time; empty if there are none. Raises UnbrokenError."""
    return [event for path in _in_order(directory, "*.events") for event in read_lines(path, Event)]


def _in_order(directory: Path, pattern: str) -> list[Path]:
    """Starts of a job follow one another: the file that was written to last belongs to the latest."""
    return sorted(directory.glob(pattern), key=lambda path: (path.stat().st_mtime_ns, path.name))


def read_lines(path: Path, kind: type[T]) -> Iterator[T]:
    """The whole lines of one process's file; what follows the last newline is dropped.

    A killed process may leave a torn last line: it says nothing about the run. Raises UnbrokenError.
    """
    *whole, _torn = path.read_bytes().split(b"\n")
    for number, text in enumerate(whole, start=1):
        try:
            yield msgspec.json.decode(text, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise UnbrokenError(f"{path}, line {number}, is no line of a ledger: {error}") from error


def last_step(ledger: Ledger) -> int:
    """The highest step of any rank; 0 for an empty ledger."""
    return max((step for step, _ in ledger), default=0)


class Progress:
    """How far the processes that write into a directory have come. Used by one thread.

    Files that are there when it is made belong to an earlier start of the job and do not count.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._old = set(directory.glob("*.jsonl"))
        self._read: dict[Path, int] = {}
        self.first: int | None = None
        """The lowest step seen."""
        self.last: int | None = None
        """The highest step seen."""

    def look(self) -> int | None:
        """Read what was added; the highest step of any rank so far, or None before the first."""
        for path in self._directory.glob("*.jsonl"):
            if path not in self._old:
                self._read_on(path)
        return self.last

    def _read_on(self, path: Path) -> None:
        begin = self._read.get(path, 0)
        with path.open("rb") as file:
            file.seek(begin)
            added = file.read()
        whole = added[: added.rfind(b"\n") + 1]
        self._read[path] = begin + len(whole)
        for text in whole.splitlines():
            try:
                step = msgspec.json.decode(text, type=Line).step
            except msgspec.MsgspecError:
                continue  # read_ledger will name it; a fault's moment does not depend on it
            self.first = step if self.first is None else min(self.first, step)
            self.last = step if self.last is None else max(self.last, step)
