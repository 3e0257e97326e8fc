"""The thread of each rank that writes its part of a save, votes, and learns the outcome.

Jobs come from the training thread through one queue; outcomes go back through another. At most `slots` saves are in
flight: each holds an arena, and the training thread waits for a free one before it takes the next snapshot.
The thread makes system calls and digests that release the GIL. Of live tensors it reads only those that do not change.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from unbroken import faultpoints
from unbroken.agreement import fold
from unbroken.cluster import CONNECT_S, Channel
from unbroken.commit import Outcome, SaveId
from unbroken.errors import SaveFailed, UnbrokenError
from unbroken.image.digest import BlockDigests, block_bytes_for, digest_blocks, digest_text
from unbroken.image.image import Arena
from unbroken.kept import Frozen
from unbroken.manifest import FileRecord
from unbroken.pacing import Pace
from unbroken.snapshot import Snapshot
from unbroken.state.draft import count_and_name
from unbroken.store.local import LocalStore
from unbroken.votes import Teller, Vote

T = TypeVar("T")
log = logging.getLogger(__name__)

PART_BYTES = 32 << 20
"""What is given to the disk at once, about, while what comes after it is still copied and digested."""
DIGEST_BYTES = 4 << 20
"""What is digested at once, about: little, since what was just copied is still in the cache. Memory's bandwidth is what
a save takes from training: with as much as is written the loop lost twice as much (93 ms of 604 MB instead of 35)."""


@dataclass(frozen=True, slots=True)
class Job:
    """One save, from this rank's side."""

    save: SaveId
    snapshot: Snapshot | None
    """None if this rank could not take one."""
    error: str = ""
    """Why not."""
    plan: str = ""
    """Digest of the common plan."""
    contested: dict[str, str] = field(default_factory=dict)
    """Digests of what ranks of other meshes must have alike."""
    late: Callable[[], None] = field(default=lambda: None)
    """What is left to be looked at before this rank votes."""


def not_entered_by_rank_0(save: SaveId, deadline_s: float) -> str:
    """What other ranks say when they are alone with a save: rank 0 says itself which of them did not come."""
    return (
        f"rank 0 did not enter the save of {save} within {deadline_s:g} s; do all ranks call step() and save() alike?"
    )


def _reserve(arena: Arena, size: int) -> None:
    if arena.is_pinned:  # only the training thread knows that no graph is being captured
        return
    try:
        arena.reserve(size)
    except Exception as error:  # no memory, say: the save that needs it will tell
        log.debug("no memory for a save: %s", error)


@dataclass(slots=True)
class Writer:
    """One rank's writing thread. `submit` and `take_arena` are for the training thread."""

    channel: Channel
    store: LocalStore
    generation: int
    deadline_s: float
    """How long ranks may be apart when they enter a save."""
    write_deadline_s: float
    slots: int
    """How many saves may be in flight."""
    finished: Callable[[Outcome], None]
    """Called on the writer's thread with each outcome, in order."""
    arenas: queue.Queue[Arena] = field(default_factory=queue.Queue)
    _jobs: queue.SimpleQueue[Job | int | None] = field(default_factory=queue.SimpleQueue)
    """Saves to write; a number of bytes to have an arena of; None at the end."""
    _teller: Teller = field(default_factory=Teller)
    _kept: tuple[Frozen, str, FileRecord] | None = None
    """What did not change, and its file in the newest checkpoint: directory and record."""
    _pace: Pace = field(default_factory=Pace)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to serve jobs."""
        self._pace.start()
        for _ in range(self.slots):
            self.arenas.put(Arena())
        self._thread = threading.Thread(target=self._serve, name="unbroken-writer", daemon=True)
        self._thread.start()

    def stop(self, deadline_s: float) -> None:
        """Finish the jobs that were submitted, then end."""
        self._pace.stop()
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join(deadline_s)

    def take_arena(self, deadline_s: float) -> Arena | None:
        """A free arena, waiting for the oldest save to end if both are in use; None at the deadline."""
        with contextlib.suppress(queue.Empty):
            return self.arenas.get(timeout=deadline_s)
        return None

    def expect(self, size: int) -> None:
        """Let an arena be ready for a save of about `size` bytes, meanwhile."""
        self._jobs.put(size)

    def submit(self, job: Job) -> None:
        """Hand over a snapshot, which belongs to the writer from now on."""
        self._jobs.put(job)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, int):
                self._reserve_first(job)
                continue
            try:
                outcome = self._run(job)
            except Exception as error:
                # Nothing may end this thread silently: the training thread learns of it as a failed save.
                reason = str(error) if isinstance(error, UnbrokenError) else f"{type(error).__name__}: {error}"
                outcome = Outcome(job.save.step, job.save.micro_step, False, reason)
            finally:
                if job.snapshot is not None:
                    rest = job.snapshot.rest
                    # What is still being copied, hours late, may go on to be: into an arena that nobody has any more.
                    self.arenas.put(job.snapshot.arena if rest is None or rest.done.is_set() else Arena())
            self.finished(outcome)
            if job.snapshot is not None:
                self._reserve_next(job.snapshot.plan.layout.size)
            del job  # or the thread would hold it until the next one

    def _run(self, job: Job) -> Outcome:
        name = job.save.file_name(self.generation, self.channel.rank)
        path = f"{job.save.directory}/{name}"
        if self.channel.rank == 0:
            values = job.snapshot.values if job.snapshot is not None else {}
            digests = {key: digest_text(value) for key, value in values.items()}
            self.channel.post(f"{job.save.phase}/values", msgspec.json.encode(digests))
        vote = self._write(job, name, path)
        faultpoints.reach("written")
        self.channel.post(f"{job.save.phase}/vote/{self.channel.rank}", msgspec.json.encode(vote))
        faultpoints.reach("voted")
        # Without rank 0 there is no coordinator, and no outcome would ever come.
        if self.channel.wait_all([f"{job.save.phase}/entered/0"], self.deadline_s):
            raise SaveFailed(not_entered_by_rank_0(job.save, self.deadline_s))
        data = self.channel.read(
            f"{job.save.phase}/outcome",
            2 * self.write_deadline_s + CONNECT_S,
            f"the outcome of the save of {job.save}",
        )
        outcome = msgspec.json.decode(data, type=Outcome)
        self._teller.learn(outcome.committed)
        if not outcome.committed:
            # Give back the space of the failed try. Were the manifest there after all, we would not be here.
            self._delete(job.save, vote.files)
        elif job.snapshot is not None and job.snapshot.frozen is not None:
            self._kept = job.snapshot.frozen, job.save.directory, vote.files[-1]
        return outcome

    def _delete(self, save: SaveId, files: Sequence[FileRecord]) -> None:
        for file in files:
            self.store.delete(f"{save.directory}/{file.name}")

    def _write(self, job: Job, name: str, path: str) -> Vote:
        """Write this rank's file; whatever goes wrong becomes a vote against, never an exception."""
        if job.snapshot is None:
            return Vote(error=job.error)
        began = time.monotonic()
        plan = job.snapshot.plan
        files: list[FileRecord] = []
        try:
            if plan.parts:
                files.append(self._write_file(job.snapshot, name, path))
            else:
                _complete(job.snapshot, self.write_deadline_s)
            if job.snapshot.frozen is not None:
                files.append(self._keep(job.save, job.snapshot.frozen))
            job.late()
        except Exception as error:  # without a vote all ranks would wait for this one until the write deadline
            with contextlib.suppress(OSError):
                self._delete(job.save, files)
            return Vote(error=str(error) if isinstance(error, SaveFailed) else f"cannot write {path}: {error}")
        alike = self._as_rank_0(job.save, job.snapshot.values)
        listing, listed = self._teller.tell(plan)
        return Vote(
            files=files,
            listing=listing,
            listed=listed,
            values={key: msgspec.Raw(value) for key, value in job.snapshot.values.items() if key not in alike},
            as_rank_0=alike,
            plan=job.plan,
            replicas=fold(job.snapshot.replicas) | job.contested,
            seconds=time.monotonic() - began,
        )

    def _write_file(self, snapshot: Snapshot, name: str, path: str) -> FileRecord:
        """Write what is copied, as it comes, with its digests taken beside; nothing stays of a snapshot of no step."""
        content = snapshot.arena.content()
        block_bytes = block_bytes_for(len(content))
        with ThreadPoolExecutor(1, thread_name_prefix="unbroken-digests") as pool:
            parts = self._giving_way(self._copied(snapshot, max(block_bytes, DIGEST_BYTES)))
            digests = pool.submit(lambda: [text for part in parts for text in digest_blocks(part, block_bytes)])
            self.store.create_in_parts(path, _striking(self._giving_way(self._copied(snapshot, PART_BYTES))))
            return FileRecord(name, len(content), block_bytes, "".join(digests.result()))

    def _giving_way(self, parts: Iterable[T]) -> Iterator[T]:
        """The same parts, none while an optimizer steps; but the loop shall not wait for an arena because of that."""
        return self._pace.giving_way(parts, lambda: not self._jobs.empty())

    def _copied(self, snapshot: Snapshot, length: int) -> Iterator[memoryview]:
        """Parts of the arena, each when it is complete. Raises SaveFailed, at the end, if they are of no step."""
        content = snapshot.arena.content()
        for begin in range(0, len(content), length):
            part = content[begin : begin + length]
            if snapshot.rest is not None and not snapshot.rest.wait_for(begin + len(part), self.write_deadline_s):
                _complete(snapshot, 0.0)
            yield part
        _complete(snapshot, self.write_deadline_s)

    def _keep(self, save: SaveId, frozen: Frozen) -> FileRecord:
        """A file of what does not change: that of the newest checkpoint by a further name, or a new one."""
        name = save.kept_name(self.generation, self.channel.rank)
        path = f"{save.directory}/{name}"
        if self._kept is not None and self._kept[0] is frozen:
            _, directory, file = self._kept
            _refuse_thawed(frozen.compare(file.blocks, file.block_bytes))
            try:
                self.store.link(f"{directory}/{file.name}", path)
                return FileRecord(name, file.size, file.block_bytes, file.blocks)
            except OSError as error:
                log.debug("%s is written again: %s", path, error)
        digests = BlockDigests(block_bytes_for(frozen.layout.size))
        self.store.create_in_parts(path, digests.of(self._giving_way(frozen.content())))
        if frozen.look():
            self.store.delete(path)
            _refuse_thawed(frozen.thawed)
        return FileRecord(name, frozen.layout.size, digests.block_bytes, digests.text())

    def _reserve_first(self, size: int) -> None:
        """Let an arena be ready for the first save. That one waits for it: it would not be faster with another."""
        arenas: list[Arena] = []
        try:
            with contextlib.suppress(queue.Empty):
                while len(arenas) < self.slots:
                    arenas.append(self.arenas.get_nowait())
            if len(arenas) == self.slots:  # else that save has begun
                _reserve(arenas[0], size)
        finally:
            for arena in arenas:
                self.arenas.put(arena)

    def _reserve_next(self, size: int) -> None:
        """Let the arena of the next save be ready, too: the loop would stand still, or a step wait, for its pages."""
        with contextlib.suppress(queue.Empty):
            arena = self.arenas.get_nowait()
            _reserve(arena, size)
            self.arenas.put(arena)

    def _as_rank_0(self, save: SaveId, values: Mapping[str, bytes]) -> list[str]:
        """Names whose values are byte for byte those of rank 0: what a thousand ranks have alike is sent once."""
        key = f"{save.phase}/values"
        if self.channel.rank == 0 or self.channel.wait_all([key], self.deadline_s):
            return []
        digests = msgspec.json.decode(self.channel.read(key, self.deadline_s, "rank 0's values"), type=dict[str, str])
        return [name for name, value in values.items() if digests.get(name) == digest_text(value)]


def _striking(parts: Iterator[memoryview]) -> Iterator[memoryview]:
    """The same parts; a proof may strike before each."""
    for part in parts:
        faultpoints.reach("copied")
        yield part


def _complete(snapshot: Snapshot, deadline_s: float) -> None:
    """Wait until a snapshot is complete. Raises SaveFailed if it is of no step."""
    rest = snapshot.rest
    if rest is None:
        return
    if not rest.done.wait(deadline_s):
        raise SaveFailed(f"the state could not be copied within {deadline_s:g} s")
    if rest.error is not None:
        raise SaveFailed(f"the state could not be copied: {type(rest.error).__name__}: {rest.error}") from rest.error
    if rest.changed:
        raise SaveFailed(
            f"{count_and_name(rest.changed)} changed while being copied, and not by the step of an optimizer; from now "
            'on the loop waits while they are copied (snapshot="block" does so from the start)'
        )


def _refuse_thawed(names: Collection[str]) -> None:
    if names:
        raise SaveFailed(
            f"{count_and_name(sorted(names))} changed though no gradient is wanted for them; "
            "from now on they are written at every save"
        )
