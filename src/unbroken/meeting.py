"""How ranks agree on one step at which all of them do something: save by the clock, or leave.

`Checkpointer.step` may not make a collective call, and a signal may reach one rank only. So any rank asks for a
meeting through the control channel; a thread on every rank sees that, and answers with the step its training loop is
at. The meeting is one step after the highest answer. It cannot be missed: once a rank has answered "step s", its
training loop does not pass the end of step s + 1 before it knows the meeting's step. And it cannot block: answers are
given by threads, so they come even from ranks that stand in an all-reduce.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from unbroken.cluster import Channel
from unbroken.errors import DeadlineExceeded, UnbrokenError

log = logging.getLogger(__name__)

Purpose = Literal["save", "leave"]
LOOK_S = 0.25
"""Pause between two looks for a request, in seconds; longer on many ranks, so that rank 0's store stays idle."""


class _Answer(msgspec.Struct):
    step: int
    leave: bool


class _Meeting(msgspec.Struct):
    step: int
    purpose: Purpose


@dataclass(slots=True)
class Meetings:
    """One rank's part in meetings. `ask` and `now` are for the training thread; a thread of ours does the rest."""

    channel: Channel
    deadline_s: float
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _known: threading.Condition = field(init=False)
    _look: threading.Event = field(default_factory=threading.Event)
    _number: int = 0
    _step: int = 0
    _leave: bool = False
    _answered: int | None = None
    _meeting: _Meeting | None = None
    _failure: str = ""
    _stopped: bool = False
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        self._known = threading.Condition(self._lock)

    def start(self, step: int) -> None:
        """Begin to watch. `step` is where the training loop is now."""
        self._step = step
        if self.channel.world_size > 1:
            self._thread = threading.Thread(target=self._watch, name="unbroken-meetings", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped = True
        self._look.set()
        self.channel.stopped.set()
        if self._thread is not None:
            self._thread.join(self.deadline_s)

    def ask(self, purpose: Purpose) -> None:
        """Ask all ranks to meet soon. Asking again before the meeting changes nothing, except that leaving wins."""
        with self._lock:
            self._leave = self._leave or purpose == "leave"
            if self.channel.world_size == 1:
                self._meeting = self._meeting or _Meeting(self._step + 1, purpose)
                return
            if self._answered is not None:
                return
            number = self._number
        self.channel.post(f"meeting/{number}/asked", purpose.encode())
        self._look.set()

    def now(self, step: int) -> Purpose | None:
        """Called at the end of each step: what all ranks do at this one, if anything.

        Costs a lock when no meeting is under way. Waits, up to the deadline, only at the one step where it must not
        go on without knowing. Raises DeadlineExceeded then.
        """
        with self._known:
            self._step = step
            if self.channel.world_size == 1:
                return self._now_alone()
            if self._answered is None or step <= self._answered:
                return None
            if not self._known.wait_for(lambda: self._meeting is not None or self._failure, self.deadline_s):
                self._failure = "no answer"
            if self._meeting is None:
                failure, self._failure, self._answered = self._failure, "", None
                self._number += 1
                raise DeadlineExceeded(f"ranks could not agree on a step to meet at: {failure}")
            if step < self._meeting.step:
                return None
            purpose: Purpose = self._meeting.purpose
            self._meeting = self._answered = None
            self._number += 1
            return purpose

    def _now_alone(self) -> Purpose | None:
        if self._meeting is None:
            return None
        self._meeting = None
        return "leave" if self._leave else "save"

    def _watch(self) -> None:
        pause = max(LOOK_S, self.channel.world_size / 4096)
        try:
            while not self._stopped:
                self._look.wait(pause)
                self._look.clear()
                if not self._stopped and self._answered is None:
                    self._attend(self._number)
        except UnbrokenError as error:
            # Rank 0 is gone: the job cannot go on, and its own error will say so.
            log.debug("meetings end: %s", error)
            with self._known:
                self._failure = str(error)
                self._known.notify_all()

    def _attend(self, number: int) -> None:
        prefix = f"meeting/{number}"
        if not self.channel.has(f"{prefix}/asked"):
            return
        with self._known:
            self._answered = self._step
            answer = _Answer(self._step, self._leave)
        self.channel.post(f"{prefix}/answer/{self.channel.rank}", msgspec.json.encode(answer))
        if self.channel.rank == 0:
            self._set_meeting(prefix)
        data = self.channel.read(f"{prefix}/set", self.deadline_s, "rank 0 to say at which step to meet")
        with self._known:
            self._meeting = msgspec.json.decode(data, type=_Meeting)
            self._known.notify_all()

    def _set_meeting(self, prefix: str) -> None:
        keys = [f"{prefix}/answer/{rank}" for rank in range(self.channel.world_size)]
        missing = self.channel.wait_all(keys, self.deadline_s)
        if missing:
            raise DeadlineExceeded(f"no answer from {', '.join(missing)} within {self.deadline_s:g} s")
        answers = [msgspec.json.decode(self.channel.take(key), type=_Answer) for key in keys]
        asked = self.channel.take(f"{prefix}/asked").decode()
        purpose: Purpose = "leave" if asked == "leave" or any(answer.leave for answer in answers) else "save"
        meeting = _Meeting(max(answer.step for answer in answers) + 1, purpose)
        self.channel.post(f"{prefix}/set", msgspec.json.encode(meeting))
        self.channel.forget(keys)
