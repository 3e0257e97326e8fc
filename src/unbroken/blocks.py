"""Blocks of a data file into memory, every one verified on the way (invariant 2).

Digests are per block, so whole blocks are read, whatever of them is wanted. Bytes go straight to where they belong:
there is no second copy of what is read. System calls and digests release the GIL.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

import msgspec
import xxhash

from unbroken.errors import DamagedCheckpoint, UsageError
from unbroken.image.digest import HEX_CHARS
from unbroken.manifest import FileRecord
from unbroken.store.local import LocalStore


class Landing(msgspec.Struct, frozen=True):
    """Where consecutive bytes of a file go."""

    begin: int
    """First byte, counted from the start of the file."""
    buffer: memoryview
    """Writable bytes, as many as are wanted."""

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.begin + len(self.buffer)


def read_verified(store: LocalStore, directory: str, file: FileRecord, begin: int, end: int) -> bytearray:
    """Bytes `begin` to `end` of a file, which must begin on a block and end on one or with the file.

    Raises DamagedCheckpoint, naming file and bytes.
    """
    data = bytearray(end - begin)
    source = DataFile(store, directory, file)
    try:
        source.read([Landing(begin, memoryview(data))])
    finally:
        source.close()
    return data


class DataFile:
    """A data file, open for reading, by several threads at once."""

    def __init__(self, store: LocalStore, directory: str, file: FileRecord) -> None:
        """Raises DamagedCheckpoint if it is not there, or no file."""
        self._name = f"{directory}/{file.name}"
        self._record = file
        try:
            self._file = store.open(self._name)
        except (OSError, ValueError) as error:
            raise DamagedCheckpoint(f"{self._name} cannot be read: {error}") from error

    def close(self) -> None:
        """To be called once, with no read under way."""
        self._file.close()

    def read(self, landings: Sequence[Landing]) -> None:
        """Fill each landing. What else lies in their first to last block is read too, and dropped.

        landings  in the order of their bytes, which they do not share

        Raises DamagedCheckpoint, naming file and bytes; the landings are filled by then.
        """
        if not landings:
            return
        length, size = self._record.block_bytes, self._record.size
        begin = landings[0].begin // length * length
        segments = _segments(landings, begin, min(size, -(-landings[-1].end // length) * length))
        try:
            self._file.read_scattered(begin, segments)
        except (OSError, ValueError, EOFError) as error:
            if isinstance(error, OSError) and error.errno == errno.EFAULT:
                raise UsageError(
                    "a registered tensor lies in memory that cannot be written (a file that is mapped read-only?): "
                    "clone it before it is registered"
                ) from error
            raise DamagedCheckpoint(f"{self._name} cannot be read: {error}") from error
        _verify(self._name, self._record, begin, segments)


def _segments(landings: Sequence[Landing], begin: int, end: int) -> list[memoryview]:
    """Buffers for all bytes from `begin` to `end`, in order: the landings' own, and others for what lies between."""
    segments: list[memoryview] = []
    at = begin
    for landing in landings:
        if landing.begin > at:
            segments.append(memoryview(bytearray(landing.begin - at)))
        segments.append(landing.buffer)
        at = landing.end
    if end > at:
        segments.append(memoryview(bytearray(end - at)))
    return segments


def _verify(name: str, file: FileRecord, begin: int, segments: Sequence[memoryview]) -> None:
    """Compare the digests of whole blocks, of which the first begins at byte `begin` of the file."""
    digest, left, first = xxhash.xxh3_64(), file.block_bytes, begin
    for segment in segments:
        done = 0
        while done < len(segment):
            part = segment[done : done + left] if done or left < len(segment) else segment
            digest.update(part)
            done += len(part)
            left -= len(part)
            if left == 0:
                _compare(name, file, first, digest.hexdigest(), file.block_bytes)
                first += file.block_bytes
                digest, left = xxhash.xxh3_64(), file.block_bytes
    if left < file.block_bytes:
        _compare(name, file, first, digest.hexdigest(), file.block_bytes - left)


def _compare(name: str, file: FileRecord, first: int, digest: str, length: int) -> None:
    block = first // file.block_bytes
    if digest != file.blocks[block * HEX_CHARS : (block + 1) * HEX_CHARS]:
        raise DamagedCheckpoint(f"{name}, bytes {first}-{first + length}, do not match their digest")
