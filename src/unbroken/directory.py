"""Is this the run directory, and is it the same one on every rank?

Asked once, before anything is restored or written. Ranks that look at different directories (a node-local disk, a
path that differs by one character) would each find another history, or none, and pair their collectives wrongly.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from pathlib import Path

from unbroken.cluster import Channel, Message
from unbroken.errors import DirectoryProblem, UsageError
from unbroken.generations import DIRECTORY, newest_number
from unbroken.manifest import MANIFEST, parse_step_directory
from unbroken.store.local import APPEAR_S, LocalStore

RUN_DIRECTORY = "UNBROKEN_RUN_DIR"
"""Environment variable that overrides the path of every Checkpointer; `unbroken prove` sets it."""


def run_directory(path: str | Path) -> Path:
    """The directory a Checkpointer works in. Raises UsageError for what is no directory's path."""
    path = os.environ.get(RUN_DIRECTORY) or path
    if isinstance(path, str) and "://" in path:
        raise UsageError(f"{path}: object stores are not supported yet; give a directory that all nodes share")
    if not str(path):
        raise UsageError("the run directory's path is empty")
    return Path(path).expanduser().absolute()


def agree_on_directory(channel: Channel, root: Path, deadline_s: float) -> LocalStore:
    """Make sure that all ranks see one writable directory at `root`, creating it if need be.

    Raises DirectoryProblem on every rank, naming those that see something else and what they see.
    """
    store = LocalStore(root)
    probe = channel.decide("directory/probe", lambda: _place_probe(store).encode(), deadline_s).decode()
    problem = "" if channel.rank == 0 else _look_for_probe(store, probe)
    answers = channel.exchange("directory/seen", Message(error=problem), deadline_s)
    if channel.rank == 0:
        with contextlib.suppress(OSError):
            store.delete(probe)
    problems = [f"rank {rank} {answer.error}" for rank, answer in enumerate(answers) if answer.error]
    if problems:
        shown = "; ".join(problems[:4]) + (f"; and {len(problems) - 4} more ranks" if len(problems) > 4 else "")
        raise DirectoryProblem(
            f"the run directory is not the same on all ranks: {shown}. Rank 0 on {socket.gethostname()} uses {root}, "
            f"{contents(store)}; give a directory that all nodes share"
            if channel.rank == 0
            else f"the run directory is not the same on all ranks: {shown}; give a directory that all nodes share"
        )
    return store


def contents(store: LocalStore) -> str:
    """What a directory holds, in a few words."""
    steps = [place for name in store.list("") if (place := parse_step_directory(name))]
    if steps:
        return f"which holds checkpoints up to step {max(steps)[0]}"
    return "which holds no checkpoint" if newest_number(store) or store.root.is_dir() else "which does not exist"


def _place_probe(store: LocalStore) -> str:
    """Rank 0 writes a file that the others look for; so it also finds out whether it can write at all."""
    root = store.root
    if root.exists() and not root.is_dir():
        raise DirectoryProblem(f"{root} is a file, not a directory; give the path of a run directory")
    if parse_step_directory(root.name) and (root / MANIFEST).exists():
        raise DirectoryProblem(f"{root} is a single checkpoint; give the run directory above it: {root.parent}")
    try:
        store.create_root()
        # The number is the one this start will have: it tells a sweep whether the probe is a leftover (retention.py).
        probe = f"{DIRECTORY}/.probe-{newest_number(store) + 1:04d}-{secrets.token_hex(8)}"
        store.create(probe, b"")
    except OSError as error:
        raise DirectoryProblem(
            f"cannot write to the run directory {root}: {error.strerror or error}; "
            "make it writable, make room, or give another path"
        ) from error
    return probe


def _look_for_probe(store: LocalStore, probe: str) -> str:
    """What is wrong with the directory as this rank sees it; empty if nothing is."""
    end = time.monotonic() + APPEAR_S
    while store.size(probe) is None:
        if time.monotonic() > end:
            return f"on {socket.gethostname()} uses {store.root}, {contents(store)}"
        time.sleep(0.05)
    if not os.access(store.root, os.W_OK):
        return f"on {socket.gethostname()} cannot write to {store.root}"
    return ""
