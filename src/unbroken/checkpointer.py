"""The facade: what a training script sees.

One save, followed from here to the disk: `step` finds it due -> `State.capture` (what) -> `Session.save` (plan,
snapshot into the arena) -> `Writer` (file, vote) -> `Coordinator` (manifest, outcome) -> back here, in `step`, as a
log line or an error. One restore: `Session` (same directory everywhere) -> `recovery` (which checkpoint) -> `reading`
(bytes, verified) -> `State` (live objects, RNG last) -> a new generation.

Everything here runs on the training thread.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from unbroken.cluster import rank_and_world_size
from unbroken.commit import SaveId
from unbroken.coverage.coverage import Coverage
from unbroken.directory import run_directory
from unbroken.environment import describe_environment, differences
from unbroken.errors import DeadlineExceeded, Preempted, UnbrokenError, UsageError
from unbroken.garbage import without_collecting
from unbroken.ledger import Ledger, expect_ledger, open_ledger
from unbroken.manifest import Manifest
from unbroken.policy import Every, Keep, Schedule, Settings
from unbroken.preemption import Notice
from unbroken.recovery import Recovered, restore_together
from unbroken.restored import Restored
from unbroken.saves import Saves
from unbroken.session import Session, open_session
from unbroken.state.registry import State

log = logging.getLogger(__name__)


class Checkpointer:
    """Saves the state of a training job as it goes, and restores it after a failure, bit for bit.

    path   the run directory, shared by all nodes; created if need be
    state  names -> live objects: modules, optimizers, schedulers, scalers, loaders made by `resumable`, generators,
           tensors, anything with `state_dict` and `load_state_dict`. RNG is always included. Make it after the objects
           were wrapped (DDP) and before the first backward pass.
    every  when `step` saves: Every(steps=…), Every(minutes=…), "auto" (Young/Daly: from the measured cost of a save
           and the failures so far), or None: only `save()` does
    keep   how many checkpoints stay; None keeps all
    on_error  what a failed save does to training: "warn" logs it and the next save tries again, "raise" raises
           SaveFailed from `step`, `wait` or `close`
    strict    what looks like training state and is not in `state` is told once, at the first save. True: as the error
              NotCovered, before anything is written; but as a warning in a job that restored a checkpoint, since
              one that was accepted once is not stopped later. False: as a warning
    check_replicas    when the bytes of what several ranks hold alike (DDP's parameters, HSDP's replicas) are compared
                      between them: at every save, when their structure is new ("first"), or never. It costs one pass
                      of xxh3 over them, and finds replicas that drifted apart and silent corruption
    snapshot          "overlap": parameters and optimizer state of torch's optimizers are copied while the next forward
                      and backward run, and the optimizer waits for the copy; "block": the loop waits. A script that
                      writes single elements of weights through `tensor.data` in between needs "block"
    slots             how many saves may be under way, each with a copy of this rank's part in memory; with 1 the next
                      save waits until the one before is durable
    deadline_s        how long ranks wait for each other when they agree on something, in seconds
    write_deadline_s  how long a rank may take to write or read its part, in seconds

    With several ranks every rank makes the same calls in the same order, on its main thread; torch.distributed must
    be initialised before `restore()`. One Checkpointer per run directory.
    """

    def __init__(
        self,
        path: str | Path,
        state: Mapping[str, object],
        *,
        every: Every | Literal["auto"] | None = None,
        keep: Keep | None = Keep(last=3),  # noqa: B008  # frozen
        on_error: Literal["warn", "raise"] = "warn",
        strict: bool = False,
        check_replicas: Literal["first", "always", "never"] = "always",
        snapshot: Literal["overlap", "block"] = "overlap",
        slots: int = 2,
        deadline_s: float = 60.0,
        write_deadline_s: float = 1800.0,
    ) -> None:
        if on_error not in ("warn", "raise"):
            raise UsageError(f'on_error={on_error!r}: give "warn" or "raise"')
        if every is not None and every != "auto" and not isinstance(every, Every):
            raise UsageError(f'every={every!r}: give Every(steps=…), Every(minutes=…), "auto", or None')
        self._settings = Settings(keep, deadline_s, write_deadline_s, check_replicas, snapshot, slots)
        self._root = run_directory(path)
        self._state = State(state)
        self._state.watch()
        self._coverage = Coverage(state)
        self._coverage.look()
        self._strict = strict
        self._objects = dict(state)
        expect_ledger()
        self._every = every
        self._schedule = Schedule(every)
        self._on_error = on_error
        self._notice = Notice()
        self._session: Session | None = None
        self._ledger: Ledger | None = None
        self._ledger_opened = False
        self._global_step = 0
        self._micro_step = 0
        self._with_gradients = False
        self._saves = Saves()
        self._captured_once = False
        self._stepped = False
        self._pid = os.getpid()
        self._restored = False
        self._closed = False
        atexit.register(_close_at_exit, weakref.ref(self))

    @property
    def global_step(self) -> int:
        """Optimizer steps done in the whole history of this run, restored ones included."""
        return self._global_step

    @property
    def micro_step(self) -> int:
        """Micro-steps done inside the accumulation window under way; 0 right after an optimizer step.

        A loop that asks this instead of counting itself goes on in the middle of a window after a restore.
        """
        return self._micro_step

    @without_collecting()
    def restore(self, *, strict: bool = True) -> Restored | None:
        """Restore the newest good checkpoint, the same one on all ranks; None on a fresh start.

        Call it once, when all objects exist (wrapped, schedulers made) and before training; every rank must call it.
        Live tensors are written in place. RNG is restored last, so nothing may draw random numbers between this
        call and the first step that an undisturbed run would not have drawn there.

        strict  False: restore what fits by name and warn about the rest, instead of StateMismatch

        Raises StateMismatch if the checkpoint does not fit the objects, NoUsableCheckpoint if there are checkpoints
        but none is whole, DirectoryProblem, NewerFormat, DeadlineExceeded, PeerFailed, UsageError.
        """
        if self._session is not None or self._global_step or self._micro_step:
            raise UsageError("restore() comes once, before the first step and the first save")
        session = self._open()
        settings = self._settings
        recovered = restore_together(
            session.channel, session.store, self._state, settings.deadline_s, settings.write_deadline_s, strict
        )
        restored = self._go_on_from(session, recovered)
        session.begin(recovered.manifest, self._global_step)
        self._begin(session)
        self._coverage.look()
        self._open_ledger()
        if restored is not None and self._ledger is not None:
            self._ledger.note("restored", self._global_step, self._micro_step)
        return restored

    def step(self, *, loss: Any = None, accumulating: bool = False, gradients: bool = False) -> None:
        """Count one optimizer step; save if one is due; end the job cleanly if it was preempted.

        Call it after `optimizer.step()` (and the scheduler's and scaler's). When nothing is due this costs
        microseconds: no communication, no wait for a device, no file access. The step after a save waits until it is
        durable if it is small (64 MiB a rank): a kill then costs at most `every` steps.

        loss          for the ledger only; a number or a tensor, read only if a ledger is kept
        accumulating  True marks a micro-step: gradients were added, the optimizer did not step. `save()` then
                      includes them; saves that are due wait for the window's end.
        gradients     True: a save of this step includes gradients. With several optimizers, of which one stepped and
                      another is still adding up

        Raises Preempted (a SystemExit) on every rank at the same step, after a save, when any rank got SIGTERM or
        SIGUSR1; HistoryExists at the first save if the directory holds checkpoints that were not restored;
        UnsupportedValue or UsageError at the first save if the state cannot be stored, NotCovered there with
        strict=True; with on_error="raise" SaveFailed.
        """
        if accumulating:
            self._micro_step += 1
            return
        if self._session is not None:
            self._session.before_step(self._state.bytes_to_write)
        self._global_step += 1
        self._micro_step = 0
        self._with_gradients = gradients
        self._stepped = True
        self._open_ledger()
        if self._ledger is not None:
            self._ledger.write(self._global_step, loss)
        self._hear_outcomes()
        if self._on_error == "raise" and self._saves.failure is not None:
            raise self._saves.failure
        purpose = self._meet()
        if purpose == "leave":
            self._leave()
        if purpose == "save" or self._schedule.due(self._global_step):
            self._save()

    def save(self) -> None:
        """Save now, at the current `global_step` and micro-step, whatever `every` says. Every rank must call it.

        Returns when the live state may change again; `wait()` returns when the checkpoint is durable. A step that
        this job has saved already is not saved twice.
        """
        self._hear_outcomes()
        self._save()

    def wait(self) -> None:
        """Wait until every save so far is durable.

        Raises SaveFailed if the newest one did not commit, TakenOver if a newer start of the job owns the directory.
        """
        failure = self._finish_saves()
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Wait until every save is durable, and end. The Checkpointer cannot be used afterwards."""
        if self._closed:
            return
        failure = self._finish_saves()
        if self._every is not None and not self._stepped and not self._restored:  # a finished run may be started again
            log.warning(
                "step() was never called, so every=%s saved nothing; call it after each optimizer step", self._every
            )
        self._end(abandon=False)
        if failure is not None and self._on_error == "raise":
            raise failure

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or issubclass(kind, Preempted):
            self.close()
        else:
            # Something failed here or on another rank: waiting for peers could take until the deadline.
            self._end(abandon=True)

    def _open(self) -> Session:
        return open_session(self._root, self._settings, describe_environment())

    def _go_on_from(self, session: Session, recovered: Recovered) -> Restored | None:
        manifest = recovered.manifest
        if manifest is None:
            log.info("no checkpoint in %s: a fresh start", self._root)
            return None
        self._global_step, self._micro_step = manifest.step, manifest.micro_step
        self._restored = True
        self._warn_of_differences(session, manifest, list(recovered.warnings))
        source = str(self._root / recovered.directory)
        restored = Restored(manifest.step, manifest.generation, source, recovered.skipped, manifest.micro_step)
        if session.cluster.rank == 0:
            log.info("%s", restored)
        return restored

    def _warn_of_differences(self, session: Session, manifest: Manifest, found: list[str]) -> None:
        if manifest.world_size != session.cluster.world_size and session.cluster.rank == 0:
            found.insert(
                0, f"it was saved by {manifest.world_size} ranks and is restored by {session.cluster.world_size}"
            )
        found += differences(manifest.environment, session.environment)
        if found:
            log.warning("rank %d goes on from step %d, but: %s", session.cluster.rank, manifest.step, "; ".join(found))

    def _save(self) -> None:
        if self._closed or os.getpid() != self._pid:
            raise UsageError(
                "this Checkpointer is closed, or of the process that this one was forked from: it saves no more"
            )
        save = self._saves.begin(self._global_step, self._micro_step)
        if save is None:
            return
        try:
            self._save_as(save)
        except BaseException:
            self._saves.leave(save)
            raise

    def _save_as(self, save: SaveId) -> None:
        session = self._session or self._begin_without_restore()
        began = time.monotonic()
        try:
            self._coverage.check(strict=self._strict and not self._restored, loud=session.cluster.rank == 0)
            captured = self._state.capture(accumulating=self._micro_step > 0 or self._with_gradients)
        except Exception as error:
            # What cannot be stored at the first save never could: a mistake in the script, not bad luck.
            mistake = not self._captured_once
            session.save(save, None, f"{type(error).__name__}: {error}", mistake)
            if mistake or self._on_error == "raise":
                raise
            return
        self._captured_once = True
        if self._ledger is not None:
            self._ledger.note("saved", self._global_step, self._micro_step)
        session.save(save, captured)
        self._schedule.saved(time.monotonic() - began)

    def _begin_without_restore(self) -> Session:
        """The first save of a job that did not call restore(): fine in an empty directory only."""
        session = self._open()
        session.begin_fresh(self._global_step)
        self._begin(session)
        return session

    def _begin(self, session: Session) -> None:
        self._session = session
        self._schedule.begin(session.starts - 1, session.age_s)
        self._notice.install()

    def _meet(self) -> Literal["save", "leave"] | None:
        """What all ranks agreed to do at this step, if anything; asks for a meeting when this rank wants one."""
        session = self._session
        if session is None or session.meetings is None:
            return None
        try:
            wanted = self._wanted()
            if wanted is not None:
                session.meetings.ask(wanted)
            return session.meetings.now(self._global_step)
        except DeadlineExceeded as error:
            log.warning("%s", error)
            return None
        except UnbrokenError as error:
            # Rank 0 is gone: the next collective of the training itself ends this job.
            log.debug("no meeting: %s", error)
            return None

    def _wanted(self) -> Literal["save", "leave"] | None:
        """What all ranks shall do soon, if it is for this one to say."""
        if self._notice.received:
            return "leave"
        assert self._session is not None
        return "save" if self._session.cluster.rank == 0 and self._schedule.due_by_clock() else None

    def _leave(self) -> None:
        reason = self._notice.received or "another rank was told to leave"
        self._save()
        if self._finish_saves() is not None:
            log.error("leaving at step %d, which could not be saved; older checkpoints are intact", self._global_step)
        self._end(abandon=False)
        raise Preempted(self._global_step, reason)

    def _open_ledger(self) -> None:
        if self._ledger_opened:
            return
        self._ledger_opened = True
        session = self._session
        if session is not None and session.generation is not None:
            cluster, number = session.cluster, session.generation.number
            self._ledger = open_ledger(cluster.rank, cluster.world_size, number, self._state, self._objects)
        else:
            self._ledger = open_ledger(*rank_and_world_size(), 0, self._state, self._objects)

    def _hear_outcomes(self) -> None:
        """Tell what became of earlier saves. Costs a look at an empty queue when there is nothing to tell."""
        session = self._session
        while session is not None and session.outcomes:
            outcome = session.outcomes.popleft()
            if outcome.replan:
                session.planner.forget()
            failure = self._saves.learn(outcome)
            if failure is not None:
                log.error("%s", failure)

    def _finish_saves(self) -> UnbrokenError | None:
        """Wait until no save is in flight; what went wrong with the newest one."""
        if self._session is None:
            return None
        finished = self._session.wait()
        self._hear_outcomes()
        if not finished:
            return DeadlineExceeded("saves are still in flight after the write deadline; is the disk stuck?")
        return self._saves.failure

    def _end(self, abandon: bool) -> None:
        self._closed = True
        self._notice.uninstall()
        if self._session is not None:
            self._session.close(abandon)
        if self._ledger is not None:
            self._ledger.close()


def _close_at_exit(reference: weakref.ref[Checkpointer]) -> None:
    """A script that ends without `close()` still gets its last save; one that failed does not wait for its peers."""
    checkpointer = reference()
    if checkpointer is None or checkpointer._closed or checkpointer._pid != os.getpid():
        return  # a forked child has the object, but not its threads, and the parent's saves are not its own
    if hasattr(sys, "last_value"):
        checkpointer._end(abandon=True)
    else:
        checkpointer.close()
