"""Parts: where an optimizer holds one flat tensor that consists of several parameters, each of them a stretch of it.

FSDP1 with `use_orig_params=False` flattens the parameters of a module so. Each part has a name, a shape and a spread of
its own, as if it lay by itself, so that it restores into layouts that know nothing of the flat tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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
