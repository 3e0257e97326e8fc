"""What plain DataLoaders give the training loop, as digests: for the ledger of a script without `resumable`.

Only a proof asks for it. Nothing is kept of a batch but its digest, and no random number is drawn. For the training
thread alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import dataloader

from unbroken.elements import as_bytes

MOST_REMEMBERED = 10_000
"""Batches whose digests wait for `drain_batches`; older ones are forgotten."""

_digests: deque[str] = deque(maxlen=MOST_REMEMBERED)
_watched: list[type] = []


def observe_loaders() -> None:
    """From now on, note the digest of every batch that any torch DataLoader of this process gives. Idempotent."""
    kind: Any = getattr(dataloader, "_BaseDataLoaderIter", None)
    if kind is None or kind in _watched:
        return
    _watched.append(kind)
    give = kind.__next__

    def noting(iterator: Any) -> Any:
        batch = give(iterator)
        _digests.append(digest_batch(batch))
        return batch

    kind.__next__ = noting


def drain_batches() -> list[str]:
    """The digests since the last call, in order."""
    taken = list(_digests)
    _digests.clear()
    return taken


def digest_batch(batch: object) -> str:
    """xxh3-64 of a batch as 16 hex digits: of its tensors, arrays, numbers and texts, in any nesting."""
    digest = xxhash.xxh3_64()
    _add(digest, batch)
    return digest.hexdigest()


def _add(digest: Any, value: object) -> None:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        digest.update(f"tensor {value.dtype} {tuple(value.shape)}".encode())
        digest.update(as_bytes(value).numpy().data)
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        digest.update(f"array {value.dtype} {value.shape}".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        digest.update(f"mapping of {len(value)};".encode())
        for key, item in value.items():
            _add(digest, key)
            _add(digest, item)
    elif isinstance(value, str | bytes | int | float | complex | np.generic | None):
        digest.update(f"value {value!r};".encode())
    elif isinstance(value, Iterable):
        digest.update(b"items;")
        for item in value:
            _add(digest, item)
        digest.update(b"end;")
    else:
        digest.update(type(value).__qualname__.encode())
