"""What a run does between two crashes: sessions with ranks as threads, and saves of a small state that is known.

The same code as a job's: agree on the directory, restore, begin a generation, save, sweep. The state is tiny, so that
every crash state can be tried, and is a function of rank and step, so that what is restored can be compared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from crash.recorder import Recorder, RecordingStore
from ranks import on_all, replica
from unbroken.cluster import Cluster
from unbroken.commit import Outcome, SaveId
from unbroken.directory import agree_on_directory
from unbroken.policy import Keep, Settings
from unbroken.recovery import Recovered, restore_together
from unbroken.session import Session
from unbroken.state.captured import Captured, LiveTensor, Restoration, SavedTensors
from unbroken.store.local import LocalStore

RUN = "runs/small"
"""The run directory inside the one that is recorded: two levels that `Checkpointer` may have to make."""
DEADLINE_S = 20.0


def state_of(rank: int, step: int, world_size: int) -> Captured:
    """What `rank` saves at `step`: something all ranks share, something of its own, values."""
    shared = torch.arange(6.0) * (step + 1)
    own = torch.full((3,), 16 * rank + step, dtype=torch.uint8)
    values = {
        "scheduler": {"kind": "object", "state": {"last_epoch": step}},
        "own": {"kind": "object", "state": {"of_rank": rank}},
    }
    captured = Captured(values=values)
    captured.tensors["model/w"] = replica(shared, world_size)
    captured.tensors["rng/torch"] = LiveTensor(own)
    return captured


@dataclass
class Live:
    """The live state of one rank that restores: it takes whatever is saved, so that all of it can be compared."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def prepare(self, tensors: SavedTensors, values: Any, *, strict: bool, seed: int | None = None) -> Restoration:
        """Room for everything that was saved."""
        assert strict
        self.tensors = {name: torch.zeros(saved.shape, dtype=saved.dtype) for name, saved in tensors.items()}
        self.values = dict(values)
        return Restoration(self.tensors, {}, lambda: None)

    def equals(self, captured: Captured) -> bool:
        """True if it holds, bit for bit, what was captured."""
        return (
            self.values == captured.values
            and self.tensors.keys() == captured.tensors.keys()
            and all(torch.equal(self.tensors[name], live.tensor) for name, live in captured.tensors.items())
        )


@dataclass
class Job:
    """One start of the job, on ranks that are threads."""

    sessions: list[Session]
    restored: Recovered
    live: list[Live]

    def save(self, step: int, attempt: int = 0) -> Outcome:
        """Save `step` on all ranks and wait for the outcome."""

        def act(session: Session) -> Outcome:
            session.save(SaveId(step, 0, attempt), state_of(session.cluster.rank, step, session.cluster.world_size))
            assert session.wait()
            return session.outcomes.popleft()

        return _all_well(on_all(self.sessions, act))[0]

    def close(self) -> None:
        """Finish what is in flight, the sweep too, and end all threads."""
        _all_well(on_all(self.sessions, lambda session: session.close(abandon=False)))


def start(
    root: Path,
    world_size: int,
    keep: Keep | None = None,
    recorder: Recorder | None = None,
    store: Callable[[Path], LocalStore] = LocalStore,
) -> Job:
    """Start the job in `root`: restore what is there, and begin a generation. Raises what `restore()` would."""
    control = RecordingStore(recorder) if recorder is not None else dist.HashStore()

    def act(rank: int) -> tuple[Session, Recovered, Live]:
        cluster = Cluster(rank, world_size, control)
        channel = cluster.channel("crash", threading.Event())
        agree_on_directory(channel, root, DEADLINE_S)
        session = Session(cluster, channel, store(root), Settings(keep, DEADLINE_S, DEADLINE_S), {}, threading.Event())
        live = Live()
        recovered = restore_together(channel, session.store, live, DEADLINE_S, DEADLINE_S, True)  # type: ignore[arg-type]
        session.begin(recovered.manifest, recovered.manifest.step if recovered.manifest else 0)
        return session, recovered, live

    started = _all_well(on_all(list(range(world_size)), act))
    sessions, recovered, live = zip(*started, strict=True)
    return Job(list(sessions), recovered[0], list(live))


def _all_well(results: list[Any]) -> list[Any]:
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results
