"""The elements of a tensor as bytes."""

from __future__ import annotations

import torch


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in row-major order, as flat uint8 on the same device; of the tensor's own memory where it can be."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().flatten()
    if flat.stride(0) != 1:  # of one element, or none: contiguous for torch, but of no other element size
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)
