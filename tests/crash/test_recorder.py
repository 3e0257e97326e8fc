"""The recorder misses nothing: a replayed trace is the real directory, and the kernel saw no other call."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from crash import stories
from crash.explore import EMPTY
from crash.judge import read
from crash.orders import in_order
from crash.recorder import Call, Recorder

HARMLESS = {"openat", "open"}
"""They change a directory only with O_CREAT or O_TRUNC."""
CHANGING = (
    "open,openat,openat2,creat,write,pwrite64,writev,pwritev,pwritev2,fsync,fdatasync,sync_file_range,syncfs,ftruncate,"
    "truncate,fallocate,link,linkat,symlink,symlinkat,rename,renameat,renameat2,unlink,unlinkat,mkdir,mkdirat,rmdir,"
    "mknod,mknodat,copy_file_range,sendfile,splice,ioctl,setxattr,fsetxattr,lsetxattr,chmod,fchmod,fchmodat,chown,fchown"
)
"""Calls that can change a file, a directory, or what is durable. Shared writable mappings need an O_RDWR descriptor."""
AS_RECORDED = {"fsync": "sync", "fdatasync": "sync", "linkat": "link", "renameat": "rename", "renameat2": "rename"}
AS_RECORDED |= {"mkdirat": "mkdir", "unlinkat": "unlink"}
_LINE = re.compile(r"([\d.]+) (\w+)\((.*)\)\s+= (-?\d+)")


def everything(recorder: Recorder, root: Path, world_size: int) -> int:
    """Retention, a restart, and a manifest moved aside."""
    stories.keeping(1)(recorder, root, world_size)
    return stories.saved_again(recorder, root.parent / "other", world_size)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("story", [everything, stories.without_hard_links, stories.disk_full(7, [])])
def test_a_replayed_trace_is_exactly_the_real_directory(tmp_path, story, world_size):
    recording = stories.play(story, tmp_path / "base", world_size)
    *_, end = in_order(recording.trace, 0, EMPTY)
    assert end.system.now() == read(recording.base)
    kinds = {event.what.kind for event in recording.trace if isinstance(event.what, Call)}
    assert {"mkdir", "create", "write", "sync"} <= kinds


def test_a_call_that_was_missed_makes_the_replay_differ(tmp_path):
    with Recorder(tmp_path) as recorder:
        fd = os.open(tmp_path / "seen", os.O_WRONLY | os.O_CREAT)
        os.write(fd, b"abc")
        os.close(fd)
        (tmp_path / "unseen").write_bytes(b"by builtin open")
    *_, end = in_order(recorder.trace, 0, EMPTY)
    assert end.system.now() == {"seen": b"abc"} != read(tmp_path)


def test_a_call_that_the_recorder_does_not_know_is_refused_inside_only(tmp_path):
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    with Recorder(inside):
        (outside).symlink_to("anywhere")
        with pytest.raises(AssertionError, match=r"does not know os\.symlink"):
            (inside / "link").symlink_to("anywhere")
    assert read(inside) == {}


def test_after_the_recording_the_os_module_is_as_it_was(tmp_path):
    before = dict(vars(os))
    stories.play(stories.first_save, tmp_path / "base", 1)
    assert dict(vars(os)) == before


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_the_kernel_saw_the_calls_that_were_recorded_and_no_others(tmp_path):
    base, log = tmp_path / "base", tmp_path / "strace"
    base.mkdir()
    log.mkdir()
    tracer = ["strace", "-ff", "-ttt", "-y", "--seccomp-bpf", "-s", "0", "-e", f"trace={CHANGING}", "-o", f"{log}/t"]
    done = subprocess.run(
        [*tracer, sys.executable, str(Path(__file__).with_name("play_one.py")), str(base)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    if "ptrace" in done.stderr and "Operation not permitted" in done.stderr:
        pytest.skip("this machine forbids ptrace")
    assert done.returncode == 0, done.stderr
    recorded = [line for line in done.stdout.splitlines() if line]
    assert len(recorded) > 60
    assert calls_in(log, base) == recorded


def calls_in(log: Path, base: Path) -> list[str]:
    """The successful calls under `base` that strace wrote down, in the order in which they began."""
    calls = []
    for path in log.iterdir():
        for line in path.read_text(errors="replace").splitlines():
            match = _LINE.match(line)
            if match is None or str(base) not in match[3] or int(match[4]) < 0:
                continue
            name, arguments = match[2], match[3]
            if name in HARMLESS and not re.search(r"O_CREAT|O_TRUNC", arguments):
                continue
            where = re.search(re.escape(str(base)) + r"/?([^\">]*)", arguments)
            assert where is not None
            calls.append((float(match[1]), f"{_kind(name, arguments)} {where[1] or '.'}"))
    return [text for _, text in sorted(calls)]


def _kind(name: str, arguments: str) -> str:
    if name == "unlinkat" and "AT_REMOVEDIR" in arguments:
        return "rmdir"
    return "create" if name in HARMLESS else AS_RECORDED.get(name, name)
