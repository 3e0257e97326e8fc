"""A few elements of each tensor, to see whether it was written into without a sign of it.

`tensor.data` and NumPy's views of a tensor move no version counter. What writes through them (weights exchanged for
their average, say) changes elements everywhere: a handful of each tensor shows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

PER_TENSOR = 8
"""Elements that are looked at, spread evenly from the first to the last."""
_ALIGNMENT = 16
"""Bytes; the largest element has so many."""


class Probes:
    """Views of the elements of some tensors, made once. Reading them costs about 1 us a tensor."""

    def __init__(self, tensors: Sequence[Tensor], in_rows: Sequence[bool]) -> None:
        """in_rows  whether each tensor is contiguous; of others, and of their copies, two corners are looked at"""
        self._views = [_probe(tensor, rows) for tensor, rows in zip(tensors, in_rows, strict=True)]
        self._begins = [0]
        for view in self._views:
            self._begins.append(self._begins[-1] + -(-view.nbytes // _ALIGNMENT) * _ALIGNMENT)

    @torch.no_grad()
    def read(self) -> Tensor:
        """The elements as bytes, the same for equal tensors."""
        found = torch.zeros(self._begins[-1], dtype=torch.uint8)
        slots = [
            found[begin : begin + view.nbytes].view(view.dtype).view(view.shape)
            for begin, view in zip(self._begins, self._views, strict=False)
        ]
        if slots:
            torch._foreach_copy_(slots, self._views)
        return found

    def where_different(self, one: Tensor, other: Tensor) -> Iterator[int]:
        """Indexes of tensors of which two readings differ."""
        if not torch.equal(one, other):
            for index, begin in enumerate(self._begins[:-1]):
                end = self._begins[index + 1]
                if not torch.equal(one[begin:end], other[begin:end]):
                    yield index


def _probe(tensor: Tensor, in_rows: bool) -> Tensor:
    count = tensor.numel()
    if count == 0:
        return tensor.detach().flatten()
    if in_rows:
        looks = min(PER_TENSOR, count)
        step = (count - 1) // (looks - 1) if looks > 1 else 1
        return tensor.detach().as_strided((looks,), (step,), tensor.storage_offset())
    corner = tuple(slice(0, None, max(1, length - 1)) if length > 1 else slice(0, 1) for length in tensor.shape)
    return tensor.detach()[corner]
