"""Power cuts on real file systems: mounted images whose log is shut down while a job saves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DRIVER = (str(Path(__file__).with_name("power.py")),)
UNSYNCED = """
import os, sys
from pathlib import Path
from crash import power
from unbroken.store import local
def write(fd, path, parts):
    for data in parts:
        os.write(fd, data)
    os.close(fd)
local._write_parts = write
power.main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
"""
"""The driver with a store that does not sync its files."""


def why_not(kind: str) -> str:
    """Why this machine cannot mount a file system of this kind; empty if it can."""
    if os.geteuid() != 0:
        return "only root can mount a file system"
    if not Path("/dev/loop-control").exists():
        return "there is no loop device"
    missing = [tool for tool in ("unshare", "mount", "umount", f"mkfs.{kind}") if shutil.which(tool) is None]
    return f"{missing[0]} is not installed" if missing else ""


def cut(kind: str, directory: Path, cuts: int, seed: int, driver: tuple[str, ...] = DRIVER) -> tuple[int, str]:
    """Cut the power so many times: 0 and one line for each, or another code and what was wrong in the last line."""
    reason = why_not(kind)
    if reason:
        pytest.skip(reason)
    command = ["unshare", "--mount", "--propagation", "private", sys.executable, *driver]
    probe = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True, check=False)
    if probe.returncode != 0:
        pytest.skip(f"no mount namespace of one's own: {probe.stderr.strip()}")
    done = subprocess.run(
        [*command, kind, str(directory), str(cuts), str(seed)],
        capture_output=True,
        text=True,
        timeout=60 + 30 * cuts,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    print(done.stdout)
    mounts, loops = Path("/proc/mounts").read_text(), subprocess.run(["losetup", "-a"], capture_output=True, text=True)
    assert str(directory) not in mounts + loops.stdout, "unmounted, and the loop device is free"
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_a_power_cut_costs_nothing_that_was_committed(tmp_path, kind):
    code, lines = cut(kind, tmp_path, cuts=4, seed=1)
    assert code == 0, lines
    assert lines.count(f"{kind}: cut at call") == 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_fifty_power_cuts_cost_nothing_that_was_committed(tmp_path, kind):
    code, lines = cut(kind, tmp_path, cuts=50, seed=2)
    assert code == 0, lines
    assert lines.count(f"{kind}: cut at call") == 50


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_without_the_sync_of_files_power_cuts_are_seen_to_cost_something(tmp_path, kind):
    code, lines = cut(kind, tmp_path, cuts=50, seed=2, driver=("-c", UNSYNCED))
    assert code != 0
    assert "is damaged" in lines or "was committed, but" in lines
