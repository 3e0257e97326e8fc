"""Wall time that saving adds when it goes on and on: a save every 1, 10 and 100 steps, this library beside its peers.

Unlike in saving.py nothing waits for a save to be durable before training goes on: a peer that cannot keep up holds the
loop up at its next save. Stretches with and without saves take turns; 604 MB of weights and moments, one process.

    python benchmarks/cadence.py --peer unbroken --peer dcp

added  wall time that saving adds, percent, by the median of the stretches; the last save's end is not waited for
call   seconds that one save's call takes, median
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
from typing import Any

import torch
from peers import PEERS, Peer
from saving import Loop, build

STRETCHES = {1: (8, 4), 10: (20, 4), 100: (100, 2)}
"""Steps between saves -> steps of a stretch, and how many stretches of each kind."""


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One peer, in this process."""
    torch.set_num_threads(1)
    model = build(604, small=False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    loop = Loop(model, optimizer, 8)
    loop.rows_for(arguments.step_s)
    directory = Path(tempfile.mkdtemp(dir=arguments.dir))
    try:
        peer = PEERS[name](directory, model, optimizer)
        loop.lock = peer.lock
        for step in range(3):  # warm, as in saving.py
            peer.save(step)
            loop.step()
            peer.finish()
        found = {f"every {every}": added(peer, loop, every, directory) for every in arguments.every}
        peer.close()
        return found
    finally:
        shutil.rmtree(directory)


def added(peer: Peer, loop: Loop, every: int, directory: Path) -> dict[str, float]:
    """Stretches with a save each `every` steps beside those without, by turns."""
    steps, stretches = STRETCHES[every]
    plain, saving, calls = [], [], []
    for stretch in range(stretches):
        began = time.perf_counter()
        for _ in range(steps):
            loop.step()
        plain.append(time.perf_counter() - began)
        began = time.perf_counter()
        for step in range(steps):
            if step % every == 0:
                called = time.perf_counter()
                peer.save(1000 * every + stretch * steps + step)
                calls.append(time.perf_counter() - called)
            loop.step()
        saving.append(time.perf_counter() - began)
        peer.finish()
        forget_old(peer, directory)
    return {
        "added": 100 * (statistics.median(saving) / statistics.median(plain) - 1),
        "call": statistics.median(calls),
    }


def forget_old(peer: Peer, directory: Path) -> None:
    """Give the disk back; peers without retention would fill it."""
    for path in directory.iterdir():
        if path != peer.newest and path.name[0].isdigit():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def main() -> None:
    """Run all peers, or one here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=PEERS, action="append", help="only these; may be repeated")
    parser.add_argument("--every", type=int, choices=STRETCHES, action="append", help="only these; may be repeated")
    parser.add_argument("--step-s", type=float, default=0.5, help="seconds a step takes")
    parser.add_argument("--dir", default=".", help="where to write; the disk that is measured")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.every = arguments.every or list(STRETCHES)
    if arguments.here:
        print(json.dumps(measure(arguments.peer[-1], arguments)))
        return
    for name in arguments.peer or [name for name, peer in PEERS.items() if peer.is_there() and name != "raw"]:
        command = [sys.executable, __file__, "--here", *sys.argv[1:], "--peer", name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
        if done.returncode:
            print(f"{name:20} failed: {done.stderr.strip().splitlines()[-1]}")
            continue
        row = json.loads(done.stdout.splitlines()[-1])
        cells = [f"{key}: {cell['added']:6.1f} % ({cell['call']:.3f} s)" for key, cell in row.items()]
        print(f"{name:20} {'   '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
