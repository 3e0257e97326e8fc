"""B124: each rank read all optimizer shards, memory times ranks. B125: the full checkpoint was copied in each process.
B127: memory doubled at load. B126: all ranks loaded onto one device.

Right: saves hold one copy of the rank's own part for each that may be in flight; a restore reads into the live
tensors, with at most 64 MiB in hand; no rank ever holds the whole. Also when another number of ranks restores.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import unbroken
from unbroken.reading import READ_BYTES, READERS

MODULE = "cases.test_b124_memory_at_load"
LAYERS, WIDTH = 6, 3584
WHOLE = LAYERS * WIDTH * WIDTH * 4
"""About 300 MB."""
SLACK = 24 << 20


def memory(field: str) -> int:
    """A line of /proc/self/status in bytes: VmRSS, or VmHWM, its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def peak_of(work) -> int:
    """How many bytes `work` takes at its peak beside what is there already."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmRSS")
    work()
    return memory("VmHWM") - before


def make(value):
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    for layer in model:
        nn.init.constant_(layer.weight, value)
        fully_shard(layer)
    return fully_shard(model)


def save_and_restore(rank, world_size, directory, saves, slots=2):
    """The peaks of a save and of a restore, in bytes; what a rank's part is."""
    model = make(1.5 if saves else 0.0)
    part = sum(p.to_local().nbytes for p in model.parameters())
    with unbroken.Checkpointer(directory, {"model": model}, on_error="raise", slots=slots) as ckpt:
        if not saves:
            peak = peak_of(ckpt.restore)
            assert all(bool((p.to_local() == 1.5).all()) for p in model.parameters())
            assert all(p.to_local().device.type == "cpu" for p in model.parameters())
            return part, peak

        def save():
            for _ in range(4):
                ckpt.step()
                ckpt.save()
                ckpt.wait()

        return part, peak_of(save)


def read_from_disk():
    """Bytes that this process had fetched from a device, of /proc/self/io; 0 on file systems in memory."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def restore_replicas(rank, world_size, directory, saves):
    """Bytes that a restore of a replicated model had fetched from the disk; how many the model has."""
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    with unbroken.Checkpointer(directory, {"model": model}, on_error="raise") as ckpt:
        if saves:
            ckpt.step()
            ckpt.save()
            return 0, 0
        if rank == 0:
            for path in Path(directory).glob("step-*/*.safetensors"):
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        dist.barrier()
        before = read_from_disk()
        ckpt.restore()
        return read_from_disk() - before, sum(parameter.nbytes for parameter in model.parameters())


def test_what_ranks_have_alike_comes_from_the_disk_once(ranks, tmp_path):
    """All ranks of a node read the same bytes in the same order; the page cache hands them on."""
    ranks.run_all_well(f"{MODULE}:restore_replicas", 4, str(tmp_path), True)
    results = ranks.run_all_well(f"{MODULE}:restore_replicas", 4, str(tmp_path), False)
    assert sum(fetched for fetched, _ in results) <= 1.25 * results[0][1]


def test_no_rank_holds_more_than_its_own_part(ranks, tmp_path):
    for slots in (2, 1):
        run = str(tmp_path / f"{slots} slots")
        for part, peak in ranks.run_all_well(f"{MODULE}:save_and_restore", 4, run, True, slots):
            # Of what was there before, a few pages may have been given back meanwhile.
            assert slots * 0.95 * part <= peak <= slots * part + SLACK, "arenas, each of which holds the rank's part"
    for world_size in (4, 2):
        for part, peak in ranks.run_all_well(f"{MODULE}:save_and_restore", world_size, run, False):
            assert peak <= READERS * READ_BYTES + SLACK < WHOLE // 2, "one stretch a thread, beside the live tensors"
            assert part < WHOLE
