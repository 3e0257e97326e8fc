"""Random streams that depend on (seed, epoch, sample) and on nothing that happened before.

`mix` makes seeds, `seed_all` starts the three global streams (Python, NumPy, torch CPU) from one, `Preserved` puts them
back as they were, and `Isolated` is a set of streams of its own. Nothing here may leave a global stream moved.
CUDA streams are not touched: loading in the main process has no prefetch, so the job's own saved CUDA stream fits.
"""

from __future__ import annotations

import operator
import random
import struct
from collections.abc import Sequence
from enum import IntEnum
from types import TracebackType
from typing import Any

import numpy as np
import torch
import xxhash

_MASK = (1 << 64) - 1
Streams = tuple[Any, Any, torch.Tensor]
"""States of Python's, NumPy's and torch's global generator."""


class Purpose(IntEnum):
    """What a seed is for, so that two uses of the same numbers never share a stream. Written nowhere, but do not
    renumber: another number is another order of samples after an upgrade in mid-run."""

    SAMPLE = 1
    BATCH = 2
    ORDER = 3
    SAMPLER = 4
    WORKERS = 5
    ITEM = 6


def mix(purpose: Purpose, *parts: int) -> int:
    """A 64-bit seed from whole numbers (taken modulo 2**64); the same in every process and on every machine."""
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(parts) + 1}Q", purpose, *(part & _MASK for part in parts)))


def number_of(index: Any) -> int:
    """A stable number for a sample's index, whatever a sampler calls an index.

    Whole numbers stand for themselves, other values for a digest of their `repr`. Objects whose `repr` holds an address
    have no stable number and give 0; their seeds differ by position alone.
    """
    try:
        return operator.index(index)
    except TypeError:
        text = repr(index)
        return 0 if " at 0x" in text else xxhash.xxh3_64_intdigest(text.encode())


def seed_all(seed: int) -> None:
    """Start the global streams of Python, NumPy and torch (CPU) from a 64-bit seed."""
    random.seed(seed)
    np.random.seed(seed >> 32)  # takes 32 bits; more of them, as a list, cost five times as long
    # Not `torch.manual_seed`: it also asks every accelerator, 90 us a call, and would move the job's CUDA stream.
    torch.default_generator.manual_seed(seed)


def read_streams() -> Streams:
    """The states of the three global streams, now."""
    return random.getstate(), np.random.get_state(legacy=False), torch.default_generator.get_state()


def write_streams(streams: Streams) -> None:
    """Put the three global streams where `read_streams` found them."""
    random.setstate(streams[0])
    np.random.set_state(streams[1])
    torch.default_generator.set_state(streams[2])


class Preserved:
    """A `with` block after which the global streams are as before, whatever ran inside."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = read_streams()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        write_streams(self._before)


class Isolated:
    """Streams of one user (a sampler), in place of the global ones while its `with` block runs.

    They go on from one block to the next; the global ones do not notice. `generators` are further torch generators the
    user draws from; they too are put back after each block, since another loader may share them.
    """

    def __init__(self, seed: int, generators: Sequence[torch.Generator] = ()) -> None:
        self._generators = tuple(generators)
        with Preserved():
            seed_all(seed)
            self._own = read_streams()
        self._own_generators = [
            torch.Generator(device=generator.device).manual_seed(seed).get_state() for generator in self._generators
        ]

    def __enter__(self) -> None:
        self._outer = read_streams()
        self._outer_generators = [generator.get_state() for generator in self._generators]
        write_streams(self._own)
        for generator, state in zip(self._generators, self._own_generators, strict=True):
            generator.set_state(state)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._own = read_streams()
        self._own_generators = [generator.get_state() for generator in self._generators]
        write_streams(self._outer)
        for generator, state in zip(self._generators, self._outer_generators, strict=True):
            generator.set_state(state)
