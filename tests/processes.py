"""Ranks as long-lived processes: many cases run in one group of them, each case with a process group of its own.

A case is a module-level function `case(rank, world_size, *args)`, named by `module:function` so that the processes can
import it. What it returns comes back by rank; an exception comes back as `Raised(class name, text)`.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import tempfile
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

GROUP_TIMEOUT_S = 30
CASE_DEADLINE_S = 120


@dataclass(frozen=True)
class Raised:
    """An exception of a case, as it crossed from another process."""

    kind: str
    text: str
    trace: str


class Ranks:
    """Up to `most` processes that run cases together."""

    def __init__(self, most: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(most):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank), daemon=True)
            process.start()
            self._ends.append(ours)
            self._processes.append(process)

    def run(self, case: str, world_size: int, *args: Any) -> list[Any]:
        """Results by rank. Fails the test if a rank does not answer in time."""
        with tempfile.TemporaryDirectory() as directory:
            for end in self._ends[:world_size]:
                end.send((case, world_size, f"{directory}/store", args))
            results = []
            for rank, end in enumerate(self._ends[:world_size]):
                assert end.poll(CASE_DEADLINE_S), f"rank {rank} hangs in {case}"
                results.append(end.recv())
            return results

    def run_all_well(self, case: str, world_size: int, *args: Any) -> list[Any]:
        """The same, for cases in which no rank may raise."""
        results = self.run(case, world_size, *args)
        for rank, result in enumerate(results):
            assert not isinstance(result, Raised), f"rank {rank}: {result.trace}"
        return results

    def stop(self) -> None:
        """End the processes."""
        for end in self._ends:
            end.send(None)
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()


def _serve(end: Connection, rank: int) -> None:
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    import torch._dynamo  # noqa: F401  # as in conftest
    import torch.distributed as dist

    gc.collect()
    gc.freeze()
    while (order := end.recv()) is not None:
        case, world_size, store, args = order
        module, _, function = case.partition(":")
        if world_size > 1:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, world_size),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=GROUP_TIMEOUT_S),
            )
        try:
            result = getattr(importlib.import_module(module), function)(rank, world_size, *args)
        except BaseException as error:
            result = Raised(type(error).__name__, str(error), traceback.format_exc())
        end.send(result)
        if world_size > 1:
            dist.destroy_process_group()


def exists(path: str | Path) -> bool:
    """True if something lies at `path`; for use inside cases."""
    return Path(path).exists()
