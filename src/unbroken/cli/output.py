"""How commands write: JSON, tables, sizes, and text that came from a directory anyone may have written."""

from __future__ import annotations

import sys
from typing import Any

import msgspec
from rich.console import Console


def stdout() -> Console:
    """For results. Plain where it is no terminal or NO_COLOR is set; 80 columns wide where nothing tells."""
    return Console(highlight=False, markup=False, emoji=False)


def stderr() -> Console:
    """For everything that is no result."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False)


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(value)) + b"\n")
    sys.stdout.flush()


def printable(text: str) -> str:
    """`text` without what could steer a terminal: a hostile name may hold escape sequences."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def size_text(count: int) -> str:
    """Bytes for people, in powers of 1000."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.5 or unit == "TB":
            break
        size /= 1000
    return f"{count} B" if unit == "B" else f"{size:.3g} {unit}"
