"""What saving a model on one CUDA GPU costs: how long the loop stands still, until it is durable, and loading it back.

A billion parameters: fp32 weights and AdamW's fp32 moments (12 GB), computed with in bf16 by autocast; a save every 10
steps. Each peer runs in a process of its own and has a deadline, so that all of it takes under six minutes.

    benchmarks/gpu.sh                              # the tests on the GPU, then this table
    python benchmarks/gpu.py --params 1e8          # smaller
    python benchmarks/gpu.py --params 1e6 --device cpu   # whether the script runs

stall    seconds that a step takes longer if a save comes before it
added    wall time that saving adds to `--every` steps, percent
durable  seconds from the call until the save is durable
cold, warm  seconds to load onto the device, with the files out of the page cache and in it
same     whether the sums of what was loaded equal those of what was saved
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar

import torch
from peers import PEERS, Unbroken
from saving import drop_from_cache
from torch import nn

import unbroken

WIDTH = 4096
MOST_ROWS = 1 << 14
"""So that activations stay under 10 GB."""
NAMES = ("torch.save", "dcp async thread", "unbroken block", "unbroken")
COLUMNS = (("step", 7), ("stall", 8), ("added", 8), ("durable", 9), ("cold", 7), ("warm", 7))


class OneKept(Unbroken):
    """This library, with one checkpoint kept: the disk may be small."""

    options: ClassVar[dict[str, Any]] = {"keep": unbroken.Keep(last=1)}


class OneKeptBlock(Unbroken):
    """The same with the loop standing still."""

    options: ClassVar[dict[str, Any]] = {"keep": unbroken.Keep(last=1), "snapshot": "block"}


OURS = {"unbroken": OneKept, "unbroken block": OneKeptBlock}


class Loop:
    """A training loop on the device."""

    def __init__(self, params: float, device: str) -> None:
        torch.manual_seed(0)
        width = WIDTH if params >= 1e8 else 64
        layers = max(1, round(params / (width * (width + 1))))
        self.device = device
        self.model = nn.Sequential(*(nn.Linear(width, width, device=device) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-5, fused=True)
        self.batch = torch.randn(64, width, device=device)

    def step(self) -> None:
        """Enqueue one step."""
        self.optimizer.zero_grad()
        with torch.autocast(self.device, torch.bfloat16):
            loss = self.model(self.batch).float().square().mean()
        loss.backward()
        self.optimizer.step()

    def sync(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def timed(self, steps: int) -> float:
        """Seconds that so many steps take."""
        self.sync()
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.sync()
        return time.perf_counter() - began

    def rows_for(self, step_s: float) -> None:
        """Make a step take about so long: the time of a small batch is the optimizer's, the rest grows with rows."""
        self.timed(2)
        small = self.timed(2) / 2
        width, rows = self.batch.shape[1], 4096
        self.batch = torch.randn(rows, width, device=self.device)
        self.timed(1)
        per_row = max(1e-9, (self.timed(2) / 2 - small) / rows)
        rows = min(MOST_ROWS, max(64, round((step_s - small) / per_row)))
        self.batch = torch.randn(rows, width, device=self.device)
        self.timed(2)

    def sums(self) -> list[int]:
        """Of the bits of all weights and moments."""
        state = [item for parameter in self.model.parameters() for item in self.optimizer.state[parameter].values()]
        words = [tensor.detach().view(torch.int32) for tensor in (*self.model.parameters(), *state)]
        return [int(word.sum(dtype=torch.int64)) for word in words]


def forget_older(directory: Path, newest: Path) -> None:
    """Remove what peers that keep everything have saved before."""
    for path in directory.iterdir():
        if path != newest and newest != directory:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One peer, in this process."""
    loop = Loop(arguments.params, arguments.device)
    loop.rows_for(arguments.step_s)
    directory = Path(arguments.dir)
    peer = OURS.get(name, PEERS[name])(directory, loop.model, loop.optimizer)
    for step in range(3 if name in OURS else 1):  # warm: the rehearsal, arenas, their pinning
        peer.save(step)
        loop.step()
        peer.finish()
    forget_older(directory, peer.newest)
    plain, stalls, saving, durable = loop.timed(arguments.every), [], [], []
    for round_ in range(arguments.rounds):
        loop.sync()
        began = time.perf_counter()
        peer.save(10 + round_)
        loop.step()
        loop.sync()
        first = time.perf_counter() - began
        stalls.append(first - plain / arguments.every)
        saving.append(first + loop.timed(arguments.every - 1))
        peer.finish()
        durable.append(time.perf_counter() - began)
        forget_older(directory, peer.newest)
    loop.sync()
    began = time.perf_counter()
    peer.save(1000)
    peer.finish()
    found: dict[str, Any] = {
        "step": plain / arguments.every,
        "stall": statistics.median(stalls),
        "added": 100 * (statistics.median(saving) / plain - 1),
        "durable": time.perf_counter() - began,
    }
    found |= load(peer, loop, directory)
    peer.close()
    return found


def load(peer: Any, loop: Loop, directory: Path) -> dict[str, Any]:
    """Warm and cold, and whether all came back."""
    expected = loop.sums()
    found: dict[str, Any] = {"same": True}
    for kind in ("warm", "cold"):
        with torch.no_grad():
            for parameter in loop.model.parameters():
                parameter.zero_()
        if kind == "cold":
            drop_from_cache(directory)
        loop.sync()
        began = time.perf_counter()
        peer.load()
        loop.sync()
        found[kind] = time.perf_counter() - began
        found["same"] &= loop.sums() == expected
    return found


def main() -> None:
    """Run all peers, or one here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=NAMES, action="append", help="only these; may be repeated")
    parser.add_argument("--params", type=float, default=1e9, help="parameters of the model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--step-s", type=float, default=0.5, help="seconds a step takes, about")
    parser.add_argument("--every", type=int, default=10, help="steps between saves")
    parser.add_argument("--rounds", type=int, default=2, help="saves that are measured")
    parser.add_argument("--dir", default=".", help="where to write; the disk that is measured")
    parser.add_argument("--deadline-s", type=float, default=80, help="for one peer")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        print(json.dumps(measure(arguments.peer[-1], arguments)))
        return
    if arguments.device == "cuda":
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {arguments.params:.0e} parameters")
    print(f"{'':18} {' '.join(f'{name:>{width}}' for name, width in COLUMNS)}  same")
    for name in arguments.peer or NAMES:
        with tempfile.TemporaryDirectory(dir=arguments.dir) as directory:  # made here: a peer may be killed
            command = [sys.executable, __file__, *sys.argv[1:], "--here", "--peer", name, "--dir", directory]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=arguments.deadline_s)
            except subprocess.TimeoutExpired:
                print(f"{name:18} not done after {arguments.deadline_s:g} s", flush=True)
                continue
        if done.returncode:
            print(f"{name:18} failed: {done.stderr.strip().splitlines()[-1]}", flush=True)
            continue
        row = json.loads(done.stdout.splitlines()[-1])
        print(f"{name:18} {' '.join(f'{row[key]:{width}.3f}' for key, width in COLUMNS)}  {row['same']}", flush=True)


if __name__ == "__main__":
    main()
