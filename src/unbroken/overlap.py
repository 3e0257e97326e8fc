"""Copying a snapshot while forward and backward run: only the optimizer waits for it (invariant 7).

What only an optimizer step changes (its parameters, their moments and counters) is copied by a thread of its own after
`step()` has returned. A hook that torch calls before the step of any optimizer in the process is the fence: it waits
until the copy is complete. Of what lies on CUDA devices it only makes the device wait (`cuda.py` says why that keeps
the order). Everything else is copied at once, with the loop standing still.

Nothing is assumed that was not seen. A tensor's first save copies it at once, and is its rehearsal: if one bit of it
has changed by the time of the next fence, it is copied at once from then on; if no fence is ever passed, everything is.
A version counter that moved during a copy drops that save. `tensor.data` does not move it, so a few elements of each
tensor are compared as well: who exchanges weights through `.data` is found out. Who begins later than at the first save
to write single elements so, between `step()` and the next optimizer step, is not, and wants `snapshot="block"`.
"""

from __future__ import annotations

import bisect
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from unbroken import cuda
from unbroken.elements import as_bytes
from unbroken.probes import Probes, RowProbes

log = logging.getLogger(__name__)

GROUP_BYTES = 8 << 20
"""What is copied at once, about: its digests are taken right after it, from the cache."""


@dataclass(slots=True)
class Waiting:
    """Tensors that are copied after the loop went on, in the order in which they lie in an arena."""

    names: list[str] = field(default_factory=list)
    sources: list[Tensor] = field(default_factory=list)
    stored_as: list[str] = field(default_factory=list)
    """Names in the arena."""
    begins: list[int] = field(default_factory=list)
    """Where each lies in the arena, ascending; bytes."""
    _probes: Probes | None = None
    _row_probes: RowProbes | None = None

    def add(self, name: str, source: Tensor, stored_as: str, begin: int) -> None:
        """One more, behind the others."""
        self.names.append(name)
        self.sources.append(source)
        self.stored_as.append(stored_as)
        self.begins.append(begin)

    def probes(self) -> Probes:
        """Elements of the sources."""
        if self._probes is None:
            self._probes = Probes(self.sources, self.in_rows())
        return self._probes

    def row_probes(self) -> RowProbes:
        """The same of sources that are contiguous and lie on one device."""
        if self._row_probes is None:
            self._row_probes = RowProbes(self.sources)
        return self._row_probes

    def in_rows(self) -> list[bool]:
        """Which of the sources lie in memory as in the arena."""
        return [item.is_contiguous() and not (item.is_conj() or item.is_neg()) for item in self.sources]


@dataclass(slots=True)
class FromDevice:
    """What a snapshot brings from one CUDA device."""

    waiting: Waiting
    crossing: cuda.Crossing
    """Its first small result is the sources' probes."""
    arrived: RowProbes
    """Elements of the targets."""
    versions: list[int]
    """Of the sources, when the snapshot was taken."""

    def moved(self) -> list[str]:
        """The names of tensors into which writes were enqueued since."""
        return moved(self.waiting.names, self.waiting.sources, self.versions)

    def different(self) -> list[str]:
        """The names of tensors that did not arrive as they were; after the crossing."""
        where = self.arrived.where_different(self.crossing.brought[0], self.arrived.read())
        return [self.waiting.names[index] for index in where]


@dataclass(slots=True)
class Copy:
    """The rest of a snapshot: tensors that may not change before it is complete."""

    waiting: Waiting
    """Those in the host's memory."""
    targets: list[Tensor]
    copied: Probes
    """Elements of the targets."""
    versions: list[int]
    """Of the sources, when the snapshot was taken."""
    elements: Tensor
    """The sources' probes then."""
    from_devices: list[FromDevice] = field(default_factory=list)
    arena: Any = None
    """Kept until the copy is done."""
    changed: list[str] = field(default_factory=list)
    """Tensors that changed meanwhile: the snapshot is of no step."""
    afterwards: Callable[[], None] = field(default=lambda: None)
    """Called with the host's part complete, and its tensors still unchanged."""
    at_the_end: Callable[[], None] = field(default=lambda: None)
    """Called when all has come from the devices."""
    error: BaseException | None = None
    passable: threading.Event = field(default_factory=threading.Event)
    """Set when the host's tensors may change, and those on devices once `hold_back` was called."""
    done: threading.Event = field(default_factory=threading.Event)
    _looked: bool = False
    """True when what lies on devices was seen to be unchanged, or not."""
    _look: threading.Lock = field(default_factory=threading.Lock)
    _copied: int = 0
    """Bytes of the arena, from its begin, that are complete."""
    _progress: threading.Condition = field(default_factory=threading.Condition)

    @property
    def names(self) -> list[str]:
        """Of all tensors."""
        return [name for part in (self.waiting, *(each.waiting for each in self.from_devices)) for name in part.names]

    def bring(self, results: Mapping[torch.device, Tensor]) -> Callable[[], dict[torch.device, Tensor]] | None:
        """Bring small results of devices along; gives a function for `at_the_end` that returns them on the host.

        None if nothing else comes from one of the devices.
        """
        crossings = {part.crossing.device: part.crossing for part in self.from_devices}
        if not results.keys() <= crossings.keys():
            return None
        places = {device: len(crossings[device].along) for device in results}
        for device, result in results.items():
            crossings[device].along.append(result)
        return lambda: {device: crossings[device].brought[place] for device, place in places.items()}

    def leave(self) -> None:
        """Fix what comes from devices: what they have when all that is enqueued by now is done."""
        try:
            for part in self.from_devices:
                part.crossing.leave()
        except RuntimeError as error:  # no pinned memory, say; it costs this save, and `run` says so
            self.error = error

    @torch.no_grad()
    def run(self) -> None:
        """Copy, and see whether all is still as it was."""
        try:
            if self.error is not None:
                raise self.error
            for part in self.from_devices:
                part.crossing.enqueue()
            self._copy_on_host()
            self.passable.set()
            for part in self.from_devices:
                part.crossing.wait()
            self._look_at_devices()
            different = {name for part in self.from_devices for name in part.different()}
            self.changed += sorted(different.difference(self.changed))
            self.at_the_end()
        except BaseException as error:
            self.error = error
            for part in self.from_devices:
                part.crossing.abandon()
        finally:
            self._tell(sys.maxsize)
            self.passable.set()
            self.done.set()

    def hold_back(self) -> None:
        """Let devices write into the tensors only when they are copied. At the fence, once the copy is passable."""
        self._look_at_devices()
        for part in self.from_devices:
            part.crossing.hold_back()

    def wait_for(self, end: int, deadline_s: float) -> bool:
        """Wait until the arena's bytes before `end` are copied, or never will be; False at the deadline."""
        with self._progress:
            return self._progress.wait_for(lambda: self._copied >= end, deadline_s)

    def _copy_on_host(self) -> None:
        begins, sources = self.waiting.begins, self.waiting.sources
        missing = min((part.waiting.begins[0] for part in self.from_devices), default=sys.maxsize)
        for first, end in _groups(begins):
            self._tell(min(missing, begins[first]))
            torch._foreach_copy_(self.targets[first:end], sources[first:end])
        self._tell(missing)
        self.afterwards()
        names, probes = self.waiting.names, self.waiting.probes()
        # The sources after the copy: a write that had begun before its end may have torn it.
        different = {*probes.where_different(self.elements, probes.read())}
        different.update(self.copied.where_different(self.elements, self.copied.read()))
        self.changed += sorted({*moved(names, sources, self.versions), *map(names.__getitem__, different)})

    def _look_at_devices(self) -> None:
        """By whoever comes first, the fence or the end of the copies: later, counters tell of the next step."""
        with self._look:
            if not self._looked:
                self._looked = True
                self.changed += sorted({name for part in self.from_devices for name in part.moved()})

    def _tell(self, copied: int) -> None:
        with self._progress:
            self._copied = copied
            self._progress.notify_all()


def _groups(begins: Sequence[int]) -> Iterator[tuple[int, int]]:
    """What is copied at once: about GROUP_BYTES, so that writing can begin meanwhile."""
    first = 0
    while first < len(begins):
        end = max(first + 1, bisect.bisect_left(begins, begins[first] + GROUP_BYTES))
        yield first, end
        first = end


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """The version counter of each; it moves whenever torch writes into the storage."""
    return [tensor._version for tensor in tensors]


def moved(names: list[str], tensors: list[Tensor], versions: list[int]) -> list[str]:
    """The names of tensors that were written into since."""
    now = versions_of(tensors)
    return [] if now == versions else [n for n, one, two in zip(names, now, versions, strict=True) if one != two]


class _Rehearsal:
    """Whether tensors change between a save and the next fence, to the last bit."""

    def __init__(self, names: list[str], tensors: list[Tensor]) -> None:
        self.names, self._tensors = names, tensors
        self._versions, self._values = versions_of(tensors), list(map(_value_of, tensors))

    def changed(self) -> list[str]:
        """Their names."""
        values = map(_value_of, self._tensors)
        written = {name for name, one, two in zip(self.names, self._values, values, strict=True) if one != two}
        return sorted(written.union(moved(self.names, self._tensors, self._versions)))


@torch.no_grad()
def _value_of(tensor: Tensor) -> int:
    """A digest of what a tensor holds; of what is on a device its sum, which is taken there."""
    whole = as_bytes(tensor)
    if tensor.device.type == "cpu":
        return xxhash.xxh3_64_intdigest(whole.numpy().data)
    return int(whole.sum(dtype=torch.int64))


class Copier:
    """The copying thread of one Checkpointer, and its fence, which any thread may come to."""

    def __init__(self, deadline_s: float) -> None:
        """deadline_s  how long an optimizer waits for a copy, which is then given up"""
        self._deadline_s = deadline_s
        self._pid = os.getpid()
        self._safe: set[str] = set()
        self._unsafe: set[str] = set()
        self._may_wait: tuple[Collection[str], frozenset[str]] | None = None
        self._rehearsal: _Rehearsal | None = None
        self._graphed = False
        self._current: Copy | None = None
        self._jobs: queue.SimpleQueue[Copy | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="unbroken-copier", daemon=True)
        self._handle: Any = None

    def start(self) -> None:
        """Put up the fence."""
        self._handle = register_optimizer_step_pre_hook(lambda *_: self._fence())
        self._thread.start()

    def stop(self) -> None:
        """Take down the fence, after what is being copied."""
        self.finish()
        if self._handle is not None:
            self._handle.remove()
        self._jobs.put(None)
        if self._thread.is_alive():
            self._thread.join(self._deadline_s)

    def may_wait(self, fenced: Collection[str]) -> frozenset[str]:
        """Which of the tensors that only an optimizer changes need not be copied at once."""
        if self._graphed or cuda.is_capturing():
            return frozenset()
        if self._may_wait is None or self._may_wait[0] is not fenced:
            self._may_wait = fenced, frozenset(self._safe.intersection(fenced))
        return self._may_wait[1]

    def rehearse(self, tensors: Mapping[str, Tensor]) -> None:
        """See until the next fence which of these tensors change, all of which were copied at once."""
        new = {name: tensors[name] for name in tensors.keys() - self._safe - self._unsafe}
        if new:
            self._rehearsal = _Rehearsal(list(new), list(new.values()))

    def submit(self, copy: Copy) -> None:
        """Begin to copy. Called by the training thread, which has passed the fence."""
        copy.leave()
        self._current = copy
        self._jobs.put(copy)

    def finish(self) -> None:
        """Return when no copy is under way any more."""
        copy = self._current
        if copy is None or os.getpid() != self._pid:
            return  # a forked child has neither the thread nor the state that is copied
        if not copy.done.wait(self._deadline_s):
            copy.changed.append(copy.names[0])
        if copy.changed:
            self._unsafe.update(copy.changed)
            self._safe.difference_update(copy.changed)
            self._may_wait = None
        self._current = None

    def _fence(self) -> None:
        """Before the step of an optimizer. Costs three looks when nothing is under way."""
        if cuda.is_capturing() and not self._graphed:
            log.debug("all is copied at once from now on, since the step of an optimizer is captured in a graph")
            self._graphed = True
        self._pass()
        if self._graphed:  # nothing may be looked at while a graph is captured
            self._rehearsal = None
        if self._rehearsal is not None:
            changed = self._rehearsal.changed()
            if changed:
                log.debug("copied at once from now on, since they change outside of optimizers: %s", changed)
            self._unsafe.update(changed)
            self._safe.update(set(self._rehearsal.names).difference(changed))
            self._rehearsal = self._may_wait = None

    def _pass(self) -> None:
        """Return when the optimizer may enqueue its step, or, without a device, take it."""
        copy = self._current
        # While a graph is captured no stream may wait for what is not part of it.
        if copy is None or not copy.from_devices or copy.done.is_set() or self._graphed:
            self.finish()
        elif os.getpid() == self._pid and copy.passable.wait(self._deadline_s):
            copy.hold_back()
        else:
            self.finish()

    def _serve(self) -> None:
        while (copy := self._jobs.get()) is not None:
            copy.run()
            del copy  # or the thread would hold it, with all its tensors, until the next one
