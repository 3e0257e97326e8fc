"""A few elements of each tensor, to see whether it was written into without a sign of it.

`tensor.data` and NumPy's views of a tensor move no version counter. What writes through them (weights exchanged for
their average, say) changes elements everywhere: a handful of each tensor shows it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

PER_TENSOR = 16
"""Most elements that are looked at, evenly spread. Kernels of 2, 4, 8 or 16 threads begin at one of them or just before
it, so that a write which is under way shows, too."""
_ALIGNMENT = 16
"""Bytes; the largest element has so many."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element."""


class Probes:
    """Views of the elements of some tensors, made once. Reading them costs about 1 us a tensor."""

    def __init__(self, tensors: Sequence[Tensor], in_rows: Sequence[bool]) -> None:
        """in_rows  whether each tensor is contiguous; of others, and of their copies, two corners are looked at"""
        self._views = [_probe(tensor, rows) for tensor, rows in zip(tensors, in_rows, strict=True)]
        self._begins = [0]
        for view in self._views:
            self._begins.append(self._begins[-1] + -(-view.nbytes // _ALIGNMENT) * _ALIGNMENT)
        self._found = torch.zeros(self._begins[-1], dtype=torch.uint8)
        self._slots = [
            self._found[begin : begin + view.nbytes].view(view.dtype).view(view.shape)
            for begin, view in zip(self._begins, self._views, strict=False)
        ]
        self._reading = threading.Lock()

    @torch.no_grad()
    def read(self) -> Tensor:
        """The elements as bytes, the same for equal tensors."""
        with self._reading:
            if self._slots:
                torch._foreach_copy_(self._slots, self._views)
            return self._found.clone()

    def where_different(self, one: Tensor, other: Tensor) -> Iterator[int]:
        """Indexes of tensors of which two readings differ."""
        return _where_different(self._begins, one, other)


class RowProbes:
    """The same elements of contiguous tensors on one device, gathered there by a few kernels that nobody waits for.

    Tensors elsewhere, of the same dtypes and shapes, give readings that can be compared with these.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """tensors  contiguous, all on one device"""
        by_size: dict[int, list[int]] = {}
        for index, tensor in enumerate(tensors):
            by_size.setdefault(tensor.dtype.itemsize, []).append(index)
        self._order = [index for group in by_size.values() for index in group]
        views = [[_as_integers(_probe(tensors[index], True)) for index in group] for group in by_size.values()]
        self._views = views
        self._begins = [0]
        for view in [view for group in views for view in group]:
            self._begins.append(self._begins[-1] + view.nbytes)

    @torch.no_grad()
    def read(self) -> Tensor:
        """The elements as bytes, on the tensors' device; complete when its current stream comes to it."""
        return torch.cat([torch.cat(group).view(torch.uint8) for group in self._views])

    def where_different(self, one: Tensor, other: Tensor) -> Iterator[int]:
        """Indexes of tensors of which two readings differ."""
        return map(self._order.__getitem__, _where_different(self._begins, one, other))


def _where_different(begins: Sequence[int], one: Tensor, other: Tensor) -> Iterator[int]:
    if not torch.equal(one, other):
        for index, (begin, end) in enumerate(pairwise(begins)):
            if not torch.equal(one[begin:end], other[begin:end]):
                yield index


def _as_integers(view: Tensor) -> Tensor:
    """The same bits. So all dtypes of one size are put together, whatever kernels torch has for each."""
    return view.view(_INTEGERS.get(view.dtype.itemsize, view.dtype))


def _probe(tensor: Tensor, in_rows: bool) -> Tensor:
    count = tensor.numel()
    if count == 0:
        return tensor.detach().flatten()
    if in_rows:
        step = -(-count // PER_TENSOR)
        return tensor.detach().as_strided((-(-count // step),), (step,), tensor.storage_offset())
    corner = tuple(slice(0, None, max(1, length - 1)) if length > 1 else slice(0, 1) for length in tensor.shape)
    return tensor.detach()[corner]
