"""Memory for arenas: large pages, touched before they are needed, and left out of forked children.

Large pages (2 MiB, where the system gives them) take a sixth of the time to touch first, and writing from them past the
page cache is 1.7 times as fast, since the system pins 300 pages instead of 150,000 (604 MB, Linux 6.18).

Without MADV_DONTFORK each worker process of a DataLoader would make the next save copy the arena page by page.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref

import torch

_given: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def warm_memory(size: int) -> mmap.mmap:
    """At least `size` bytes of zeros that this process alone has."""
    length = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, advice):
            with contextlib.suppress(OSError):  # a system without large pages
                memory.madvise(getattr(mmap, advice))
    _given.add(memory)
    torch.frombuffer(memory, dtype=torch.uint8).zero_()  # lets other threads run meanwhile
    return memory


def _keep_forever() -> None:
    """In a forked child the memory is not there, and something else may be by the time that the object is deleted,
    which would give that back to the system."""
    for memory in list(_given):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))


os.register_at_fork(after_in_child=_keep_forever)
