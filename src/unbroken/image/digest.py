"""Digests of files, block by block, so that a reader of a part can verify that part (invariant 2).

xxh3 with 64 bits per block: it finds damage, not tampering. xxhash releases the GIL while it works.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import xxhash

BLOCK_BYTES = 1 << 20
"""Block length of files up to MOST_BLOCKS of them; larger files have longer blocks, so that manifests stay small."""
MOST_BLOCKS = 4096
HEX_CHARS = 16
"""Length of one block's digest in a manifest."""


def block_bytes_for(size: int) -> int:
    """The block length for a file of `size` bytes: a power of two, at least BLOCK_BYTES."""
    length = BLOCK_BYTES
    while length * MOST_BLOCKS < size:
        length *= 2
    return length


def digest_block(data: memoryview | bytes) -> str:
    """Digest of one block as HEX_CHARS hex digits."""
    return xxhash.xxh3_64_hexdigest(data)


def digest_blocks(data: memoryview, block_bytes: int) -> Iterator[str]:
    """Digests of consecutive blocks; the last one may be short."""
    for begin in range(0, len(data), block_bytes):
        yield digest_block(data[begin : begin + block_bytes])


class BlockDigests:
    """Digests of blocks of a file, of bytes that come piece by piece."""

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self._done: list[str] = []
        self._open = xxhash.xxh3_64()
        self._length = 0

    def of(self, pieces: Iterable[memoryview | bytes]) -> Iterator[memoryview | bytes]:
        """The same pieces, digested."""
        for piece in pieces:
            rest = memoryview(piece)
            while rest:
                part = rest[: self.block_bytes - self._length]
                self._open.update(part)
                self._length += len(part)
                rest = rest[len(part) :]
                if self._length == self.block_bytes:
                    self._close()
            yield piece

    def _close(self) -> None:
        self._done.append(self._open.hexdigest())
        self._open = xxhash.xxh3_64()
        self._length = 0

    def text(self) -> str:
        """All digests, once the pieces have ended."""
        return "".join(self._done) + (self._open.hexdigest() if self._length else "")


def digest_text(data: bytes) -> str:
    """Digest of a small record (a manifest's body), 128 bits as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data)
