"""What lives while a job saves: its generation, its connections to the other ranks, its threads.

Opened once, by `restore()` or by the first save, and closed with the Checkpointer. The training thread calls
everything here; the threads it starts are the writer (every rank), the coordinator (rank 0) and the meetings' watcher.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from unbroken import faultpoints, generations
from unbroken.agreement import Entered
from unbroken.candidates import first_manifest
from unbroken.cluster import Channel, Cluster, connect
from unbroken.commit import Coordinator, Outcome, SaveId
from unbroken.directory import agree_on_directory
from unbroken.errors import (
    DirectoryProblem,
    HistoryExists,
    PeerFailed,
    ReplicasDiffer,
    UnbrokenError,
    UsageError,
)
from unbroken.generations import Generation
from unbroken.image.digest import digest_text
from unbroken.image.image import Arena
from unbroken.manifest import Manifest
from unbroken.meeting import Meetings
from unbroken.overlap import Copier
from unbroken.planner import Planner
from unbroken.planning import Plan
from unbroken.policy import Settings
from unbroken.replicas import digest_kept, digest_snapshot
from unbroken.snapshot import Routes, Snapshot, take
from unbroken.state.captured import Captured
from unbroken.store.local import LocalStore
from unbroken.writer import Job, Writer

log = logging.getLogger(__name__)

SMALL_BYTES = 64 << 20
"""Up to this size a rank's part is written within about a step, and the next step waits for it."""
SMALL_WAIT_S = 1.0
FAREWELL_S = 10.0
"""How long rank 0 keeps the control channel open at the end for ranks that still read an outcome from it."""


@dataclass(slots=True)
class Session:
    """One start of a job in one run directory. Used by the training thread."""

    cluster: Cluster
    channel: Channel
    store: LocalStore
    settings: Settings
    environment: dict[str, Any]
    stopped: threading.Event
    planner: Planner = field(init=False)
    generation: Generation | None = None
    outcomes: deque[Outcome] = field(default_factory=deque)
    """Filled by the writer's thread, emptied by the training thread."""
    _writer: Writer | None = None
    _coordinator: Coordinator | None = None
    meetings: Meetings | None = None
    _copier: Copier | None = None
    _routes: Routes = field(default_factory=Routes)
    _in_flight: int = 0
    _expects_saves: bool = False
    _newest_bytes: int = 0
    """Of this rank's part of the newest save."""
    _progress: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self.planner = Planner(self.channel, self.settings)

    def begin_fresh(self, step: int) -> None:
        """Begin the first generation of an empty directory. Raises HistoryExists if it holds checkpoints."""
        self.channel.decide("begin/empty", self._require_empty, self.settings.deadline_s)
        self.begin(None, step)

    def _require_empty(self) -> bytes:
        newest = first_manifest(self.store)
        if newest is not None:
            raise HistoryExists(
                f"{self.store.root} holds checkpoints up to {newest.replace('-', ' ')}, but this job did not call "
                "restore(): call it before training to go on from them, or give a new directory to start over"
            )
        return b""

    def begin(self, restored: Manifest | None, step: int) -> Generation:
        """Begin a generation that goes on from `restored`, and start the threads that serve its saves."""
        encoded = self.channel.decide(
            "begin/generation", lambda: self._create_generation(restored), self.settings.deadline_s
        )
        generation = self.generation = msgspec.json.decode(encoded, type=Generation)
        self._writer = Writer(
            self.channel,
            self.store,
            generation.number,
            self.settings.deadline_s,
            self.settings.write_deadline_s,
            self.settings.slots,
            self._finished,
        )
        self._writer.start()
        if self.settings.snapshot == "overlap":
            self._copier = Copier(self.settings.write_deadline_s)
            self._copier.start()
        if self.cluster.rank == 0:
            self._coordinator = Coordinator(
                self.channel,
                self.store,
                generation,
                self.settings.keep,
                self.environment,
                self.settings.deadline_s,
                self.settings.write_deadline_s,
            )
            self._coordinator.start()
        # A channel of its own: closing ends a meeting that nobody will come to, but not a save in flight.
        meeting_place = self.cluster.channel(self.channel.namespace, threading.Event())
        self.meetings = Meetings(meeting_place, self.settings.deadline_s)
        self.meetings.start(step)
        return generation

    @property
    def starts(self) -> int:
        """How often this run was started, this time included."""
        return self.generation.number if self.generation is not None else 0

    @property
    def age_s(self) -> float:
        """Seconds since the run's first start, as far as the directory tells; 0 if it does not."""
        try:
            first = datetime.fromisoformat(generations.read(self.store, 1).started_at)
        except (UnbrokenError, ValueError):
            return 0.0
        return max(0.0, (datetime.now(UTC) - first).total_seconds())

    def _create_generation(self, restored: Manifest | None) -> bytes:
        try:
            begun = generations.begin(self.store, restored, self.cluster.world_size)
        except OSError as error:
            raise DirectoryProblem(
                f"cannot write to {self.store.root}/{generations.DIRECTORY}: {error.strerror or error}; "
                "make it writable, make room, or give another path"
            ) from error
        if restored is not None:
            faultpoints.reach("begun")
        return msgspec.json.encode(begun)

    def save(self, save: SaveId, captured: Captured | None, error: str = "", mistake: bool = False) -> None:
        """Snapshot `captured` and let the threads do the rest. Returns when the live state may change again.

        captured  None if this rank cannot take part, for the reason `error`; the others learn it.
        mistake   True if it never can, and is about to end for that

        The outcome comes through `outcomes`. Raises PeerFailed if rank 0 is gone; at the first save ReplicasDiffer if
        ranks use one name for several things, UsageError if another rank cannot store what it registered.
        """
        assert self._writer is not None, "begin comes first"
        faultpoints.saving(save.step)
        if self._copier is not None:
            self._copier.finish()
        faultpoints.reach("entered")
        self._expects_saves = True  # what this one needs is known better
        arena = self._writer.take_arena(self.settings.write_deadline_s) if captured is not None else None
        if captured is not None and arena is None:
            error = f"earlier saves are still being written after {self.settings.write_deadline_s:g} s"
        with self._progress:
            self._in_flight += 1
        if self._coordinator is not None:
            self._coordinator.saves.put(save)
        if captured is None or arena is None:
            self.planner.enter(save, Entered(error=error, mistake=mistake))
            self._writer.submit(Job(save, None, error))
            return
        try:
            job = self._prepare(save, captured, arena)
        except BaseException as failure:
            self._give_up(save, arena, failure)
            mistake = isinstance(failure, ReplicasDiffer | UsageError) and not self.planner.planned_once
            if mistake or not isinstance(failure, Exception):  # Ctrl-C, say
                raise
            return
        self._writer.submit(job)

    def _prepare(self, save: SaveId, captured: Captured, arena: Arena) -> Job:
        plan = self.planner.plan_for(save, captured)
        self._newest_bytes = plan.layout.size
        snapshot = self._take(captured, plan, arena)
        common = digest_text(msgspec.json.encode(self.planner.common))
        late = partial(digest_kept, snapshot, captured, self.cluster.rank, self.planner.compared(captured))
        return Job(save, snapshot, plan=common, contested=self.planner.digest_contested(captured), late=late)

    def _give_up(self, save: SaveId, arena: Arena, failure: BaseException) -> None:
        """Vote against a save that all ranks are in, whatever happened: they would wait for this one."""
        assert self._writer is not None
        if self._copier is not None:
            self._copier.finish()  # or it would write into an arena that is given back
        reason = str(failure) if isinstance(failure, UnbrokenError) else f"{type(failure).__name__}: {failure}"
        if not isinstance(failure, UnbrokenError):
            self.planner.enter(save, Entered(error=reason))  # it may not have come so far
        self._writer.arenas.put(arena)
        self._writer.submit(Job(save, None, reason))

    def _take(self, captured: Captured, plan: Plan, arena: Arena) -> Snapshot:
        """The snapshot, complete or with a rest that is being copied when this returns."""
        copier = self._copier
        waiting = copier.may_wait(captured.fenced) if copier is not None else set()
        route = self._routes.of(captured, plan, waiting)
        snapshot = take(captured, plan, arena, route)
        snapshot.frozen = self.planner.freezer.of(plan, captured)
        compared = self.planner.compared(captured) - snapshot.kept
        digest_snapshot(snapshot, captured, self.cluster.rank, compared, route.waiting)
        if copier is not None:
            rehearsing = captured.fenced - route.waiting
            copier.rehearse({name: captured.tensors[name].tensor for name in rehearsing if name in captured.tensors})
            if snapshot.rest is not None:
                copier.submit(snapshot.rest)
        return snapshot

    def _finished(self, outcome: Outcome) -> None:
        """On the writer's thread."""
        with self._progress:
            self.outcomes.append(outcome)
            self._in_flight -= 1
            self._progress.notify_all()

    def before_step(self, bytes_to_write: Callable[[], int]) -> None:
        """Called before a step counts.

        bytes_to_write  about how many a save of this rank has; asked once, to have memory ready for the first one

        Waits for saves in flight if the newest is small, but no longer than SMALL_WAIT_S: then a kill costs at most the
        steps between two saves, not those done while the newest was being written as well. Costs nothing when nothing
        is in flight, and large saves are never waited for.
        """
        if self._writer is not None and not self._expects_saves:  # not earlier: who restores to look at it needs none
            self._expects_saves = True
            size = bytes_to_write()
            if size:
                self._writer.expect(size)
        if self._in_flight and self._newest_bytes <= SMALL_BYTES:
            with self._progress:
                self._progress.wait_for(lambda: self._in_flight == 0, SMALL_WAIT_S)

    def wait(self) -> bool:
        """Wait until no save is in flight; False if one still is at the deadline."""
        deadline_s = 2 * self.settings.write_deadline_s + self.settings.deadline_s
        with self._progress:
            return self._progress.wait_for(lambda: self._in_flight == 0, deadline_s)

    def close(self, abandon: bool) -> None:
        """End all threads. With `abandon`, saves in flight are dropped instead of finished: a peer may be gone."""
        if self.meetings is not None:
            self.meetings.stop()
        if self._copier is not None:
            self._copier.stop()
        if abandon:
            self.stopped.set()
        deadline_s = FAREWELL_S if abandon else self.settings.write_deadline_s
        if self._writer is not None:
            self._writer.stop(deadline_s)
        if self._coordinator is not None:
            self._coordinator.stop(deadline_s)
        if not abandon:
            self._say_farewell()
        self.stopped.set()

    def _say_farewell(self) -> None:
        """Rank 0 hosts the control channel: it leaves last."""
        try:
            self.channel.post(f"farewell/{self.cluster.rank}", b"")
            if self.cluster.rank == 0:
                ranks = range(self.cluster.world_size)
                self.channel.wait_all([f"farewell/{rank}" for rank in ranks], FAREWELL_S)
        except PeerFailed as error:
            log.debug("no farewell: %s", error)


def open_session(root: Path, settings: Settings, environment: dict[str, Any]) -> Session:
    """Connect this rank to the others and make sure that all see one writable run directory.

    Every rank must come. Raises UsageError, DirectoryProblem, DeadlineExceeded, PeerFailed.
    """
    cluster = connect(settings.deadline_s)
    stopped = threading.Event()
    channel = cluster.channel(cluster.new_namespace(), stopped)
    store = agree_on_directory(channel, root, settings.deadline_s)
    return Session(cluster, channel, store, settings, environment, stopped)
