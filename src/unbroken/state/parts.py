"""Parts: where an optimizer holds one flat tensor that consists of several parameters, each of them a stretch of it.

FSDP1 with `use_orig_params=False` flattens the parameters of a module so, and ZeRO their masters. Each part has a name,
a shape and a spread of its own, as if it lay by itself, so that it restores into layouts that know nothing of the flat
tensor.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn

from unbroken.layout.spread import Spread, Stretch


@dataclass(frozen=True, slots=True)
class Part:
    """Where one parameter lies in what this rank holds of a flat tensor."""

    number: int
    """Which of the flat tensor's parameters it is; two that have nothing here are still two."""
    begin: int
    """Its first element here."""
    end: int
    """One past its last; `begin` if it lies on other ranks."""

    def of(self, flat: Tensor) -> Tensor:
        """The stretch of a tensor that is laid out like the flat one; a view, without a gradient of its own."""
        return flat.detach()[self.begin : self.end]


def part_of(number: int, stretch: Stretch) -> Part:
    """Where this rank's elements of a stretch lie in its piece of the line."""
    rank = dist.get_rank()
    first, last = stretch.range_of(rank)
    if first == last:
        return Part(number, 0, 0)
    piece = 0 if stretch.cutting is None else stretch.mesh.coordinate(rank)[stretch.cutting]
    begin = stretch.begin + first - piece * stretch.length
    return Part(number, begin, begin + last - first)


@dataclass(frozen=True, slots=True)
class Placed:
    """Where the values of one parameter lie, if not in itself."""

    tensor: Tensor
    """Flat, with a `part`; else of the parameter's shape."""
    part: Part | None
    spread: Spread | None


class Elsewhere(nn.Module):
    """A wrapper of a module whose parameters are copies: their values lie in other tensors, which it knows."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    @abstractmethod
    def places(self) -> Mapping[int, Mapping[str, Placed]]:
        """Of parameters by the id of the module that they belong to and by their name in it."""
