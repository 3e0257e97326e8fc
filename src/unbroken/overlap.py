"""Copying a snapshot while forward and backward run: only the optimizer waits for it (invariant 7).

What only an optimizer step changes (its parameters, their moments and counters) is copied by a thread of its own after
`step()` has returned. A hook that torch calls before the step of any optimizer in the process is the fence: it waits
until the copy is complete. Everything else is copied at once, with the loop standing still.

Nothing is assumed that was not seen. A tensor's first save copies it at once, and is its rehearsal: if it has changed
by the time of the next fence, it is copied at once from then on; if no fence is ever passed, everything is. A version
counter that moved during a copy drops that save. `tensor.data` does not move it, so a few elements of each tensor are
compared as well: who exchanges weights through `.data` is found out; who writes single elements so, between `step()`
and the next optimizer step, is not, and wants `snapshot="block"`.
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
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from unbroken.probes import Probes

log = logging.getLogger(__name__)

GROUP_BYTES = 32 << 20


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

    def in_rows(self) -> list[bool]:
        """Which of the sources lie in memory as in the arena."""
        return [item.is_contiguous() and not (item.is_conj() or item.is_neg()) for item in self.sources]


@dataclass(slots=True)
class Copy:
    """The rest of a snapshot: tensors that may not change before it is complete."""

    waiting: Waiting
    targets: list[Tensor]
    copied: Probes
    """Elements of the targets."""
    versions: list[int]
    """Of the sources, when the snapshot was taken."""
    elements: Tensor
    """The sources' probes then."""
    changed: list[str] = field(default_factory=list)
    """Tensors that changed meanwhile: the snapshot is of no step."""
    afterwards: Callable[[], None] = field(default=lambda: None)
    """Called with the copy complete, and the tensors still unchanged."""
    error: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)
    _copied: int = 0
    """Bytes of the arena, from its begin, that are complete."""
    _progress: threading.Condition = field(default_factory=threading.Condition)

    @torch.no_grad()
    def run(self) -> None:
        """Copy, and see whether all is still as it was."""
        try:
            begins, sources = self.waiting.begins, self.waiting.sources
            self._tell(begins[0])
            for first, end in _groups(begins):
                torch._foreach_copy_(self.targets[first:end], sources[first:end])
                self._tell(begins[end] if end < len(begins) else sys.maxsize)
            self.afterwards()
            names = self.waiting.names
            different = self.copied.where_different(self.elements, self.copied.read())
            self.changed += sorted({*moved(names, sources, self.versions), *map(names.__getitem__, different)})
        except BaseException as error:
            self.error = error
        finally:
            self._tell(sys.maxsize)
            self.done.set()

    def wait_for(self, end: int, deadline_s: float) -> bool:
        """Wait until the arena's bytes before `end` are copied, or never will be; False at the deadline."""
        with self._progress:
            return self._progress.wait_for(lambda: self._copied >= end, deadline_s)

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


class Copier:
    """The copying thread of one Checkpointer, and its fence, which any thread may come to."""

    def __init__(self, deadline_s: float) -> None:
        """deadline_s  how long an optimizer waits for a copy, which is then given up"""
        self._deadline_s = deadline_s
        self._pid = os.getpid()
        self._safe: set[str] = set()
        self._unsafe: set[str] = set()
        self._may_wait: tuple[Collection[str], frozenset[str]] | None = None
        self._rehearsal: tuple[list[str], list[Tensor], list[int]] | None = None
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
        if self._may_wait is None or self._may_wait[0] is not fenced:
            self._may_wait = fenced, frozenset(self._safe.intersection(fenced))
        return self._may_wait[1]

    def rehearse(self, tensors: Mapping[str, Tensor]) -> None:
        """See until the next fence which of these tensors change, all of which were copied at once."""
        new = {name: tensors[name] for name in tensors.keys() - self._safe - self._unsafe}
        if new:
            self._rehearsal = list(new), list(new.values()), versions_of(new.values())

    def submit(self, copy: Copy) -> None:
        """Begin to copy. Called by the training thread, which has passed the fence."""
        self._current = copy
        self._jobs.put(copy)

    def finish(self) -> None:
        """Return when no copy is under way any more."""
        copy = self._current
        if copy is None or os.getpid() != self._pid:
            return  # a forked child has neither the thread nor the state that is copied
        if not copy.done.wait(self._deadline_s):
            copy.changed.append(copy.waiting.names[0])
        if copy.changed:
            self._unsafe.update(copy.changed)
            self._safe.difference_update(copy.changed)
            self._may_wait = None
        self._current = None

    def _fence(self) -> None:
        """Before the step of an optimizer. Costs two looks when nothing is under way."""
        self.finish()
        if self._rehearsal is not None:
            changed = moved(*self._rehearsal)
            if changed:
                log.debug("copied at once from now on, since they change outside of optimizers: %s", changed)
            self._unsafe.update(changed)
            self._safe.update(set(self._rehearsal[0]).difference(changed))
            self._rehearsal = self._may_wait = None

    def _serve(self) -> None:
        while (copy := self._jobs.get()) is not None:
            copy.run()
            del copy  # or the thread would hold it, with all its tensors, until the next one
