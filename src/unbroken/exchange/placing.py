"""What is exported appears whole under its name, or not at all.

It is built beside its place under a name that begins with `.tmp-`, made durable, and then given its name in one step.
A process that is killed meanwhile leaves that, and nothing else; an error leaves nothing.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from unbroken.errors import UsageError
from unbroken.store.local import LocalStore


@contextlib.contextmanager
def new_directory(out: Path, run: Path) -> Iterator[LocalStore]:
    """A store to write into, which becomes the directory `out` if no error comes.

    run  the run directory that is read: nothing may be placed in it

    Raises UsageError if something is there already that is no empty directory.
    """
    out = _checked(out, run)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UsageError(f"{out} exists: give a new name, or an empty directory")
    staging = out.parent / f".tmp-{secrets.token_hex(8)}"
    staging.mkdir()
    try:
        yield LocalStore(staging)
        for path in [*(path for path in staging.rglob("*") if path.is_file()), staging]:
            _sync(path)
        # An empty directory of this name is replaced; one that was filled meanwhile is not.
        staging.rename(out)
        _sync(out.parent)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


@contextlib.contextmanager
def new_file(out: Path, run: Path) -> Iterator[Path]:
    """A path to write to, which becomes the file `out` if no error comes. `run` and errors as for `new_directory`."""
    out = _checked(out, run)
    if out.exists():
        raise UsageError(f"{out} exists: give the name of a new file")
    staging = out.parent / f".tmp-{secrets.token_hex(8)}"
    try:
        yield staging
        _sync(staging)
        staging.rename(out)
        _sync(out.parent)
    finally:
        staging.unlink(missing_ok=True)


def _checked(out: Path, run: Path) -> Path:
    out = out.expanduser().resolve()
    if out.is_relative_to(run.resolve()):
        raise UsageError(f"{out} lies in the run directory, which is the job's alone: give a place outside of it")
    if not out.parent.is_dir():
        raise UsageError(f"{out.parent} is not a directory; create it first")
    return out


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
