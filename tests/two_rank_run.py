"""A run directory of two ranks with several generations, made by the library with ranks as threads.

Generation 1 saves steps 1, 2, 3; generation 2 goes on from step 2, so that it moves the manifest of step 3 aside, and
saves 3 and 4; generation 3 goes on from step 4 and saves 5.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch

from ranks import clusters, on_all, replica
from unbroken.commit import SaveId
from unbroken.manifest import Manifest, decode
from unbroken.policy import Settings
from unbroken.recovery import Recovered, restore_together
from unbroken.session import Session
from unbroken.state.captured import Captured
from unbroken.state.registry import State
from unbroken.store.local import LocalStore

WORLD = 2
ROWS = 140
"""Of 2,000 floats: a little more than what is divided among ranks."""
PLAN = [(None, (1, 2, 3)), (2, (3, 4)), (4, (5,))]
"""For each generation: the step it goes on from, and those it saves."""
SHARED = ("weights", "moment")

Content = dict[str, Any]
"""What one rank holds: bytes of its tensors, and its values."""


class Box:
    """Keeps whatever state it is given."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def objects(rank: int, step: int, generation: int) -> dict[str, Any]:
    """The live objects of a rank; all of them differ by step and generation, `own` and `box` by rank too."""
    source = torch.Generator().manual_seed(1000 * generation + step)
    return {
        "weights": torch.randn(ROWS, 2000, generator=source),
        "moment": torch.randn(7, generator=source).to(torch.bfloat16),
        "own": torch.randint(0, 1 << 60, (5,), generator=source) + rank,
        "box": Box({"rank": rank, "loss": 0.1 * step, "history": (step, generation), "nan": float("nan")}),
    }


def fresh() -> dict[str, Any]:
    """The objects of a rank that has just been started."""
    return {
        "weights": torch.zeros(ROWS, 2000),
        "moment": torch.zeros(7, dtype=torch.bfloat16),
        "own": torch.zeros(5, dtype=torch.int64),
        "box": Box(),
    }


def content(live: dict[str, Any]) -> Content:
    """Comparable by ==, bit for bit."""
    tensors = {name: value.view(torch.uint8).numpy().tobytes() for name, value in live.items() if name != "box"}
    return {**tensors, "box": repr(live["box"].state)}


def capture(rank: int, step: int, generation: int) -> Captured:
    captured = State(objects(rank, step, generation)).capture(accumulating=False)
    for name in SHARED:  # as under DDP
        captured.tensors[name] = replica(captured.tensors[name].tensor, 2)
    return captured


def make_run(root: Path) -> dict[tuple[int, int], list[Content]]:
    """Write the run; what each rank must find, by generation and step."""
    root.mkdir(parents=True)
    saved: dict[tuple[int, int], list[Content]] = {}
    for generation, (origin, steps) in enumerate(PLAN, start=1):
        restored = None
        if origin is not None:
            data = (root / f"step-{origin}/manifest.json").read_bytes()
            restored = decode(data, "")
        ranks = start_ranks(root, restored)
        for step in steps:
            on_all(ranks, lambda session: _save(session, step, generation))  # noqa: B023  # done before the next
            saved[generation, step] = [content(objects(rank, step, generation)) for rank in range(WORLD)]
        on_all(ranks, lambda session: session.close(abandon=False))
    return saved


def start_ranks(root: Path, restored: Manifest | None) -> list[Session]:
    settings = Settings(None, 20, 20)
    ranks = [
        Session(c, c.channel("t", threading.Event()), LocalStore(root), settings, {}, threading.Event())
        for c in clusters(WORLD)
    ]
    for result in on_all(ranks, lambda session: session.begin(restored, restored.step if restored else 0)):
        assert not isinstance(result, Exception), result
    return ranks


def _save(session: Session, step: int, generation: int) -> None:
    session.save(SaveId(step, 0, 0), capture(session.cluster.rank, step, generation))
    assert session.wait()
    assert session.outcomes.popleft().committed


def restore(root: Path) -> tuple[Recovered, list[Content]] | Exception:
    """What two ranks restore together, and what each then holds; or what rank 0 raised."""
    channels = [cluster.channel("t", threading.Event()) for cluster in clusters(WORLD)]
    live = [fresh() for _ in range(WORLD)]

    def act(channel: Any) -> Recovered:
        return restore_together(channel, LocalStore(root), State(live[channel.rank]), 20, 20, strict=True)

    first, second = on_all(channels, act)
    if isinstance(first, Exception):
        assert isinstance(second, Exception), "one rank goes on and the other does not"
        return first
    assert isinstance(second, Recovered) and second.directory == first.directory
    return first, [content(of_rank) for of_rank in live]
