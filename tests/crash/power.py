"""A disk of our own whose power can be cut: a file system in a file, mounted where nobody else sees it.

`power.py FILESYSTEM DIRECTORY CUTS SEED` makes an image in DIRECTORY, and CUTS times lets a child process save, cuts
the power at a random one of its system calls, mounts the image again, and judges what is there. It prints a line for
each cut and ends with an error at the first problem. To be run as root by `unshare --mount`: the mounts belong to that
namespace, so that the kernel undoes them and frees the loop device when the process ends, however it ends.

Cutting the power is the ioctl FS_IOC_GOINGDOWN without a flush of the log (XFS has it for its own crash tests, ext4 and
f2fs followed): nothing reaches the disk any more, and what was not synced or committed to the journal is lost.
"""

from __future__ import annotations

import fcntl
import os
import random
import struct
import subprocess
import sys
from pathlib import Path

from crash.judge import examine, go_on
from crash.lives import RUN, start
from crash.recorder import Call, Recorder
from unbroken.policy import Keep

GOINGDOWN = 0x8004587D
NO_LOG_FLUSH = 2
IMAGE_BYTES = {"ext4": 64 << 20, "xfs": 320 << 20}
MOST_CALLS = 90
"""A cut comes at one of so many calls after the job began: the start, and about three saves."""
RANKS = 2


class Disk:
    """An image and where it is mounted."""

    def __init__(self, directory: Path, kind: str) -> None:
        self.image, self.mounted = directory / f"{kind}.image", directory / "mounted"
        with self.image.open("wb") as file:
            file.truncate(IMAGE_BYTES[kind])
        subprocess.run([f"mkfs.{kind}", "-q", str(self.image)], check=True)
        self.mounted.mkdir()

    def __enter__(self) -> Disk:
        subprocess.run(["mount", "-o", "loop", str(self.image), str(self.mounted)], check=True)
        return self

    def __exit__(self, *_exception: object) -> None:
        subprocess.run(["umount", str(self.mounted)], check=True)

    def cut_power(self) -> None:
        """From now on nothing reaches the disk."""
        fd = os.open(self.mounted, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, GOINGDOWN, struct.pack("I", NO_LOG_FLUSH))
        finally:
            os.close(fd)


def train(base: Path, out: int) -> None:
    """Save step after step, and tell of each call and each commit, until something fails."""
    recorder = Recorder(base)

    def tell(_call: Call) -> None:
        os.write(out, b".")

    recorder.fail = tell
    with recorder:
        job = start(base / RUN, RANKS, Keep(last=2))
        step = job.restored.manifest.step if job.restored.manifest else 0
        while job.save(step + 1).committed:
            step += 1
            os.write(out, b"%d\n" % step)


def cut_once(disk: Disk, nth: int) -> int:
    """Let a child save and cut the power at its `nth` call; the newest step that it was told is committed, or 0."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receive)
        try:
            train(disk.mounted, send)
        finally:
            os._exit(0)
    os.close(send)
    told = b""
    with os.fdopen(receive, "rb", buffering=0) as pipe:
        while told.count(b".") < nth and (more := pipe.read(1)):
            told += more
        disk.cut_power()
        while more := pipe.read(1 << 16):
            told += more
    os.waitpid(child, 0)
    return max((int(word) for word in told.replace(b".", b" ").split()), default=0)


def main(kind: str, directory: Path, cuts: int, seed: int) -> None:
    """Make a disk, cut its power again and again, and judge what is left each time."""
    numbers = random.Random(seed)
    disk = Disk(directory, kind)
    promised = 0
    for number in range(cuts):
        nth = numbers.randrange(1, MOST_CALLS)
        with disk:
            promised = max(promised, cut_once(disk, nth))
        with disk:
            root = disk.mounted / RUN
            problem, found = examine(root, RANKS)
            if not problem and max(found, default=0) < promised:
                problem = f"step {promised} was committed, but {found or 'nothing'} is there"
            problem = problem or go_on(root, RANKS, found[0] if found else None)
            if problem:
                raise SystemExit(f"{kind}, cut {number} at call {nth}: {problem}")
            print(f"{kind}: cut at call {nth}, step {promised} committed, steps {found} found", flush=True)
            promised = max(found, default=0) + 1  # `go_on` saved one more


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
