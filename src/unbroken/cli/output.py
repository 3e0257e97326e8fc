"""How commands write: JSON, tables, sizes, and text that came from a directory anyone may have written."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from rich.console import Console
from rich.table import Table

from unbroken.errors import UsageError

NARROWEST = 60
"""Columns. A narrower terminal breaks our lines; a table squeezed into it would lose its text."""
CLOSED_PIPE = 141
"""Exit code if the reader of our output went away (`| head`): what a shell says of a process that SIGPIPE ended."""
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *(?:([kmgt])(i)?)?b?", re.IGNORECASE)
_UNITS = "kmgt"


class _Console(Console):
    """Ends the command quietly if nobody reads on."""

    def on_broken_pipe(self) -> NoReturn:
        leave_closed_pipe()


def stdout() -> Console:
    """For results. Plain where it is no terminal or NO_COLOR is set; 80 columns wide where nothing tells."""
    return _at_least_narrowest(_Console(highlight=False, markup=False, emoji=False))


def stderr() -> Console:
    """For everything that is no result."""
    return _at_least_narrowest(_Console(stderr=True, highlight=False, markup=False, emoji=False))


def _at_least_narrowest(console: Console) -> Console:
    if console.width < NARROWEST:
        console.width = NARROWEST
    return console


def leave_closed_pipe() -> NoReturn:
    """End the command; nothing more can be written, also not by Python as it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(CLOSED_PIPE)


def table_of(*titles: str, left: tuple[str, ...] = ()) -> Table:
    """An empty table. Numbers stand to the right; columns named in `left` hold text, which is never cut."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title, justify="left" if title in left else "right", overflow="fold")
    return table


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    try:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(value)) + b"\n")
        sys.stdout.flush()
    except BrokenPipeError:
        leave_closed_pipe()


def printable(text: str) -> str:
    """`text` without what could steer a terminal: a hostile name may hold escape sequences."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def path_text(path: Path) -> str:
    """A path for people and for JSON; bytes in it that are no UTF-8 are spelled out."""
    return printable(str(path))


def parse_size(text: str) -> int:
    """Bytes of `5GB`, `500 MB`, `2GiB` or a plain number; GB are powers of 1000, GiB of 1024. Raises UsageError."""
    match = _SIZE.fullmatch(text.strip())
    power = _UNITS.index(match[2].lower()) + 1 if match and match[2] else 0
    count = int(float(match[1]) * (1024 if match[3] else 1000) ** power) if match else 0
    if count < 1:
        raise UsageError(f"{text!r} is no size: give a number of bytes, or one with kB, MB, GB, TB, or MiB and so on")
    return count


def size_text(count: int) -> str:
    """Bytes for people, in powers of 1000."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.5 or unit == "TB":
            break
        size /= 1000
    return f"{count} B" if unit == "B" else f"{size:.3g} {unit}"
