"""Plays one rank of a training job without importing torch; started under torchrun by the tests of `prove`.

A run is a chain of numbers: each step draws from a generator, reads the next sample, moves a weight with momentum.
It keeps a ledger as `unbroken` does and checkpoints of its own. `--forget` leaves out one part of the state at
restore, `--hang` stops for ever once it has restored, `--fail` raises then: what `prove` must find.
"""

import argparse
import hashlib
import json
import os
import random
import threading
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=24)
parser.add_argument("--every", type=int, default=4)
parser.add_argument("--forget", choices=["samples", "rng", "optimizer"])
parser.add_argument("--hang", action="store_true")
parser.add_argument("--fail", action="store_true")
parser.add_argument("--drift", action="store_true", help="the last step depends on the time")
parser.add_argument("--broken", action="store_true", help="fail at once, undisturbed too")
parser.add_argument("--no-ledger", action="store_true")
parser.add_argument("--silent", action="store_true", help="print neither `restored` nor `final`")
args = parser.parse_args()

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
run = Path(os.environ["UNBROKEN_RUN_DIR"])


def digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def newest_common_step() -> int:
    """The newest step that every rank has saved; 0 if there is none."""
    saved = [{int(path.stem) for path in (run / f"rank-{each}").glob("*.json")} for each in range(world)]
    return max(set.intersection(*saved), default=0)


if args.broken:
    raise RuntimeError("broken from the start")
rng = random.Random(rank)
state = {"step": 0, "cursor": 0, "weight": 1.0, "momentum": 0.0}
restored = newest_common_step()
if restored:
    saved = json.loads((run / f"rank-{rank}" / f"{restored}.json").read_text())
    kind, words, gauss = saved.pop("rng")
    if args.forget != "rng":
        rng.setstate((kind, tuple(words), gauss))
    state = saved | ({"cursor": 0} if args.forget == "samples" else {})
    state |= {"momentum": 0.0} if args.forget == "optimizer" else {}
    if not args.silent and rank == 0:
        print(f"restored step {restored} from {run}", flush=True)
    if args.hang:
        threading.Event().wait()
    if args.fail:
        raise RuntimeError("cannot go on from here")

directory = run / f"rank-{rank}"
directory.mkdir(parents=True, exist_ok=True)
ledger = None
if not args.no_ledger:
    path = Path(os.environ["UNBROKEN_LEDGER"]) / f"rank-{rank:05d}-g0001-{os.getpid()}.jsonl"
    ledger = path.open("a", encoding="utf-8")
while state["step"] < args.steps:
    time.sleep(0.02)  # a step takes its time, so that there is something to strike
    state["step"] += 1
    state["cursor"] += 1
    state["momentum"] = 0.9 * state["momentum"] + rng.random() * state["cursor"]
    state["weight"] -= 0.01 * state["momentum"]
    if args.drift and state["step"] == args.steps:
        state["weight"] += time.time()
    step = state["step"]
    if ledger:
        line = {"step": step, "rank": rank, "world": world, "samples": [state["cursor"]], "rng": digest(rng.getstate())}
        line["loss"] = (state["weight"] ** 2).hex()
        if step % 5 == 0:
            line["state"] = {"model": digest(state["weight"]), "optimizer": digest(state["momentum"])}
        ledger.write(json.dumps(line) + "\n")
        ledger.flush()
    if step % args.every == 0:
        temporary = directory / f"{step}.tmp"
        temporary.write_text(json.dumps({**state, "rng": rng.getstate()}))
        temporary.rename(directory / f"{step}.json")
if rank == 0 and not args.silent:
    final = f"final {hashlib.sha256(repr(state['weight']).encode()).hexdigest()}"
    print(final, flush=True)
    (run / "final.txt").write_text(final + "\n")
