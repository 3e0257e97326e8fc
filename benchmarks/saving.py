"""How long a training loop stands still for a save, and what saves and loads cost: this library beside its peers.

One process trains a model of `--mb` megabytes of weights and moments (AdamW) and saves every few steps. Each peer runs
in a process of its own, one after another, for several rounds, so that all see the same machine.

    python benchmarks/saving.py                        # the table of docs/benchmarks.md
    python benchmarks/saving.py --peer unbroken --json
    python benchmarks/saving.py --small                # 20,000 tensors of 4 KB

call     seconds until the call returns
stall    seconds that the loop stands still for one save: the call, and how much longer the next optimizer step takes
added    wall time that saving adds to the loop, percent: rounds with a save beside rounds without one, by turns
durable  seconds from the call until the save is durable
cold, warm  seconds to load, with the files out of the page cache and in it
size     megabytes of one save on the disk
peak     megabytes of this process beyond those of the model and its optimizer, until the last save
same     whether what was loaded equals what was saved, bit for bit
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from peers import PEERS, sync
from torch import nn


def build(megabytes: int, small: bool) -> nn.Module:
    """A model whose weights and two moments have about that size; or of 6,667 weights of 4 KB."""
    torch.manual_seed(0)
    if small:
        return nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(6667)))
    layers = max(1, round(megabytes * 1e6 / (3 * 4 * 1024 * 1025)))
    return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(layers)))


def drop_from_cache(directory: Path) -> None:
    """Let the kernel forget all files of a directory."""
    sync(directory)
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All weights and state, copied."""
    state = [tensor for parameter in model.parameters() for tensor in optimizer.state[parameter].values()]
    return [tensor.detach().clone() for tensor in [*model.parameters(), *state]]


class Loop:
    """A training loop that measures itself."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, rows: int) -> None:
        self.model, self.optimizer = model, optimizer
        self.batch = torch.randn(rows, model[0].in_features)  # type: ignore[index,arg-type]
        self.optimizer_s: list[float] = []
        self.lock: Callable[[], AbstractContextManager[Any]] = nullcontext

    def step(self) -> None:
        """One optimizer step."""
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        began = time.perf_counter()
        with self.lock():
            self.optimizer.step()
        self.optimizer_s.append(time.perf_counter() - began)

    def rows_for(self, step_s: float) -> None:
        """Make steps take about so long: forward and backward take a time of their own, and more for each row."""
        few, many = 8, 64
        self._beside_optimizer(few)  # the first step makes the moments
        short, long = (min(self._beside_optimizer(rows) for _ in range(3)) for rows in (few, many))
        left = step_s - statistics.median(self.optimizer_s[-6:]) - short
        rows = max(few, round(few + left * (many - few) / max(long - short, 1e-6)))
        self.batch = torch.randn(rows, self.batch.shape[1])

    def _beside_optimizer(self, rows: int) -> float:
        """Seconds of a step without those of the optimizer."""
        self.batch = torch.randn(rows, self.batch.shape[1])
        began = time.perf_counter()
        self.step()
        return time.perf_counter() - began - self.optimizer_s[-1]


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One peer, in this process."""
    torch.set_num_threads(1)
    model = build(arguments.mb, arguments.small)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    loop = Loop(model, optimizer, 8)
    loop.rows_for(arguments.step_s)
    directory = Path(tempfile.mkdtemp(dir=arguments.dir))
    try:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peer = PEERS[name](directory, model, optimizer)
        loop.lock = peer.lock
        for step in range(3):  # warm: arenas, processes, the rehearsal of an overlapped snapshot
            peer.save(step)
            loop.step()
            peer.finish()
        plain, saving = [], []
        calls, after = [], []
        for round_ in range(arguments.rounds):
            began = time.perf_counter()
            for _ in range(arguments.every):
                loop.step()
            plain.append(time.perf_counter() - began)
            usual = statistics.median(loop.optimizer_s[-arguments.every :])
            began = time.perf_counter()
            peer.save(10 + round_)
            calls.append(time.perf_counter() - began)
            for _ in range(arguments.every):
                loop.step()
            after.append(loop.optimizer_s[-arguments.every] - usual)
            saving.append(time.perf_counter() - began)
            peer.finish()
        peer.prepare()
        began = time.perf_counter()
        peer.save(1000)
        peer.finish()
        durable = time.perf_counter() - began
        found = {
            "call": statistics.median(calls),
            "stall": statistics.median(call + max(0.0, more) for call, more in zip(calls, after, strict=True)),
            "added": 100 * (statistics.median(saving) / statistics.median(plain) - 1),
            "durable": durable,
            "peak_mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
        }
        if name != "nothing":
            found["size"] = peer.written() / 1e6
            found |= load(peer, loop, directory)
        peer.close()
        return found
    finally:
        shutil.rmtree(directory)


def load(peer: Any, loop: Loop, directory: Path) -> dict[str, Any]:
    """Warm and cold, and whether all came back."""
    expected = contents(loop.model, loop.optimizer)
    found: dict[str, Any] = {"same": True, "mb": sum(tensor.nbytes for tensor in expected) / 1e6}
    for kind in ("warm", "cold"):
        times = []
        for _ in range(3):
            loop.optimizer.zero_grad()  # a job that starts again has no gradients
            with torch.no_grad():
                for parameter in loop.model.parameters():
                    parameter.zero_()
            if kind == "cold":
                drop_from_cache(directory)
            began = time.perf_counter()
            peer.load()
            times.append(time.perf_counter() - began)
            pairs = zip(expected, contents(loop.model, loop.optimizer), strict=True)
            found["same"] &= all(torch.equal(one, other) for one, other in pairs)
        found[kind] = statistics.median(times)
    return found


def main() -> None:
    """Run all peers, or one here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=PEERS, action="append", help="only these; may be repeated")
    parser.add_argument("--mb", type=int, default=604, help="megabytes of weights and moments")
    parser.add_argument("--small", action="store_true", help="20,000 tensors of 4 KB instead")
    parser.add_argument("--step-s", type=float, default=0.5, help="seconds a step takes")
    parser.add_argument("--every", type=int, default=6, help="steps between saves")
    parser.add_argument("--rounds", type=int, default=7, help="saves that are measured")
    parser.add_argument("--dir", default=".", help="where to write; the disk that is measured")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.here:
        print(json.dumps(measure(arguments.peer[-1], arguments)))
        return
    print(f"{'':18} {' '.join(f'{title:>{width}}' for title, _, width in COLUMNS)}  same")
    for name in arguments.peer or [name for name, peer in PEERS.items() if peer.is_there()]:
        command = [sys.executable, __file__, "--here", *sys.argv[1:], "--peer", name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
        if done.returncode:
            print(f"{name:18} failed: {done.stderr.strip().splitlines()[-1]}")
            continue
        row = json.loads(done.stdout.splitlines()[-1])
        if arguments.json:
            print(json.dumps({"peer": name, **row}))
            continue
        cells = [f"{row[key]:{width}.3f}" if key in row else " " * width for _, key, width in COLUMNS]
        print(f"{name:18} {' '.join(cells)}  {row.get('same', '')}", flush=True)


COLUMNS = (
    ("call s", "call", 7),
    ("stall s", "stall", 8),
    ("added %", "added", 8),
    ("durable s", "durable", 9),
    ("cold s", "cold", 7),
    ("warm s", "warm", 7),
    ("size MB", "size", 8),
    ("peak MB", "peak_mb", 8),
)
"""Title, key in the row, width."""


if __name__ == "__main__":
    main()
