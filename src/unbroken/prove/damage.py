"""Damage to the newest checkpoint of a run directory, as a failing disk does it; the job is not running meanwhile.

Any run directory: where `unbroken` keeps its checkpoints, the newest of them; elsewhere the file written last.
"""

from __future__ import annotations

import random
from pathlib import Path

from unbroken.manifest import MANIFEST, parse_step_directory

_NOT_OURS = ("final.txt",)


def committed(run: Path) -> int | None:
    """How many checkpoints `unbroken` has committed in a run directory; None if it holds none of its own."""
    if not (run / "generations").is_dir():
        return None
    return len(_steps(run))


def damage(run: Path, kind: str, draw: random.Random) -> str | None:
    """Flip one bit (`bit-flip`) or cut a file (`truncate`) of the newest checkpoint; what was done, for the report.

    None if there is no file to damage.
    """
    files = [path for path in _newest(run) if path.is_file() and path.stat().st_size]
    if not files:
        return None
    path = draw.choice(files)
    size = path.stat().st_size
    name = path.relative_to(run)
    place = draw.randrange(size)
    if kind == "truncate":
        with path.open("r+b") as file:
            file.truncate(place)
        return f"{name} cut to {place} of {size} bytes"
    bit = draw.randrange(8)
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ (1 << bit)]))
    return f"bit {bit} of byte {place} of {name}"


def _newest(run: Path) -> list[Path]:
    """The files of the newest checkpoint: the manifest and every file beside it."""
    if committed(run):
        directory = max(_steps(run))[1]
        return sorted(path for path in directory.iterdir() if not path.name.startswith("."))
    files = [path for path in run.rglob("*") if path.is_file() and path.name not in _NOT_OURS]
    return sorted(files, key=lambda path: path.stat().st_mtime_ns)[-1:]


def _steps(run: Path) -> list[tuple[tuple[int, int], Path]]:
    found = ((parse_step_directory(path.parent.name), path.parent) for path in run.glob(f"step-*/{MANIFEST}"))
    return [(place, directory) for place, directory in found if place is not None]
