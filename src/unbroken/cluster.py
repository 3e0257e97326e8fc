"""The ranks of a job and a control channel between them.

The channel is a key-value store on rank 0 (`torch.distributed.TCPStore`), never a training process group: a save that
waits for a disk must not stand between two all-reduces, and a rank that hangs must become an error with a name, not a
silent wait. Every wait has a deadline (invariant 12) and ends early when the channel is closed.

Waiting is polling with growing pauses: a blocking wait of TCPStore holds its connection, so that no other thread can
speak meanwhile, and can neither be cut short nor end without noise. So one connection per process serves all threads.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import msgspec
import torch.distributed as dist

from unbroken import errors
from unbroken.errors import DeadlineExceeded, PeerFailed, UnbrokenError, UsageError

T = TypeVar("T")

_stores: Any = dist  # torch.distributed re-exports its stores without saying so to type checkers

FIRST_PAUSE_S = 0.001
LONGEST_PAUSE_S = 0.05
CONNECT_S = 15.0
"""How long one address of rank 0 is tried before the next one. TCPStore looks up names, which alone can take 5 s."""


class Message(msgspec.Struct):
    """What one rank tells the others in an exchange: a payload or an error."""

    payload: bytes = b""
    """Whatever the phase is about, encoded by the caller."""
    error: str = ""
    """The text of the error that stopped this rank; empty if none did."""
    error_class: str = ""
    """Name of the error's class in `unbroken.errors`."""


@dataclass(slots=True)
class Channel:
    """The control store as one Checkpointer sees it. May be used by several threads.

    Keys are seen by all ranks and live until `forget`. Values are bytes.
    """

    rank: int
    world_size: int
    store: Any
    """A torch.distributed store: `set`, `get`, `check`, `delete_key`."""
    namespace: str
    stopped: threading.Event
    """Ends every wait of this channel, with PeerFailed."""
    lost: str = ""
    """Why rank 0 cannot be reached any more; empty while it can."""

    def post(self, key: str, value: bytes) -> None:
        """Make `value` visible to all ranks under `key`. Does not wait. Raises PeerFailed if rank 0 is gone."""
        self._call(lambda: self.store.set(self._full(key), value))

    def has(self, key: str) -> bool:
        """True if some rank has posted `key`. One round trip."""
        return bool(self._call(lambda: self.store.check([self._full(key)])))

    def read(self, key: str, deadline_s: float, waiting_for: str) -> bytes:
        """The value of `key`, waiting up to `deadline_s` seconds for it.

        waiting_for  completes the sentence "rank 3 waited 60 s for …"
        Raises DeadlineExceeded, or PeerFailed if rank 0 is gone or the channel was stopped.
        """
        if self.wait_all([key], deadline_s):
            raise DeadlineExceeded(f"rank {self.rank} waited {deadline_s:g} s for {waiting_for}")
        return self.take(key)

    def take(self, key: str) -> bytes:
        """The value of a key that is known to be there."""
        value = self._call(lambda: self.store.get(self._full(key)))
        return bytes(value)

    def wait_all(self, keys: Iterable[str], deadline_s: float) -> list[str]:
        """Wait until all `keys` are there; returns those still missing at the deadline (empty: all came)."""
        missing = list(keys)
        begin = time.monotonic()
        while True:
            missing = [key for key in missing if not self.has(key)]
            waited = time.monotonic() - begin
            if not missing or waited >= deadline_s:
                return missing
            # A pause in proportion to the wait: what is quick is noticed at once, what is slow costs few looks.
            pause = min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, waited / 20), deadline_s - waited)
            if self.stopped.wait(pause):
                raise PeerFailed(f"rank {self.rank} stopped waiting: its control channel was closed")

    def forget(self, keys: Iterable[str]) -> None:
        """Drop keys that every rank has read, so that the store does not grow with the number of saves."""
        for key in keys:
            self._call(partial(self.store.delete_key, self._full(key)))

    def exchange(self, phase: str, message: Message, deadline_s: float) -> list[Message]:
        """All ranks' messages of one phase, by rank. Every rank must call it with the same phase, once.

        Rank 0 gathers and hands out, so a rank that did not come is named by the same error on every rank.
        Raises DeadlineExceeded, PeerFailed.
        """
        self.post(f"{phase}/from/{self.rank}", msgspec.json.encode(message))
        if self.rank == 0:
            self._gather(phase, deadline_s)
        # Rank 0 needs a moment after its own deadline to tell the others who is missing.
        data = self.read(f"{phase}/all", deadline_s + CONNECT_S, f"rank 0's answer in phase '{phase}'")
        gathered = msgspec.json.decode(data, type=list[Message] | str)
        if isinstance(gathered, str):
            raise DeadlineExceeded(gathered)
        return gathered

    def _gather(self, phase: str, deadline_s: float) -> None:
        keys = [f"{phase}/from/{rank}" for rank in range(self.world_size)]
        missing = self.wait_all(keys, deadline_s)
        if missing:
            ranks = ", ".join(key.rpartition("/")[2] for key in missing)
            text = (
                f"rank(s) {ranks} did not come to phase '{phase}' within {deadline_s:g} s; "
                "are they alive, and do all ranks make the same calls?"
            )
            self.post(f"{phase}/all", msgspec.json.encode(text))
            return
        messages = [msgspec.json.decode(self.take(key), type=Message) for key in keys]
        self.post(f"{phase}/all", msgspec.json.encode(messages))
        self.forget(keys)

    def agree(self, phase: str, act: Callable[[], T], deadline_s: float) -> T:
        """Run `act` on every rank and go on only if it succeeded on all of them.

        Returns this rank's result. If `act` raised an UnbrokenError anywhere, every rank raises: a rank whose own act
        failed its own error, the others the first failing rank's, of the same class and naming that rank.
        """
        result, own = _attempt(act)
        messages = self.exchange(phase, _error_message(own), deadline_s)
        if own is not None:
            raise own
        for rank, message in enumerate(messages):
            if message.error:
                raise _revive(message, f"rank {rank}: ")
        return result  # type: ignore[return-value]  # no error means act returned

    def decide(self, phase: str, act: Callable[[], bytes], deadline_s: float) -> bytes:
        """Run `act` on rank 0 only and give its result to every rank; an UnbrokenError is raised on every rank."""
        key = f"{phase}/decided"
        if self.rank == 0:
            result, own = _attempt(act)
            message = _error_message(own)
            message.payload = result or b""
            self.post(key, msgspec.json.encode(message))
            if own is not None:
                raise own
        message = msgspec.json.decode(self.read(key, deadline_s, f"rank 0's decision in phase '{phase}'"), type=Message)
        if message.error:
            raise _revive(message, "")
        return message.payload

    def _full(self, key: str) -> str:
        return f"{self.namespace}/{key}"

    def _call(self, call: Callable[[], T]) -> T:
        # A lost connection stays lost, and every further try makes torch print a page of C++ frames.
        if self.lost:
            raise PeerFailed(self.lost)
        try:
            return call()
        except RuntimeError as error:  # DistNetworkError and DistStoreError are RuntimeErrors
            self.lost = (
                f"rank {self.rank} lost the control channel: rank 0 is gone or out of reach ({_first_line(error)})"
            )
            raise PeerFailed(self.lost) from error


@dataclass(slots=True)
class Cluster:
    """Who takes part, and how to reach them."""

    rank: int
    world_size: int
    store: Any = field(repr=False)
    """The connection to the control store; on rank 0 the store itself."""
    jobs: int = 0
    """How many Checkpointers have used this cluster; each gets a namespace of its own."""

    def new_namespace(self) -> str:
        """A namespace for one Checkpointer. Ranks must make their Checkpointers in the same order."""
        self.jobs += 1
        return f"unbroken/{self.jobs}"

    def channel(self, namespace: str, stopped: threading.Event) -> Channel:
        """The store as seen from `namespace`; `stopped` ends its waits."""
        return Channel(self.rank, self.world_size, self.store, namespace, stopped)


_connected: tuple[Any, Cluster] | None = None


def connect(deadline_s: float) -> Cluster:
    """The cluster this process belongs to: that of the default process group, or a single process.

    The control store is made once per process group and shared by all Checkpointers of the process.
    Raises UsageError if the launcher says there are several ranks but no process group exists yet, DeadlineExceeded
    or PeerFailed if rank 0 cannot be reached.
    """
    global _connected
    if not (dist.is_available() and dist.is_initialized()):
        return _alone()
    group = dist.group.WORLD
    if dist.get_world_size() == 1:
        return _alone(check_launcher=False)
    if _connected is None or _connected[0] is not group:
        _connected = (group, _connect_ranks(dist.get_rank(), dist.get_world_size(), deadline_s))
    return _connected[1]


def rank_and_world_size() -> tuple[int, int]:
    """This process's rank and the number of ranks, as torch.distributed knows them; (0, 1) without it."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _alone(check_launcher: bool = True) -> Cluster:
    launched = os.environ.get("WORLD_SIZE", "1")
    if check_launcher and launched.isdigit() and int(launched) > 1:
        raise UsageError(
            f"the launcher started {launched} ranks, but torch.distributed is not initialised: "
            "call torch.distributed.init_process_group() before Checkpointer.restore()"
        )
    return Cluster(0, 1, _stores.HashStore())


def _connect_ranks(rank: int, world_size: int, deadline_s: float) -> Cluster:
    # The one private name this module leans on; tests/test_cluster.py fails loudly if torch drops it.
    shared = dist.distributed_c10d._get_default_store()
    key = "unbroken/control"
    if rank == 0:
        server = _stores.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=deadline_s), wait_for_workers=False)
        nonce = secrets.token_hex(8)
        server.set("nonce", nonce)
        shared.set(key, json.dumps({"hosts": _own_addresses(), "port": server.port, "nonce": nonce}))
        return Cluster(0, world_size, server)
    begin = time.monotonic()
    try:
        shared.wait([key], timedelta(seconds=deadline_s))
    except RuntimeError as error:
        if time.monotonic() - begin < deadline_s:
            raise PeerFailed(f"rank {rank} cannot reach the process group's store: {_first_line(error)}") from error
        raise DeadlineExceeded(
            f"rank {rank} waited {deadline_s:g} s for rank 0 to open the control channel; "
            "every rank must call restore() (or save)"
        ) from error
    where = json.loads(shared.get(key))
    return Cluster(rank, world_size, _connect_store(where["hosts"], where["port"], where["nonce"], deadline_s))


def _own_addresses() -> list[str]:
    """Names under which other nodes may reach this one, best first."""
    names = [os.environ.get("MASTER_ADDR", ""), socket.gethostname(), "127.0.0.1"]
    return list(dict.fromkeys(name for name in names if name))


def _connect_store(hosts: list[str], port: int, nonce: str, deadline_s: float) -> Any:
    failures = []
    for host in hosts:
        try:
            store = _stores.TCPStore(host, port, None, False, timedelta(seconds=CONNECT_S), wait_for_workers=False)
            # Another node's loopback may have something else on this port.
            if store.check(["nonce"]) and store.get("nonce").decode() == nonce:
                store.set_timeout(timedelta(seconds=deadline_s))
                return store
            failures.append(f"{host}:{port} is another store")
        except RuntimeError as error:
            failures.append(f"{host}:{port} {_first_line(error)}")
    raise PeerFailed(f"cannot reach rank 0's control channel: {'; '.join(failures)}")


def _attempt(act: Callable[[], T]) -> tuple[T | None, UnbrokenError | None]:
    try:
        return act(), None
    except UnbrokenError as error:
        return None, error
    except Exception as error:
        # The other ranks wait for word of this one: they must hear of a failing disk, and of a mistake of ours, too.
        wrapped = UnbrokenError(f"{type(error).__name__}: {error}")
        wrapped.__cause__ = error
        return None, wrapped


def _error_message(error: UnbrokenError | None) -> Message:
    return Message() if error is None else Message(error=str(error), error_class=type(error).__name__)


def _revive(message: Message, prefix: str) -> UnbrokenError:
    kind = getattr(errors, message.error_class, PeerFailed)
    if not (isinstance(kind, type) and issubclass(kind, UnbrokenError)):
        kind = PeerFailed
    return kind(prefix + message.error)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
