"""Memory of arenas: there, touched, and no part of a forked child."""

import ctypes
import gc
import mmap
import os
from pathlib import Path

import torch

from unbroken.image.memory import warm_memory

SIZE = (4 << 20) + 1


def address_of(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


def is_mapped(address: int) -> bool:
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)


def in_child(work) -> int:
    """Exit status of a forked child: 0 if `work` returned."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def resident(address: int) -> int:
    """Bytes of the mapping that are in memory."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    first = next(
        index
        for index, line in enumerate(lines)
        if "-" in line.split()[0] and int(line.split("-")[0], 16) <= address < int(line.split()[0].split("-")[1], 16)
    )
    return next(int(line.split()[1]) * 1024 for line in lines[first:] if line.startswith("Rss:"))


def test_memory_is_large_enough_on_pages_and_touched():
    memory = warm_memory(SIZE)
    assert SIZE <= len(memory) < SIZE + mmap.PAGESIZE
    assert address_of(memory) % mmap.PAGESIZE == 0
    assert bytes(memory) == bytes(len(memory))
    assert resident(address_of(memory)) >= SIZE


def test_a_forked_child_does_not_have_it_and_deletes_nothing_of_its_own_with_it():
    memory = [warm_memory(SIZE)]
    address = address_of(memory[0])
    assert is_mapped(address)

    def child() -> None:
        assert not is_mapped(address)
        own = mmap.mmap(-1, 8 * SIZE)
        own.write(b"x" * len(own))
        fixed = ctypes.CDLL(None).mmap
        fixed.restype = ctypes.c_void_p
        fixed.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
        private_anonymous_fixed = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10
        assert fixed(address, SIZE, mmap.PROT_READ | mmap.PROT_WRITE, private_anonymous_fixed, -1, 0) == address
        ctypes.memset(address, 7, SIZE)  # what the child has there now
        memory.clear()
        gc.collect()
        assert ctypes.string_at(address, SIZE) == b"\7" * SIZE

    assert in_child(child) == 0
    memory[0][:3] = b"abc"
    assert memory[0][:3] == b"abc"


def faults() -> int:
    """Page faults of this process so far that needed no disk."""
    return int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[7])


def test_a_fork_costs_no_copy_of_it():
    memory = warm_memory(64 << 20)
    view = torch.frombuffer(memory, dtype=torch.uint8)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writer)
        os.read(reader, 1)  # until the parent is done
        os._exit(0)
    before = faults()
    view.fill_(1)
    taken = faults() - before
    os.close(reader)
    os.close(writer)
    os.waitpid(pid, 0)
    assert taken < 100, "each page would fault once if the child had it, too"
