"""From CUDA devices into an arena and back, without a thread that waits: streams and events keep the order.

Why a copy is of one step (invariant 7), although the host runs ahead of the device. Two edges hold it:

    compute stream    ... step k | ready | forward and backward | wait for `copied` | step k+1 ...
    side stream                    wait for `ready` | copies | copied |

- `ready` is recorded at the save, on the stream that is current then. The copies begin when it has happened: after
  every kernel of step k, whatever of it had run when `save()` was called. What is enqueued later, up to the next step
  of an optimizer, only reads.
- The fence, a hook before the step of any optimizer, runs on the host long before that step's kernels do. It does not
  wait for the copies; it makes the stream wait that is current in the hook, on which the step enqueues its kernels
  next. Stream order does the rest. But to wait for an event that was not recorded yet is to wait for nothing: so the
  fence first waits, on the host, until the copying thread has enqueued all copies and recorded `copied`.
- Version counters move when a write is enqueued, not when it runs. That is enough: standing still from the save to
  the fence, they say that nobody enqueued a write between the two edges. They are looked at once, at the fence or when
  the copies are done, whichever comes first; after the fence the next step moves them, which means nothing.
- Writes through `tensor.data` move none. Probes are gathered on the compute stream before `ready`, so they are of step
  k, and compared on the host with what arrived.
- A graph's replay moves no counter and comes to no fence. Once an optimizer was captured, all is copied at once.
- What is copied must not be given to somebody else meanwhile, nor the arena: both are kept until `copied` has
  happened. So no `record_stream` is needed, which would give memory back later than that.

Threads: `leave` and pinning on the training thread, since another one must not make such calls while a graph is being
captured; `hold_back` on whichever comes to the fence; the rest on the copying thread, which after `copied` makes none.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

log = logging.getLogger(__name__)

_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every device."""


def is_on_cuda(tensor: Tensor) -> bool:
    """True if a CUDA device has it."""
    return tensor.is_cuda


def can_cross(tensor: Tensor) -> bool:
    """True if its bytes lie on a CUDA device as they shall in the arena; others need memory there to be copied."""
    return is_on_cuda(tensor) and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def is_capturing() -> bool:
    """True while the current stream records a graph: nothing runs then, and nothing may be waited for."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of this device on which all copies of this process run."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@dataclass(slots=True)
class Crossing:
    """Copies from one device into an arena, each object for one snapshot. See above which thread calls what."""

    device: torch.device
    sources: list[Tensor]
    """At least one; see `can_cross`. Kept until the copies are done."""
    targets: list[Tensor]
    """In the arena; if that is pinned, no thread stands still."""
    along: list[Tensor] = field(default_factory=list)
    """Small results of kernels that were enqueued before `leave`."""
    brought: list[Tensor] = field(default_factory=list)
    """The same on the host; complete after `wait`."""
    _ready: torch.cuda.Event = field(default_factory=lambda: _event())
    _copied: torch.cuda.Event = field(default_factory=lambda: _event())

    def leave(self) -> None:
        """Fix what is copied: what the work leaves behind that is enqueued by now on the current stream."""
        self.brought = [_on_host(small) for small in self.along]
        self._ready.record(torch.cuda.current_stream(self.device))
        side_stream(self.device)  # made here: the first of a process makes calls that a capture forbids

    def enqueue(self) -> None:
        """Let the device copy when it comes to it."""
        torch.cuda.set_device(self.device)  # or going back to this thread's own would make a context on device 0
        side = side_stream(self.device)
        side.wait_event(self._ready)
        with torch.cuda.stream(side):
            _copy(self.targets, self.sources)
            if self.along:
                _copy(self.brought, self.along)
        self._copied.record(side)

    def hold_back(self) -> None:
        """Let what is enqueued from now on, on the current stream, wait for the copies. Call after `enqueue`."""
        torch.cuda.current_stream(self.device).wait_event(self._copied)

    def wait(self) -> None:
        """Return when all is copied."""
        self._copied.synchronize()

    def abandon(self) -> None:
        """After an error: return when the device copies no more into the arena, which others get now."""
        with contextlib.suppress(RuntimeError):  # a device that fails at this too copies nothing
            side_stream(self.device).synchronize()


def _event() -> torch.cuda.Event:
    """Whoever waits for it sleeps, instead of taking a core from the loop."""
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]


def _copy(targets: list[Tensor], sources: list[Tensor] | tuple[Tensor, ...]) -> None:
    """On the current stream."""
    torch._foreach_copy_(targets, sources, non_blocking=True)


def _on_host(tensor: Tensor) -> Tensor:
    """Room for it in pinned memory: into other memory its copy would hold back all that come after it."""
    return torch.empty_like(tensor, device="cpu", pin_memory=True)


class Pin:
    """Memory that devices write to by themselves, registered as long as this is held.

    Memory must not be given back to the system before `release`: a device would go on to write to its old pages, and
    what comes to lie at the same address would not get what is copied there. So the memory is kept here until then. It
    must not be part of forked children either (`image.memory`): a fork can give the parent other pages.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        """On the training thread. If the system refuses, `is_held` is False, and copies are slower."""
        self._memory: mmap.mmap | None = memory
        self._pid = os.getpid()
        self._address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        self.is_held = _register(self._address, len(memory))

    def release(self) -> None:
        """Take the registration back. No copy into the memory may be under way. May be called again."""
        if self.is_held and os.getpid() == self._pid:  # a forked child has neither the memory nor the device
            self.is_held = False
            status = int(torch.cuda.cudart().cudaHostUnregister(self._address))  # type: ignore[no-untyped-call]
            if status:
                log.debug("memory could not be unpinned: CUDA error %d", status)
                _forget_error()
        self._memory = None


def _register(address: int, length: int) -> bool:
    try:
        status = int(torch.cuda.cudart().cudaHostRegister(address, length, _PORTABLE))  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:  # no CUDA that could be used, after a fork say
        log.debug("memory is not pinned: %s", error)
        return False
    if status:
        log.debug("%d bytes are not pinned, copies from the device are slower: CUDA error %d", length, status)
        _forget_error()
    return status == 0


def _forget_error() -> None:
    """The runtime keeps the last error, and the next kernel of the user's would be blamed for it."""
    with contextlib.suppress(RuntimeError):
        torch.empty(1, device="cuda").fill_(1)


def wait_for_devices(tensors: Iterable[Tensor]) -> None:
    """Return when nothing is under way any more on the devices of these tensors, on whatever stream."""
    for device in {tensor.device for tensor in tensors if is_on_cuda(tensor)}:
        torch.cuda.synchronize(device)


def pinned_bytes(length: int) -> Tensor:
    """Memory that devices read from by themselves. torch keeps it for the next who asks."""
    return torch.empty(length, dtype=torch.uint8, pin_memory=True)


def fill(places: list[Tensor], bytes_of: list[Tensor] | tuple[Tensor, ...]) -> None:
    """Copy from pinned memory to devices, and return when all is there; other threads may do the same meanwhile."""
    _copy(places, bytes_of)
    for device in {place.device for place in places}:
        torch.cuda.current_stream(device).synchronize()
