"""How a DTensor beside a parameter is placed on the mesh, where that is not as the parameter is.

A gradient may be partial sums or cut otherwise than its parameter; a custom optimizer may keep a whole moment beside
a shard. Values come back under any placement; what is added to or reduced from them later need not, so the placement is
part of the state. It is meant only where the parameter lies as it did then.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unbroken.state.captured import Json
from unbroken.state.sharding import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

_TEXT = re.compile(r"R|S\((\d+)\)|P\((\w+)\)")


def placed_beside(tensor: Tensor, parameter: Tensor) -> Json | None:
    """`{mesh, parameter, own}`, as the format has it; None if placed like the parameter, or in a way without a name."""
    if not (is_dtensor(tensor) and is_dtensor(parameter)):
        return None
    if tensor.placements == parameter.placements or tensor.device_mesh != parameter.device_mesh:
        return None  # nearly always, at every save
    own, beside = _texts(tensor), _texts(parameter)
    if own is None or beside is None:
        return None
    return {"mesh": list(parameter.device_mesh.shape), "parameter": beside, "own": own}


def is_partial(told: Json | None) -> bool:
    """True if ranks hold sums that were not added up yet."""
    return told is not None and any(text.startswith("P") for text in told["own"])


def empty_beside(told: Json | None, parameter: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
    """An uninitialised DTensor placed as `told`; None if the parameter does not lie as it did then."""
    if told is None or not is_dtensor(parameter) or told["parameter"] != _texts(parameter):
        return None
    if is_partial(told) and told["mesh"] != list(parameter.device_mesh.shape):
        return None
    placements = _placements(told["own"], len(shape))
    if placements is None or len(placements) != parameter.device_mesh.ndim:
        return None
    from torch.distributed.tensor import empty

    return empty(*shape, dtype=dtype, device_mesh=parameter.device_mesh, placements=placements)


def _texts(tensor: DTensor) -> list[str] | None:
    texts = [str(_text(placement)) for placement in tensor.placements]
    return texts if all(map(_TEXT.fullmatch, texts)) else None


def _text(placement: Placement) -> str | None:
    from torch.distributed.tensor import Partial, Replicate, Shard

    if type(placement) is Shard:
        return f"S({placement.dim})"
    if type(placement) is Partial:
        return f"P({placement.reduce_op})"
    return "R" if type(placement) is Replicate else None


def _placements(texts: Sequence[str], dimensions: int) -> list[Placement] | None:
    from torch.distributed.tensor import Partial, Replicate, Shard

    found: list[Placement] = []
    for text in texts:
        match = _TEXT.fullmatch(text)
        if match is None or (match[1] and int(match[1]) >= dimensions):
            return None
        found.append(Shard(int(match[1])) if match[1] else Partial(match[2]) if match[2] else Replicate())
    return found
