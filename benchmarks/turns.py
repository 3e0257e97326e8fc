"""Peers by turns in one process, on one model: what a save takes from the loop, and how long a load takes.

The speed of a machine changes from minute to minute by more than a save takes. Here every round has one stretch of each
peer and one without a save, in an order drawn anew, and the differences within rounds count. So few peers, many rounds:

    python benchmarks/turns.py --peer unbroken --peer torch_checkpointing --rounds 40
    python benchmarks/turns.py --peer raw --peer safetensors --peer unbroken --rounds 0 --loads 30 --json

stall  milliseconds that the loop stands still for one save: the call, and how much longer the next optimizer step takes
added  milliseconds by which a stretch with a save is longer than the one without in the same round
cold, warm  milliseconds to load, with the files out of the page cache and in it

Medians; in brackets the middle half.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from peers import PEERS, Nothing, Peer
from saving import Loop, build, drop_from_cache

COLUMNS = ("stall", "added", "cold", "warm")


def main() -> None:
    """Run the peers that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=PEERS, action="append", required=True, help="may be repeated")
    parser.add_argument("--mb", type=int, default=604, help="megabytes of weights and moments")
    parser.add_argument("--small", action="store_true", help="20,000 tensors of 4 KB instead")
    parser.add_argument("--step-s", type=float, default=0.5, help="seconds a step takes")
    parser.add_argument("--every", type=int, default=6, help="steps of a stretch")
    parser.add_argument("--rounds", type=int, default=20, help="stretches of each peer")
    parser.add_argument("--loads", type=int, default=10, help="loads of each peer, cold and warm")
    parser.add_argument("--dir", default=".", help="where to write; the disk that is measured")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    print(f"{'':22} {' '.join(f'{title:>19} ms' for title in COLUMNS)}")
    for name, row in measure(arguments).items():
        if arguments.json:
            print(json.dumps({"peer": name, **row}))
        else:
            print(f"{name:22} {' '.join(f'{_spread(row.get(title, [])):>22}' for title in COLUMNS)}")


def measure(arguments: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Every single figure, in milliseconds, by peer and column."""
    torch.set_num_threads(1)
    model = build(arguments.mb, arguments.small)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    loop = Loop(model, optimizer, 8)
    loop.rows_for(arguments.step_s)
    directory = Path(tempfile.mkdtemp(dir=arguments.dir))
    peers: dict[str, Peer] = {}
    try:
        for name in dict.fromkeys(arguments.peer):
            (directory / name).mkdir()
            peers[name] = PEERS[name](directory / name, model, optimizer)
            _warm(peers[name], loop)
        found: dict[str, dict[str, list[float]]] = {name: {} for name in peers}
        for round_ in range(arguments.rounds):
            _stretches(peers, loop, arguments.every, 10 + round_, found)
        for _ in range(arguments.loads):
            for name in random.sample(list(peers), len(peers)):
                for kind in ("cold", "warm"):  # what is loaded cold is warm afterwards
                    found[name].setdefault(kind, []).append(1000 * _load(peers[name], loop, kind))
        return found
    finally:
        for peer in peers.values():
            peer.close()
        shutil.rmtree(directory)


def _warm(peer: Peer, loop: Loop) -> None:
    """Arenas, processes, the rehearsal of an overlapped snapshot."""
    loop.lock = peer.lock
    for step in range(3):
        peer.prepare()
        peer.save(step)
        loop.step()
        peer.finish()


def _stretches(peers: dict[str, Peer], loop: Loop, every: int, step: int, found: dict[str, Any]) -> None:
    """One round."""
    taken: dict[str, float] = {}
    nothing = Nothing(Path(), loop.model, loop.optimizer)
    for name, peer in random.sample([*peers.items(), ("", nothing)], len(peers) + 1):
        loop.lock = peer.lock
        peer.prepare()
        began = time.perf_counter()
        peer.save(step)
        call = time.perf_counter() - began
        for _ in range(every):
            loop.step()
        taken[name] = time.perf_counter() - began
        peer.finish()
        steps = loop.optimizer_s[-every:]
        if name:
            more = max(0.0, steps[0] - statistics.median(steps[1:]))
            found[name].setdefault("stall", []).append(1000 * (call + more))
    for name in peers:
        found[name].setdefault("added", []).append(1000 * (taken[name] - taken[""]))


def _load(peer: Peer, loop: Loop, kind: str) -> float:
    loop.optimizer.zero_grad()  # a job that starts again has no gradients
    with torch.no_grad():
        for parameter in loop.model.parameters():
            parameter.zero_()
    if kind == "cold":
        drop_from_cache(peer.directory)
    began = time.perf_counter()
    peer.load()
    return time.perf_counter() - began


def _spread(figures: list[float]) -> str:
    if not figures:
        return ""
    if len(figures) < 4:
        return f"{statistics.median(figures):.0f}"
    low, middle, high = statistics.quantiles(figures, n=4, method="inclusive")
    return f"{middle:.1f} ({low:.0f} to {high:.0f})"


if __name__ == "__main__":
    main()
