"""Votes and the commit: how the parts that N ranks wrote become one checkpoint, or none.

For each save, every rank says that it has entered, and later how its part went (its vote). On rank 0 one thread, the
coordinator, gathers both through the control channel, writes the manifest, and tells everyone the outcome.

The order, and what a crash leaves after each point (invariant 14):

1. ranks write `step-N/gGGGG-rank-RRRRR.safetensors`, fsync file and directory    files nobody refers to; swept later
2. ranks vote                                                                     the same
3. the coordinator looks for a newer generation (fence), checks that the pieces
   cover every tensor, and moves aside a manifest that an older generation left
   at this step                                                                   the older one, still a candidate
4. it publishes `step-N/manifest.json` atomically and durably                      the checkpoint, committed
5. it posts the outcome, and only then retention deletes older checkpoints         more checkpoints than asked for
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec

from unbroken import faultpoints
from unbroken.agreement import (
    CommonPlan,
    Details,
    Entered,
    Held,
    Values,
    compare_details,
    divide,
    odd_ranks,
    ranks_to_ask,
    settle,
    spell,
)
from unbroken.cluster import Channel
from unbroken.errors import DamagedCheckpoint, PeerFailed, SaveFailed, TakenOver, UnbrokenError
from unbroken.generations import Generation, newest_number
from unbroken.manifest import (
    MANIFEST,
    MOST_BYTES,
    Manifest,
    decode,
    encode,
    step_directory,
)
from unbroken.policy import Keep
from unbroken.retention import sweep
from unbroken.store.local import APPEAR_S, LocalStore
from unbroken.votes import Merger, Vote, merge_values

log = logging.getLogger(__name__)


class Outcome(msgspec.Struct):
    """What became of a save; the same on every rank."""

    step: int
    micro_step: int
    committed: bool
    reason: str = ""
    """Why it was not committed, naming ranks."""
    taken_over_by: int = 0
    """Number of a newer generation that owns the directory now; this job may not save any more."""
    replan: bool = False
    """True if ranks disagreed about the structure: all must plan anew at the next save."""
    nbytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SaveId:
    """One attempt to save one step."""

    step: int
    micro_step: int
    attempt: int
    """Counts this process's attempts at this step; all ranks make the same ones."""

    @property
    def directory(self) -> str:
        """Where the checkpoint lies in the run directory."""
        return step_directory(self.step, self.micro_step)

    @property
    def phase(self) -> str:
        """Prefix of this save's keys in the control channel."""
        return f"save/{self.directory}/{self.attempt}"

    def kept_name(self, generation: int, rank: int) -> str:
        """The name of a rank's file of tensors that do not change."""
        return self.file_name(generation, rank).replace(".safetensors", "-kept.safetensors")

    def file_name(self, generation: int, rank: int) -> str:
        """A rank's file; every attempt has names of its own, so that nothing is ever written over."""
        retry = f"-{self.attempt}" if self.attempt else ""
        return f"g{generation:04d}-rank-{rank:05d}{retry}.safetensors"

    def __str__(self) -> str:
        return f"step {self.step}" + (f" + {self.micro_step} micro-steps" if self.micro_step else "")


@dataclass(slots=True)
class Coordinator:
    """Rank 0's side of every save. One thread, one save at a time, in the order they were entered."""

    channel: Channel
    store: LocalStore
    generation: Generation
    keep: Keep | None
    environment: dict[str, Any]
    deadline_s: float
    """How long ranks may be apart when they enter a save."""
    write_deadline_s: float
    """How long a rank may take to write its part."""
    saves: queue.SimpleQueue[SaveId | None] = field(default_factory=queue.SimpleQueue)
    _merger: Merger = field(default_factory=Merger)
    _done: list[str] = field(default_factory=list)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to serve saves."""
        self._thread = threading.Thread(target=self._serve, name="unbroken-coordinator", daemon=True)
        self._thread.start()

    def stop(self, deadline_s: float) -> None:
        """Finish the saves that were entered, then end."""
        self.saves.put(None)
        if self._thread is not None:
            self._thread.join(deadline_s)

    def _serve(self) -> None:
        while (save := self.saves.get()) is not None:
            try:
                outcome = self._run(save)
                self.channel.post(f"{save.phase}/outcome", msgspec.json.encode(outcome))
                faultpoints.reach("told")
                if outcome.committed and self.keep is not None:
                    sweep(self.store, self.generation, self.keep)
                self._forget(save)
            except PeerFailed as error:
                log.debug("coordinator ends: %s", error)
                return
            except Exception as error:
                # A bug or a failing disk in retention must not end the thread: then no save would ever commit again.
                log.warning("after the save of %s: %s: %s", save, type(error).__name__, error)

    def _run(self, save: SaveId) -> Outcome:
        try:
            return self._commit(save, time.monotonic())
        except TakenOver as error:
            return Outcome(save.step, save.micro_step, False, str(error), newest_number(self.store))
        except PeerFailed:
            raise
        except (UnbrokenError, OSError) as error:
            replan = isinstance(error, _StructureChanged)
            return Outcome(save.step, save.micro_step, False, str(error), replan=replan)
        except Exception as error:
            # A mistake of ours: all ranks wait for this outcome, so it must come, and say what happened.
            log.exception("the save of %s failed", save)
            return Outcome(save.step, save.micro_step, False, f"{type(error).__name__}: {error}")

    def _commit(self, save: SaveId, began: float) -> Outcome:
        self._gather_entries(save)
        votes = self._gather_votes(save)
        data = self._manifest(save, votes)
        faultpoints.reach("all voted")
        self._find_files(save, votes)
        self._publish(save, data)
        faultpoints.reach("published")
        self._merger.commit()
        nbytes = sum(file.size for vote in votes for file in vote.files)
        seconds = time.monotonic() - began
        log.info("committed %s: %d ranks, %.1f MB in %.2f s", save, self.channel.world_size, nbytes / 1e6, seconds)
        return Outcome(save.step, save.micro_step, True, nbytes=nbytes, seconds=seconds)

    def _gather_entries(self, save: SaveId) -> None:
        """Wait for every rank, and give those with a new structure the common plan."""
        entries = [msgspec.json.decode(data, type=Entered) for data in self._collect(save, "entered", self.deadline_s)]
        failed = [f"rank {rank}: {entry.error}" for rank, entry in enumerate(entries) if entry.error]
        changed = [rank for rank, entry in enumerate(entries) if entry.changed]
        error = ""
        if failed:
            error = _shorten(failed)
        elif changed and len(changed) < len(entries):
            unchanged = sorted(set(range(len(entries))) - set(changed))
            error = f"the state changed its structure on rank(s) {spell(changed)} but not on {spell(unchanged)}"
        if changed:
            self._answer_plan(save, entries, error, mistake=any(entry.mistake for entry in entries))
        if error:
            raise SaveFailed(error) if failed else _StructureChanged(error)

    def _answer_plan(self, save: SaveId, entries: list[Entered], error: str, mistake: bool) -> None:
        """Tell ranks with a new structure how to plan; if they do not agree, ask for details first."""
        ask = [] if error else ranks_to_ask(entries)
        self.channel.post(f"{save.phase}/plan", msgspec.json.encode(CommonPlan(ask=ask, error=error, mistake=mistake)))
        if not ask:
            return
        structures = [entry.structure for entry in entries]
        answers = zip(ask, self._collect(save, "details", self.deadline_s, ask), strict=True)
        details = {rank: msgspec.json.decode(data, type=Details) for rank, data in answers}
        plan = compare_details(structures, details)
        self.channel.post(f"{save.phase}/plan-in-detail", msgspec.json.encode(plan))
        if plan.contested and not plan.error:
            held = [msgspec.json.decode(data, type=Held) for data in self._collect(save, "held", self.deadline_s)]
            divided = divide(plan.contested, details, held)
            self.channel.post(f"{save.phase}/plan-divided", msgspec.json.encode(divided))
            if not divided.error:
                told = self._collect(save, "parts", self.deadline_s)
                settled = settle(divided.parts, details, [msgspec.json.decode(data, type=Values) for data in told])
                self.channel.post(f"{save.phase}/plan-settled", msgspec.json.encode(settled))

    def _gather_votes(self, save: SaveId) -> list[Vote]:
        votes = [msgspec.json.decode(data, type=Vote) for data in self._collect(save, "vote", self.write_deadline_s)]
        failed = [f"rank {rank}: {vote.error}" for rank, vote in enumerate(votes) if vote.error]
        if failed:
            raise SaveFailed(_shorten(failed))
        odd = odd_ranks([{"plan": vote.plan, **vote.replicas} for vote in votes])
        if odd:
            raise _StructureChanged(
                f"parameters or optimizer state that are kept equal differ on rank(s) {spell(odd)} since the save "
                "before; the next save names them (does a schedule follow a rank's own loss?)"
            )
        return votes

    def _find_files(self, save: SaveId, votes: list[Vote]) -> None:
        """Raise SaveFailed if a rank's file is not beside the manifest: a node that lost its mount writes below it.

        Sizes are left to readers; asking for each would cost a large job on a network file system seconds.
        """
        ranks = {file.name: rank for rank, vote in enumerate(votes) for file in vote.files}
        end = time.monotonic() + APPEAR_S
        while absent := ranks.keys() - set(self.store.list(save.directory)):
            if time.monotonic() > end:
                raise SaveFailed(
                    f"rank(s) {spell([ranks[name] for name in absent])} wrote {min(absent)}, which rank 0 does not "
                    f"find in {self.store.root}/{save.directory}: is it still one directory for all?"
                )
            time.sleep(0.05)

    def _collect(self, save: SaveId, what: str, deadline_s: float, of: Collection[int] | None = None) -> list[bytes]:
        ranks = range(self.channel.world_size) if of is None else of
        keys = [f"{save.phase}/{what}/{rank}" for rank in ranks]
        missing = self.channel.wait_all(keys, deadline_s)
        if missing:
            late = spell([int(key.rpartition("/")[2]) for key in missing])
            verb = {"entered": "enter", "vote": "finish writing in"}.get(what, "answer in")
            raise SaveFailed(f"rank(s) {late} did not {verb} the save of {save} within {deadline_s:g} s")
        return [self.channel.take(key) for key in keys]

    def _manifest(self, save: SaveId, votes: list[Vote]) -> bytes:
        """The manifest's bytes, which a reader would not refuse."""
        merged, checked = self._merger.merge(votes)
        manifest = Manifest(
            step=save.step,
            micro_step=save.micro_step,
            generation=self.generation.number,
            lineage=self.generation.lineage,
            world_size=self.channel.world_size,
            saved_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            files=[file for vote in votes for file in vote.files],
            tensors=merged.tensors,
            rank_tensors=merged.rank_tensors,
            values=merge_values(votes),
            meshes=merged.meshes,
            environment=self.environment,
            timings={"slowest_write": max(vote.seconds for vote in votes)},
        )
        data = encode(manifest)
        # What we would refuse to read must not be written. What did not change was read back at the save before.
        without = msgspec.structs.replace(manifest, tensors={}, rank_tensors=[{} for _ in votes])
        decode(encode(without) if checked else data, f"{save.directory}/{MANIFEST}")
        return data

    def _publish(self, save: SaveId, data: bytes) -> None:
        name = f"{save.directory}/{MANIFEST}"
        # Invariant 6: a newer start owns the directory; what we would add now is not on its lineage.
        newest = newest_number(self.store)
        if newest > self.generation.number:
            raise TakenOver(
                f"generation {newest} has taken over this run directory from generation {self.generation.number}"
            )
        try:
            self.store.publish(name, data)
        except FileExistsError:
            self._move_aside(save, name)
            self.store.publish(name, data)

    def _move_aside(self, save: SaveId, name: str) -> None:
        """Make room for our manifest where an older generation left one that is not on our lineage, or damaged.

        Nothing is destroyed: readers look at manifests that were moved aside too, so that a race with another
        generation cannot hide a checkpoint.
        """
        try:
            existing = decode(self.store.read(name, MOST_BYTES), name).generation
        except (DamagedCheckpoint, OSError, ValueError, EOFError):
            existing = 0
        if existing > self.generation.number:
            raise TakenOver(f"{name} was already written by generation {existing}")
        if existing == self.generation.number:
            raise SaveFailed(f"{save} was already saved by this job")
        self.store.rename(name, f"{save.directory}/manifest.g{existing:04d}.json")

    def _forget(self, save: SaveId) -> None:
        """Drop the keys of the save before this one: every rank has read its outcome before it entered this one."""
        if self._done:
            self.channel.forget(self._done)
        ranks = range(self.channel.world_size)
        self._done = [
            f"{save.phase}/{what}/{rank}" for what in ("entered", "details", "held", "parts", "vote") for rank in ranks
        ]
        self._done += [
            f"{save.phase}/{what}" for what in ("plan", "plan-in-detail", "plan-divided", "plan-settled", "values")
        ]


class _StructureChanged(SaveFailed):
    """Ranks do not have the same state to divide: all plan anew at the next save."""


def _shorten(lines: list[str]) -> str:
    return "; ".join(lines[:4]) + (f" (and {len(lines) - 4} more)" if len(lines) > 4 else "")
