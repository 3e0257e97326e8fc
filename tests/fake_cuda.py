"""A device that is not there: streams and events with CUDA's rules, run by a thread, in an order of its own.

Tensors that it adopts lie in the host's memory, but whatever is done to them is done when its stream comes to it. Of
all streams that may go on it takes any, so what no event orders happens in every order. It shows what the order of our
calls allows, and nothing of what a real device does.
"""

from __future__ import annotations

import contextlib
import random
import threading
import weakref
from collections import deque

import torch

from unbroken import cuda, reading
from unbroken.image import image
from unbroken.probes import RowProbes

WAIT_S = 30


class Stream:
    def __init__(self, device=None):
        self.todo = deque()
        DEVICE.streams.append(self)

    def wait_event(self, event):
        DEVICE.log.append(("wait_event", self))
        ticket = event.ticket  # as of now: an event that was not recorded yet holds back nothing
        if ticket is not None:
            DEVICE.put(self, ticket.wait, ready=ticket.is_set)

    def synchronize(self):
        event = Event()
        event.record(self)
        event.synchronize()


class Event:
    def __init__(self, blocking=False):
        self.ticket = None

    def record(self, stream):
        DEVICE.log.append(("record", stream))
        self.ticket = threading.Event()
        DEVICE.put(stream, self.ticket.set)

    def synchronize(self):
        assert self.ticket is None or self.ticket.wait(WAIT_S), "the device stands still"


class Device:
    """`put` gives it work; `hold` lets nothing more begin."""

    def __init__(self, seed=0):
        self.streams, self.log, self.adopted = [], [], {}
        self.pinned, self.pins = {}, weakref.WeakSet()
        self.refuses_to_pin = False
        self.capturing = False
        self.held = set()
        self._choice = random.Random(seed)
        self._changed = threading.Condition()
        self._ended = self._idle = False
        self._local = threading.local()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self):
        self.default = Stream()
        self._thread.start()

    def stop(self):
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._thread.join(WAIT_S)
        for pin in list(self.pins):
            pin.release()

    def pin(self, memory):
        pin = cuda.Pin(memory)
        self.pins.add(pin)
        return pin

    def adopt(self, tensor):
        self.adopted[tensor.untyped_storage().data_ptr()] = tensor  # kept, so that no other gets its address
        return tensor

    def has(self, tensor):
        return tensor.untyped_storage().data_ptr() in self.adopted

    def cudart(self):
        return self

    def cudaHostRegister(self, address, length, flags):
        assert address not in self.pinned and flags == 1
        if self.refuses_to_pin:
            return 2
        self.pinned[address] = length
        return 0

    def cudaHostUnregister(self, address):
        del self.pinned[address]
        return 0

    def current(self, device=None):
        return getattr(self._local, "stream", None) or self.default

    @contextlib.contextmanager
    def use(self, stream):
        before, self._local.stream = self.current(), stream
        yield
        self._local.stream = before

    def put(self, stream, work, ready=lambda: True):
        with self._changed:
            self._idle = False
            stream.todo.append((ready, work))
            self._changed.notify_all()

    def come_to_rest(self):
        """Return when nothing can go on."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._idle, WAIT_S)

    def hold(self, stream):
        with self._changed:
            self.held.add(stream)

    def release(self, stream):
        with self._changed:
            self._idle = False
            self.held.discard(stream)
            self._changed.notify_all()

    def _run(self):
        while True:
            with self._changed:
                able = []
                while not able:
                    if self._ended:
                        return
                    going = [each for each in self.streams if each.todo and each not in self.held]
                    able = [each for each in going if each.todo[0][0]()]
                    if not able:
                        self._idle = True
                        self._changed.notify_all()
                        self._changed.wait()
                stream = self._choice.choice(able)
                _, work = stream.todo.popleft()
            work()


DEVICE = Device()


def install(monkeypatch, seed=0):
    """Put the device in the place of torch's; returns it."""
    global DEVICE
    device = DEVICE = Device(seed)
    device.start()
    copy, read = torch._foreach_copy_, RowProbes.read

    def foreach_copy(targets, sources, non_blocking=False):
        if not any(map(device.has, [*targets, *sources])):
            return copy(targets, sources)
        stream = device.current()

        if non_blocking:
            for target, source in zip(targets, sources, strict=True):
                device.put(stream, lambda target=target, source=source: target.data.copy_(source.data))
            return targets
        stream.synchronize()
        return copy(targets, sources)

    def gather(probes):
        if not device.has(probes._views[0][0]):
            return read(probes)
        found = torch.empty(probes._begins[-1], dtype=torch.uint8)
        device.adopt(found)
        device.put(device.current(), lambda: found.copy_(read(probes)))
        return found

    monkeypatch.setattr(torch, "_foreach_copy_", foreach_copy)
    monkeypatch.setattr(RowProbes, "read", gather)
    for name, fake in {
        "Stream": Stream,
        "Event": Event,
        "stream": device.use,
        "current_stream": device.current,
        "set_device": lambda index: None,
        "synchronize": lambda index=None: [each.synchronize() for each in list(device.streams)],
        "cudart": device.cudart,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: device.capturing,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(cuda, "is_on_cuda", device.has)
    monkeypatch.setattr(image, "Pin", device.pin)
    memory_of = reading._memory_of
    monkeypatch.setattr(reading, "_memory_of", lambda at, size: None if device.has(at) else memory_of(at, size))
    monkeypatch.setattr(cuda, "_on_host", torch.empty_like)
    monkeypatch.setattr(cuda, "pinned_bytes", lambda length: torch.empty(length, dtype=torch.uint8))
    cuda.side_stream.cache_clear()
    return device
