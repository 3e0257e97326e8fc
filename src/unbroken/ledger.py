"""The ledger: one line per step and rank, from which a proof compares runs.

Written only if UNBROKEN_LEDGER names a directory. Every process appends to a file of its own, one flushed JSON line
per optimizer step, so that a killed process loses at most a torn last line. The line is a public contract:
{"step", "rank", "world", "loss": float.hex() or null, "samples": ids or digests, "rng": digest, "state": {part: digest}
every few steps}. Beside it lies a file of events, of the same name with `.events`: the digests of the state at each
save and right after each restore, which tell what a restore did not bring back.

The digests also cover what the script did not register but coverage.py finds: a proof names what was forgotten.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TextIO

import torch

from unbroken.coverage.coverage import Uncovered, find_uncovered
from unbroken.data.observe import drain_batches, observe_loaders
from unbroken.errors import DirectoryProblem, UnbrokenError
from unbroken.state.registry import State

log = logging.getLogger(__name__)

VARIABLE = "UNBROKEN_LEDGER"
STATE_EVERY_STEPS = 5
"""How often the digests of a large state are taken; they read every tensor."""
SMALL_BYTES = 64 << 20
"""The digests of a state up to this size are in every line."""
_FOUND = "not-registered."


class Ledger:
    """One process's files. Used by the training thread only."""

    def __init__(
        self, directory: Path, rank: int, world_size: int, generation: int, state: State, objects: Mapping[str, object]
    ) -> None:
        """Open the files. `objects` are those that the user registered, and `state` is made of."""
        self._rank = rank
        self._world_size = world_size
        self._objects = dict(objects)
        self._state = state
        self._found: list[Uncovered] = []
        self._looks = 2  # objects that are made after the restore are found at the first step
        path = directory / f"rank-{rank:05d}-g{generation:04d}-{os.getpid()}.jsonl"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file: TextIO = path.open("a", encoding="utf-8")
            self._events: TextIO = path.with_suffix(".events").open("a", encoding="utf-8")
        except OSError as error:
            raise DirectoryProblem(f"cannot write the ledger {path}: {error.strerror}; see {VARIABLE}") from error

    def write(self, step: int, loss: Any) -> None:
        """Append the line of one step. Reads `loss` (waits for its device) and the state; changes neither."""
        self._look_around()
        line: dict[str, Any] = {
            "step": step,
            "rank": self._rank,
            "world": self._world_size,
            "loss": None if loss is None else _number(loss).hex(),
            "samples": self._samples(),
            "rng": self._state.rng_digest(),
            "generators": self._state.generator_digests(),
        }
        if step % STATE_EVERY_STEPS == 0 or self._state.nbytes() <= SMALL_BYTES:
            line["state"] = self._digests(accumulating=False)
        _append(self._file, line)

    def note(self, event: Literal["saved", "restored"], step: int, micro_step: int) -> None:
        """Append what the state is now, at a save or right after a restore."""
        self._look_around()
        state = self._digests(accumulating=micro_step > 0)
        line = {"event": event, "step": step, "micro_step": micro_step, "rank": self._rank, "state": state}
        _append(self._events, line)

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        self._events.close()

    def _look_around(self) -> None:
        """Find what is not registered; a few times, since it walks through every object of the process."""
        if not self._looks:
            return
        self._looks -= 1
        for item in find_uncovered(self._objects):
            if not any(item.value is known.value for known in self._found) and self._can_be_digested(item):
                self._found.append(item)

    def _can_be_digested(self, item: Uncovered) -> bool:
        try:
            State({**self._objects, _key(item): item.value}).digests()
        except UnbrokenError as error:
            log.debug("the ledger leaves out %s: %s", item, error)
            return False
        return True

    def _digests(self, *, accumulating: bool) -> dict[str, str]:
        digests = self._state.digests(accumulating=accumulating)
        if self._found:
            # Beside the registered objects, since an optimizer's parameters are named after their module's.
            every = State({**self._objects, **{_key(item): item.value for item in self._found}}).digests()
            digests |= {f"unregistered {item}": every[_key(item)] for item in self._found}
        return digests

    def _samples(self) -> list[Any] | None:
        """Ids from resumable loaders, registered or not; without one, digests of whatever loaders gave."""
        batches = drain_batches()
        values = [*self._objects.values(), *(item.value for item in self._found)]
        loaders: list[Any] = [value for value in values if hasattr(value, "drain_samples")]
        if loaders:
            return [sample for loader in loaders for sample in loader.drain_samples()]
        return batches or None


def _key(item: Uncovered) -> str:
    return _FOUND + "".join(char if char.isascii() and char.isalnum() else "-" for char in item.name)


def _append(file: TextIO, line: dict[str, Any]) -> None:
    file.write(json.dumps(line) + "\n")
    file.flush()


def _number(loss: Any) -> float:
    return float(loss.detach() if isinstance(loss, torch.Tensor) else loss)


def expect_ledger() -> None:
    """Prepare for a ledger, if the environment asks for one: before the script makes its loaders' iterators."""
    if os.environ.get(VARIABLE):
        observe_loaders()


def open_ledger(
    rank: int, world_size: int, generation: int, state: State, objects: Mapping[str, object]
) -> Ledger | None:
    """The ledger of this process, if the environment asks for one. Raises DirectoryProblem."""
    directory = os.environ.get(VARIABLE)
    return Ledger(Path(directory), rank, world_size, generation, state, objects) if directory else None
