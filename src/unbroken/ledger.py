"""The ledger: one line per step and rank, from which a proof compares runs.

Written only if UNBROKEN_LEDGER names a directory. Every process appends to a file of its own, one flushed JSON line
per optimizer step, so that a killed process loses at most a torn last line. The line is a public contract:
{"step", "rank", "world", "loss": float.hex() or null, "samples": ids or digest, "rng": digest, "state": {part: digest}
every few steps}.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TextIO

import torch

from unbroken.errors import DirectoryProblem
from unbroken.state.registry import State

VARIABLE = "UNBROKEN_LEDGER"
STATE_EVERY_STEPS = 5
"""How often the digests of the whole state are taken; they read every tensor."""


class Ledger:
    """One process's file. Used by the training thread only."""

    def __init__(self, directory: Path, rank: int, world_size: int, generation: int) -> None:
        self._rank = rank
        self._world_size = world_size
        path = directory / f"rank-{rank:05d}-g{generation:04d}-{os.getpid()}.jsonl"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file: TextIO = path.open("a", encoding="utf-8")
        except OSError as error:
            raise DirectoryProblem(f"cannot write the ledger {path}: {error.strerror}; see {VARIABLE}") from error

    def write(self, step: int, loss: Any, samples: list[Any] | None, state: State) -> None:
        """Append the line of one step. Reads `loss` (waits for its device) and the state; changes neither."""
        line: dict[str, Any] = {
            "step": step,
            "rank": self._rank,
            "world": self._world_size,
            "loss": None if loss is None else _number(loss).hex(),
            "samples": samples,
            "rng": state.rng_digest(),
        }
        if step % STATE_EVERY_STEPS == 0:
            line["state"] = state.digests()
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _number(loss: Any) -> float:
    return float(loss.detach() if isinstance(loss, torch.Tensor) else loss)


def open_ledger(rank: int, world_size: int, generation: int) -> Ledger | None:
    """The ledger of this process, if the environment asks for one. Raises DirectoryProblem."""
    directory = os.environ.get(VARIABLE)
    return Ledger(Path(directory), rank, world_size, generation) if directory else None
