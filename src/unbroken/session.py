"""What lives while a job saves: its generation, its connections to the other ranks, its threads.

Opened once, by `restore()` or by the first save, and closed with the Checkpointer. The training thread calls
everything here; the threads it starts are the writer (every rank), the coordinator (rank 0) and the meetings' watcher.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from unbroken import faultpoints, generations
from unbroken.agreement import (
    CommonPlan,
    Details,
    Entered,
    Held,
    Values,
    details_of,
    entry_of,
    held_of,
    values_of,
)
from unbroken.candidates import first_manifest
from unbroken.cluster import Channel, Cluster, connect
from unbroken.commit import Coordinator, Outcome, SaveId
from unbroken.directory import agree_on_directory
from unbroken.errors import (
    DirectoryProblem,
    HistoryExists,
    PeerFailed,
    ReplicasDiffer,
    SaveFailed,
    UnbrokenError,
    UsageError,
)
from unbroken.generations import Generation
from unbroken.image.digest import digest_text
from unbroken.image.image import Arena
from unbroken.kept import Freezer
from unbroken.layout.spread import holding
from unbroken.manifest import Manifest
from unbroken.meeting import Meetings
from unbroken.overlap import Copier
from unbroken.planning import Plan, Structures, plan_snapshot
from unbroken.policy import Settings
from unbroken.replicas import digest_kept, digest_snapshot
from unbroken.snapshot import Routes, Snapshot, take
from unbroken.state.captured import Captured
from unbroken.store.local import LocalStore
from unbroken.writer import Job, Writer, not_entered_by_rank_0

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
    generation: Generation | None = None
    outcomes: deque[Outcome] = field(default_factory=deque)
    """Filled by the writer's thread, emptied by the training thread."""
    _writer: Writer | None = None
    _coordinator: Coordinator | None = None
    meetings: Meetings | None = None
    _copier: Copier | None = None
    _structures: Structures = field(default_factory=Structures)
    _routes: Routes = field(default_factory=Routes)
    _plan: Plan | None = None
    _freezer: Freezer = field(default_factory=Freezer)
    _planned_once: bool = False
    _shared: str = ""
    """Structure of the shared tensors that the ranks agreed on."""
    _common: CommonPlan = field(default_factory=CommonPlan)
    _in_flight: int = 0
    _newest_bytes: int = 0
    """Of this rank's part of the newest save."""
    _progress: threading.Condition = field(default_factory=threading.Condition)

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
        arena = self._writer.take_arena(self.settings.write_deadline_s) if captured is not None else None
        if captured is not None and arena is None:
            error = f"earlier saves are still being written after {self.settings.write_deadline_s:g} s"
        with self._progress:
            self._in_flight += 1
        if self._coordinator is not None:
            self._coordinator.saves.put(save)
        if captured is None or arena is None:
            self._enter(save, Entered(error=error, mistake=mistake))
            self._writer.submit(Job(save, None, error))
            return
        try:
            plan = self._plan_for(save, captured)
        except UnbrokenError as failure:
            self._writer.arenas.put(arena)
            self._writer.submit(Job(save, None, str(failure)))
            if isinstance(failure, ReplicasDiffer | UsageError) and not self._planned_once:
                raise
            return
        self._newest_bytes = plan.layout.size
        snapshot = self._take(captured, plan, arena)
        common = digest_text(msgspec.json.encode(self._common))
        late = partial(digest_kept, snapshot, captured, self.cluster.rank, self._compared(captured))
        self._writer.submit(Job(save, snapshot, plan=common, contested=self._digest_contested(captured), late=late))

    def _take(self, captured: Captured, plan: Plan, arena: Arena) -> Snapshot:
        """The snapshot, complete or with a rest that is being copied when this returns."""
        copier = self._copier
        waiting = copier.may_wait(captured.fenced) if copier is not None else set()
        route = self._routes.of(captured, plan, waiting)
        snapshot = take(captured, plan, arena, route)
        snapshot.frozen = self._freezer.of(plan, captured)
        compared = self._compared(captured) - snapshot.kept
        digest_snapshot(snapshot, captured, self.cluster.rank, compared, route.waiting)
        if copier is not None:
            rehearsing = captured.fenced - route.waiting
            copier.rehearse({name: captured.tensors[name].tensor for name in rehearsing if name in captured.tensors})
            if snapshot.rest is not None:
                copier.submit(snapshot.rest)
        return snapshot

    def _plan_for(self, save: SaveId, captured: Captured) -> Plan:
        """The plan of this structure: the one we have, or a new one made together with all ranks."""
        rank, world_size = self.cluster.rank, self.cluster.world_size
        structure = self._structures.of(captured)
        # In the background only: there the writer reads what is frozen while the loop goes on.
        frozen = self._freezer.names(captured) if self._copier is not None else frozenset()
        if self._plan is not None and self._plan.structure == structure and self._plan.frozen == frozen:
            self._enter(save, Entered())
            return self._plan
        # What only this rank has may change without the others: they divide the shared tensors as before.
        shared = self._structures.of(captured, shared_only=True)
        if world_size == 1 or self._shared == shared:
            self._enter(save, Entered())
        else:
            self.forget_plan()
            self._common = self._common_plan(save, captured)
            self._shared = shared
        apart, ceded = frozenset(self._common.apart), self._ceded(captured)
        self._plan = plan_snapshot(captured, rank, world_size, apart, ceded, structure, frozen)
        if rank == 0 and world_size > 1 and not self._planned_once:
            _warn_of_modules_without_ddp(captured, world_size)
        self._planned_once = True
        return self._plan

    def _ceded(self, captured: Captured) -> set[str]:
        """What ranks of another mesh write, who hold the same under the same name."""
        found = set()
        for name, mesh in self._common.ceded.items():
            live = captured.tensors.get(name)
            if live is not None and live.spread is not None and holding(live.spread).key != mesh:
                found.add(name)
        return found

    def _compared(self, captured: Captured) -> set[str]:
        """Names of tensors whose digests ranks compare, where several hold them.

        At every save (invariant 8): replicas that were equal at the first one drift apart when a schedule follows a
        rank's own loss, say, and a checkpoint made of parts of several ranks would be none of them.
        """
        if self.cluster.world_size == 1 or self.settings.check_replicas != "always":
            return set()
        return captured.tensors.keys() - self._common.apart - self._common.ceded.keys()

    def _digest_contested(self, captured: Captured) -> dict[str, str]:
        """The same of tensors whose name several meshes use."""
        if self.settings.check_replicas != "always":
            return {}
        return dict(values_of(captured, self.cluster.rank, self._common.parts).parts)

    def _common_plan(self, save: SaveId, captured: Captured) -> CommonPlan:
        """Compare shared tensors with all ranks: what is not common, and who writes what several hold (invariant 8)."""
        rank, check = self.cluster.rank, self.settings.check_replicas != "never"
        self._enter(save, entry_of(captured, rank, check))
        plan = self._read_plan(save, "plan")
        if plan.ask and not plan.error:
            if rank in plan.ask:
                self._answer(save, "details", details_of(captured, rank, check))
            plan = self._read_plan(save, "plan-in-detail")
        if plan.contested and not plan.error:
            self._answer(save, "held", held_of(captured, rank, plan.contested))
            settled = self._read_plan(save, "plan-divided")
            if not settled.error:
                self._answer(save, "parts", values_of(captured, rank, settled.parts))
                settled = self._read_plan(save, "plan-settled")
            plan = msgspec.structs.replace(
                settled, contested=plan.contested, apart=plan.apart, differing=plan.differing
            )
        if plan.error:
            mistake = ReplicasDiffer if plan.contested else UsageError
            raise (mistake if plan.mistake else SaveFailed)(plan.error)
        if plan.differing and rank == 0:
            log.warning(
                "%d tensors that should be equal on all ranks are not: %s; each rank's own values are saved",
                len(plan.differing),
                "; ".join(plan.differing[:4]),
            )
        return plan

    def _read_plan(self, save: SaveId, what: str) -> CommonPlan:
        if self.channel.wait_all([f"{save.phase}/entered/0"], self.settings.deadline_s):
            raise SaveFailed(not_entered_by_rank_0(save, self.settings.deadline_s))
        # The coordinator waits deadline_s for the slowest rank before it can answer the others.
        data = self.channel.read(
            f"{save.phase}/{what}", 2 * self.settings.deadline_s, f"the other ranks to enter the save of {save}"
        )
        return msgspec.json.decode(data, type=CommonPlan)

    def _answer(self, save: SaveId, what: str, answer: Details | Held | Values) -> None:
        self.channel.post(f"{save.phase}/{what}/{self.cluster.rank}", msgspec.json.encode(answer))

    def _enter(self, save: SaveId, entered: Entered) -> None:
        self.channel.post(f"{save.phase}/entered/{self.cluster.rank}", msgspec.json.encode(entered))

    def _finished(self, outcome: Outcome) -> None:
        """On the writer's thread."""
        with self._progress:
            self.outcomes.append(outcome)
            self._in_flight -= 1
            self._progress.notify_all()

    def let_small_save_finish(self) -> None:
        """Wait for saves in flight if the newest is small, but no longer than SMALL_WAIT_S.

        Called before a step counts: then a kill costs at most the steps between two saves, not those done while the
        newest was being written as well. Costs nothing when nothing is in flight, and large saves are never waited for.
        """
        if self._in_flight and self._newest_bytes <= SMALL_BYTES:
            with self._progress:
                self._progress.wait_for(lambda: self._in_flight == 0, SMALL_WAIT_S)

    def forget_plan(self) -> None:
        """Plan anew, together with all ranks, at the next save."""
        self._plan = None
        self._shared = ""

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


def _warn_of_modules_without_ddp(captured: Captured, world_size: int) -> None:
    modules = any(value.get("kind") == "module" for value in captured.values.values())
    if modules and all(live.spread is None for live in captured.tensors.values()):
        log.warning(
            "no registered module is a DistributedDataParallel: each of %d ranks saves what it has as its own, as "
            "stages of a pipeline should. If you wrap the model, register the wrapped one: DDP's bucket layout is part "
            "of an exact resume",
            world_size,
        )


def open_session(root: Path, settings: Settings, environment: dict[str, Any]) -> Session:
    """Connect this rank to the others and make sure that all see one writable run directory.

    Every rank must come. Raises UsageError, DirectoryProblem, DeadlineExceeded, PeerFailed.
    """
    cluster = connect(settings.deadline_s)
    stopped = threading.Event()
    channel = cluster.channel(cluster.new_namespace(), stopped)
    store = agree_on_directory(channel, root, settings.deadline_s)
    return Session(cluster, channel, store, settings, environment, stopped)
