"""A local or shared directory as a place for bytes.

Knows names and bytes, nothing of tensors, ranks or steps. The rules of durability stand here, at the lines that keep
them. Names are relative, of plain characters, and never lead outside the root: not by `..`, not by a link.

What a crash leaves behind: `create` a file that nobody refers to (its caller deletes it, or the sweep after a later
commit); `publish` a `.tmp-…` file beside the name (the same sweep), never a half-written name. Both may leave a
directory whose name is not durable: the next `create` or `publish` in it syncs it before anything else.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from unbroken import faultpoints

_COMPONENT = re.compile(r"[A-Za-z0-9_+-][A-Za-z0-9_.+-]*|\.(?:tmp|probe)-[A-Za-z0-9-]+")
_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_NOT_DIRECT = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)
"""What systems answer that write only through the page cache."""
DIRECTORY_ATTEMPTS = 5
CHUNK_BYTES = 64 << 20
"""Most bytes given to one write or read call."""
DIRECT_BYTES = 1 << 20
"""From this length on data is written past the page cache, where it lies on a page."""
PAGE_BYTES = 4096
IOV_MAX = os.sysconf("SC_IOV_MAX")
"""Most buffers given to one read call."""
APPEAR_S = 5.0
"""How long a file that one node wrote may take to appear on others; network file systems cache directories."""


class LocalStore:
    """Bytes under one directory. May be used from several threads and processes at once.

    Methods raise OSError as the system gives it, and ValueError for a name that is no plain relative name.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def create(self, name: str, data: memoryview | bytes) -> None:
        """Write a new file and make it durable: when this returns, a power cut does not lose it.

        Raises FileExistsError if the name is taken. A failed write leaves no file.
        """
        self.create_in_parts(name, [data])

    def create_in_parts(self, name: str, parts: Iterable[memoryview | bytes]) -> None:
        """The same for bytes that are not there yet: `parts` are written one after another, as they come.

        What `parts` raises comes out, and leaves no file either.
        """
        path = self._path(name)
        self._write_in_directory(path, parts)
        _sync_directory_or_remove(path)

    def link(self, old: str, new: str) -> None:
        """Give a file a further name, durably. Raises OSError where that cannot be, and FileExistsError."""
        path = self._path(new)
        path.parent.mkdir(parents=True, exist_ok=True)
        _sync_directory(path.parent.parent)
        os.link(self._path(old), path, follow_symlinks=False)
        _sync_directory_or_remove(path)

    def publish(self, name: str, data: bytes) -> None:
        """Create a small file atomically and durably: it is there whole, or not at all.

        Raises FileExistsError if the name is taken; of several racing publishers exactly one succeeds. After any
        other error the name is free again.
        """
        path = self._path(name)
        temporary = path.parent / f".tmp-{secrets.token_hex(8)}"
        try:
            self._link_durably(temporary, path, data)
            # Invariant 1: without this the name itself can be lost after we said "committed".
            _sync_directory_or_remove(path)
        finally:
            temporary.unlink(missing_ok=True)

    def create_root(self) -> None:
        """Create the root and the directories above it. Their names are durable when this returns."""
        self.root.mkdir(parents=True, exist_ok=True)
        # Without this a power cut can lose the run directory with all that was committed in it. Also when it was there:
        # a process that was killed may have made it and not come so far.
        for above in self.root.parents:
            with contextlib.suppress(PermissionError):  # what we may not read we did not make
                _sync_directory(above)
            if above.is_mount():
                break

    def read(self, name: str, most_bytes: int) -> bytes:
        """A small file's bytes. Raises ValueError if it is larger than `most_bytes` or no regular file."""
        with self._open(name) as fd:
            size = os.fstat(fd).st_size
            if size > most_bytes:
                raise ValueError(f"{name} has {size} bytes, more than the {most_bytes} such a file may have")
            data = bytearray(size)
            _read_all(fd, memoryview(data), 0)
            return bytes(data)

    def read_into(self, name: str, begin: int, buffer: memoryview) -> None:
        """Fill `buffer` from byte `begin` on. Raises EOFError if the file ends before."""
        with self._open(name) as fd:
            _read_all(fd, buffer, begin)

    def open(self, name: str) -> OpenFile:
        """A regular file, to be read from its begin to its end, more or less."""
        fd = self._descriptor(name)
        with contextlib.suppress(OSError):  # a hint; without it each thread's reads look random to the system
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return OpenFile(fd)

    def size(self, name: str) -> int | None:
        """Bytes of a regular file, or None if there is none of that name."""
        try:
            status = os.lstat(self._path(name))
        except FileNotFoundError:
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def list(self, directory: str) -> list[str]:
        """Names in a directory, sorted; empty if there is none. Links are left out: they may lead outside."""
        path = self._path(directory) if directory else self.root
        try:
            with os.scandir(path) as entries:
                return sorted(entry.name for entry in entries if not entry.is_symlink())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def rename(self, old: str, new: str) -> None:
        """Give a file another name in its directory, durably. A file that bears the new name is replaced."""
        self._path(old).replace(self._path(new))
        _sync_directory(self._path(new).parent)

    def delete(self, name: str) -> None:
        """Remove a file; nothing happens if there is none."""
        self._path(name).unlink(missing_ok=True)

    def sync(self, directory: str) -> None:
        """Make additions and removals in a directory durable."""
        _sync_directory(self._path(directory))

    def delete_directory(self, directory: str) -> None:
        """Remove a directory if it is empty; nothing happens otherwise."""
        with contextlib.suppress(OSError):
            self._path(directory).rmdir()

    def _path(self, name: str) -> Path:
        parts = [part for part in name.split("/") if part != "."]
        if not parts or not all(_COMPONENT.fullmatch(part) for part in parts):
            raise ValueError(f"{name!r} is not a plain relative name")
        path = self.root
        for part in parts[:-1]:
            path = path / part
            # A link planted in a hostile directory must not lead us outside it (invariant 10).
            if path.is_symlink():
                raise ValueError(f"{path} is a link; links inside a run directory are refused")
        return path / parts[-1]

    def _descriptor(self, name: str) -> int:
        fd = os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise ValueError(f"{name} is not a regular file")
        return fd

    @contextlib.contextmanager
    def _open(self, name: str) -> Iterator[int]:
        fd = self._descriptor(name)
        try:
            yield fd
        finally:
            os.close(fd)

    def _write_in_directory(self, path: Path, parts: Iterable[memoryview | bytes]) -> None:
        """Create a file whose bytes are durable, and its directory if need be.

        A sweep may remove the directory, still empty, between the two: then both are done again.
        """
        for attempt in range(DIRECTORY_ATTEMPTS):
            path.parent.mkdir(parents=True, exist_ok=True)
            # Invariant 1: also when the directory was there. Another rank, or a process that was killed, may have made
            # it and not synced its name yet.
            _sync_directory(path.parent.parent)
            try:
                fd = _create(path)
            except FileNotFoundError:
                if attempt == DIRECTORY_ATTEMPTS - 1:
                    raise
            else:
                return _write_parts(fd, path, parts)

    def _link_durably(self, temporary: Path, path: Path, data: bytes) -> None:
        """Give durable bytes the name `path`, which is not durable yet.

        The sweep of another start of the job may take the temporary file for a leftover: then it is written again.
        """
        for attempt in range(DIRECTORY_ATTEMPTS):
            self._write_in_directory(temporary, [data])
            try:
                return _link_or_create(temporary, path, data)
            except FileNotFoundError:
                if attempt == DIRECTORY_ATTEMPTS - 1:
                    raise


class OpenFile:
    """A file that is open for reading, by several threads at once."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read_scattered(self, begin: int, buffers: Sequence[memoryview]) -> None:
        """Fill buffers one after another from byte `begin` on. Raises EOFError if the file ends before."""
        for at in range(0, len(buffers), IOV_MAX):
            some = buffers[at : at + IOV_MAX]
            _read_scattered(self._fd, some, begin)
            begin += sum(map(len, some))

    def close(self) -> None:
        """To be called once, with no read under way."""
        os.close(self._fd)


def _create(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)


def _write_parts(fd: int, path: Path, parts: Iterable[memoryview | bytes]) -> None:
    """Fill a new file with bytes that are durable, and close it; its name is not durable yet."""
    try:
        for data in parts:
            if faultpoints.armed is not None:
                data = _write_half(fd, path, memoryview(data))
            view = memoryview(data)
            _write_all(fd, view[_write_direct(fd, view) :])
        # Invariant 1: the file's bytes are durable before anything refers to them.
        os.fsync(fd)
    except BaseException:
        # A full disk is the usual reason: give back the space of the failed try.
        with contextlib.suppress(OSError):
            path.unlink()
        raise
    finally:
        os.close(fd)


def _write_half(fd: int, path: Path, data: memoryview) -> memoryview:
    """Write the first half, be struck if a proof wants it, and return the rest."""
    half = len(data) // 2
    _write_all(fd, data[:half])
    faultpoints.reach("half a file" if path.suffix == ".safetensors" else "half a manifest")
    return data[half:]


def _write_direct(fd: int, data: memoryview) -> int:
    """Write whole pages past the page cache, which is twice as fast, if system and memory allow; how many bytes."""
    address = (
        ctypes.addressof(ctypes.c_char.from_buffer(data)) if len(data) >= DIRECT_BYTES and not data.readonly else 1
    )
    if address % PAGE_BYTES or os.lseek(fd, 0, os.SEEK_CUR) % PAGE_BYTES:
        return 0
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    done, end = 0, len(data) // PAGE_BYTES * PAGE_BYTES
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        while done < end:
            done += os.write(fd, data[done : min(done + CHUNK_BYTES, end)])
    except OSError as error:
        if error.errno not in _NOT_DIRECT:
            raise
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    return done


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data[:CHUNK_BYTES]) :]


def _read_all(fd: int, buffer: memoryview, begin: int) -> None:
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done : done + CHUNK_BYTES]], begin + done)
        if count == 0:
            raise EOFError(f"the file ends at byte {begin + done}, {len(buffer) - done} bytes short")
        done += count


def _read_scattered(fd: int, buffers: Sequence[memoryview], begin: int) -> None:
    done = os.preadv(fd, buffers, begin)
    for buffer in buffers:
        if done < len(buffer):  # the system gave less than was asked for
            _read_all(fd, buffer[done:], begin + done)
            done = len(buffer)
        begin += len(buffer)
        done -= len(buffer)


def _link_or_create(temporary: Path, path: Path, data: bytes) -> None:
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        # A file system without hard links. Exclusive creation still lets one publisher win; a cut record is
        # recognised by its digest and does not count as existing.
        _write_parts(_create(path), path, [data])


def _sync_directory_or_remove(path: Path) -> None:
    """Make a new name durable. If that fails, take it back: its publisher will report that it is not there."""
    try:
        _sync_directory(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
            _sync_directory(path.parent)
        raise


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
