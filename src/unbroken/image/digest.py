"""Digests of files, block by block, so that a reader of a part can verify that part (invariant 2).

xxh3 with 64 bits per block: it finds damage, not tampering. xxhash releases the GIL while it works.
"""

from __future__ import annotations

from collections.abc import Iterator

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


def digest_text(data: bytes) -> str:
    """Digest of a small record (a manifest's body), 128 bits as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data)
