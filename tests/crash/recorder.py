"""What the save protocol does to a directory: every system call that changes it, in order, and what orders them.

In: a directory, and code that runs inside `with recorder:` on any number of threads. Out: `recorder.trace`.
The functions of the `os` module are replaced while recording (`pathlib` calls them too); each call is made and noted
under one lock, so that the order in the trace is the order in which the kernel saw them. Calls that fail change
nothing and are not noted. Builtin `open` is not seen: `test_recorder.py` replays each trace and compares the result
with the real directory, and has `strace` look for calls that were missed.

Beside the calls stand messages between threads (`RecordingStore`), so that `orders.py` knows which calls are
independent, and promises: the moments from which on a checkpoint must survive.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch.distributed as dist

from unbroken.commit import Outcome

TRAINING = "training"
"""The actor that all threads without a role of their own are: they only begin and end things."""


@dataclass(frozen=True, slots=True)
class Call:
    """One system call that changed the directory, or made changes durable."""

    kind: Literal["mkdir", "create", "write", "truncate", "sync", "link", "rename", "unlink", "rmdir"]
    path: str
    """Relative to the recorded directory; `.` is the directory itself."""
    target: str = ""
    """The new name of a link or a rename."""
    offset: int = 0
    """Where a write begins; the size after a truncate."""
    data: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class Promise:
    """From here on this step must be restored, or a later one: its outcome was told to the ranks."""

    step: int


@dataclass(frozen=True, slots=True)
class Message:
    """A thread posted a key of the control channel, or saw it."""

    key: str
    sent: bool


@dataclass(frozen=True, slots=True)
class Quiet:
    """Nothing is under way: what follows comes after all that was."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened, and who did it."""

    actor: str
    what: Call | Promise | Message | Quiet


NEVER_SEEN = ("writev", "pwrite", "pwritev", "symlink", "sendfile", "copy_file_range", "posix_fallocate", "mknod")
"""Calls that our stores do not make: the recorder refuses them inside its directory instead of missing them."""


@dataclass
class Recorder:
    """Records while its `with` block runs; one at a time in a process. Threads may use it at once."""

    base: Path
    fail: Callable[[Call], OSError | None] = lambda _call: None
    """Asked before each call that would change something: an error makes the call fail instead."""
    trace: list[Event] = field(default_factory=list)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _paths: dict[int, str] = field(default_factory=dict)
    """Where open descriptors of the directory lead. A file that is open must keep its name."""
    _real: dict[str, Any] = field(default_factory=dict)

    def __enter__(self) -> Recorder:
        simple = {"mkdir": "mkdir", "rmdir": "rmdir", "unlink": "unlink", "remove": "unlink"}
        moving = {"link": "link", "rename": "rename", "replace": "rename"}
        ours: dict[str, Any] = {name: self._changing(name, kind) for name, kind in (simple | moving).items()}
        ours |= {name: self._refusing(name) for name in NEVER_SEEN}
        ours |= {name: self._syncing(name) for name in ("fsync", "fdatasync")}
        ours |= {"open": self._open, "close": self._close, "write": self._write, "ftruncate": self._ftruncate}
        for name, function in ours.items():
            self._real[name] = getattr(os, name)
            setattr(os, name, function)
        return self

    def __exit__(self, *_exception: object) -> None:
        for name, function in self._real.items():
            setattr(os, name, function)

    def note(self, what: Call | Promise | Message | Quiet) -> None:
        """Add an event of the calling thread."""
        with self._lock:
            self.trace.append(Event(_actor(), what))

    def quiet(self) -> int:
        """Note that nothing is under way; the number of events so far."""
        self.note(Quiet())
        return len(self.trace)

    def _inside(self, path: Any) -> str | None:
        if isinstance(path, int):
            return self._paths.get(path)
        with contextlib.suppress(ValueError):
            return Path(os.path.abspath(path)).relative_to(self.base).as_posix()  # noqa: PTH100  # resolves no links
        return None

    def _ask(self, call: Call) -> None:
        error = self.fail(call)
        if error is not None:
            raise error

    def _changing(self, name: str, kind: Any) -> Callable[..., Any]:
        def act(path: Any, *rest: Any, **keywords: Any) -> Any:
            inside = self._inside(path)
            if inside is None:
                return self._real[name](path, *rest, **keywords)
            assert not any(keywords.values()), "relative to a descriptor: teach the recorder"
            target = (self._inside(rest[0]) or "") if kind in ("link", "rename") else ""
            call = Call(kind, inside, target)
            with self._lock:
                self._ask(call)
                result = self._real[name](path, *rest, **keywords)
                self.note(call)
            return result

        return act

    def _refusing(self, name: str) -> Callable[..., Any]:
        def act(*arguments: Any, **keywords: Any) -> Any:
            paths = [argument for argument in arguments if isinstance(argument, (int, str, os.PathLike))]
            assert not any(self._inside(path) for path in paths), f"the recorder does not know os.{name}: teach it"
            return self._real[name](*arguments, **keywords)

        return act

    def _syncing(self, name: str) -> Callable[..., Any]:
        def act(fd: int) -> None:
            with self._lock:
                inside = self._inside(fd)
                if inside is not None:
                    self._ask(Call("sync", inside))
                self._real[name](fd)
                if inside is not None:
                    self.note(Call("sync", inside))

        return act

    def _open(self, path: Any, flags: int, *rest: Any, **keywords: Any) -> int:
        inside = self._inside(path)
        if inside is None:
            return int(self._real["open"](path, flags, *rest, **keywords))
        assert not any(keywords.values()), "relative to a descriptor: teach the recorder"
        with self._lock:
            calls = [Call("create", inside)] if flags & os.O_CREAT and not os.path.lexists(path) else []
            calls += [Call("truncate", inside)] if flags & os.O_TRUNC else []
            for call in calls:
                self._ask(call)
            fd = int(self._real["open"](path, flags, *rest))
            self._paths[fd] = inside
            for call in calls:
                self.note(call)
            return fd

    def _close(self, fd: int) -> None:
        with self._lock:
            self._paths.pop(fd, None)
            self._real["close"](fd)

    def _write(self, fd: int, data: Any) -> int:
        with self._lock:
            inside = self._inside(fd)
            if inside is not None:
                self._ask(Call("write", inside))
            count = int(self._real["write"](fd, data))
            if inside is not None:
                end = os.lseek(fd, 0, os.SEEK_CUR)
                self.note(Call("write", inside, offset=end - count, data=bytes(data[:count])))
            return count

    def _ftruncate(self, fd: int, size: int) -> None:
        with self._lock:
            self._real["ftruncate"](fd, size)
            inside = self._inside(fd)
            if inside is not None:
                self.note(Call("truncate", inside, offset=size))


@dataclass
class RecordingStore:
    """The control channel's store, with a note of every key that a thread posts or sees."""

    recorder: Recorder
    store: Any = field(default_factory=dist.HashStore)

    def set(self, key: str, value: bytes) -> None:
        """Post a key. What rank 0 tells the ranks about a save is a promise."""
        if key.endswith("/outcome"):
            outcome = msgspec.json.decode(value, type=Outcome)
            if outcome.committed:
                self.recorder.note(Promise(outcome.step))
        self.recorder.note(Message(key, sent=True))
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        """A key's value."""
        value = bytes(self.store.get(key))
        self.recorder.note(Message(key, sent=False))
        return value

    def check(self, keys: list[str]) -> bool:
        """True if all keys are there."""
        found = bool(self.store.check(keys))
        for key in keys if found else []:
            self.recorder.note(Message(key, sent=False))
        return found

    def delete_key(self, key: str) -> None:
        """Forget a key."""
        self.store.delete_key(key)


def _actor() -> str:
    thread = threading.current_thread()
    serves = thread.name.startswith(("unbroken-writer", "unbroken-coordinator"))
    return f"{thread.name}-{thread.ident}" if serves else TRAINING
