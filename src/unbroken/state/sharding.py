"""Which part of which tensor a live tensor is: DTensors (FSDP2, HSDP, tensor parallel) in the words of `layout`.

Everything is read from mesh and placements; nothing is communicated, and nothing is gathered.
"""

from __future__ import annotations

import math
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unbroken.layout.spread import Cuts, Mesh, Spread, holding, replicated

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """True for a DTensor. Importing its module is slow, and needless where nobody made one."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: the shard of a DTensor, any other as it is. Never a copy."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def shard_and_spec(tensor: DTensor) -> tuple[Tensor, object]:
    """The two objects that a DTensor is made of (private names, torch 2.6 to 2.13): where it lies, and how."""
    return tensor._local_tensor, tensor._spec


def reason_not_spread(tensor: Tensor) -> str | None:
    """Why it cannot be told what a DTensor's shard is (`a partial sum`), or None if it can."""
    if any(placement.is_partial() for placement in tensor.placements):  # type: ignore[attr-defined]
        return "a DTensor of partial sums"
    cuts = cuts_of(tensor)
    if cuts is None:
        return f"a DTensor of the placements {tensor.placements}"  # type: ignore[attr-defined]
    coordinate = tensor.device_mesh.get_coordinate()  # type: ignore[attr-defined]
    if coordinate is None:
        return "a DTensor of a mesh that this rank is not in"
    if not cuts.mesh.ascends:
        # FSDP2 cuts by the rank in its process group, which is sorted; DTensor itself by the place in the mesh.
        return f"a DTensor of a mesh whose ranks do not ascend ({list(cuts.mesh.ranks[:8])}), which FSDP cuts otherwise"
    expected = cuts.boxes_of(dist.get_rank())[0].shape
    held = tuple(local_of(tensor).shape)
    if held == expected or math.prod(held) == math.prod(expected) == 0:
        return None
    return f"a DTensor with a shard of {list(held)} where {list(expected)} belongs"


def spread_of(tensor: Tensor) -> Spread | None:
    """How a DTensor is spread over ranks; None for any other tensor."""
    return cuts_of(tensor) if is_dtensor(tensor) else None


def cuts_of(tensor: Tensor) -> Cuts | None:
    """The cuts of a DTensor's placements; None where they are not cuts made one after another."""
    mesh = mesh_of(tensor.device_mesh)  # type: ignore[attr-defined]
    order: list[tuple[int, int]] = []
    placements = tensor.placements  # type: ignore[attr-defined]
    # From the last mesh dimension to the first: each cuts before those after it, unless its placement is strided.
    for mesh_dimension in reversed(range(len(placements))):
        placement = placements[mesh_dimension]
        if placement.is_replicate():
            continue
        dimension = getattr(placement, "dim", None)
        if dimension is None:
            return None
        place = _place_among(order, mesh, dimension % tensor.dim(), getattr(placement, "split_factor", 1))
        if place is None:
            return None
        order.insert(place, (mesh_dimension, dimension % tensor.dim()))
    return Cuts(tuple(tensor.shape), mesh, tuple(order))


def _place_among(order: list[tuple[int, int]], mesh: Mesh, dimension: int, factor: int) -> int | None:
    """After how many of the cuts in `order` a cut comes that finds the dimension cut into `factor` parts.

    FSDP shards what tensor parallel had sharded, though its mesh dimension comes first: `_StridedShard` says so by
    the number of parts (`torch/distributed/tensor/placement_types.py`).
    """
    parts = 1
    for place, (mesh_dimension, cut) in enumerate(order):
        if parts == factor:
            return place
        if cut == dimension:
            parts *= mesh.shape[mesh_dimension]
    return len(order) if parts == factor else None


@lru_cache(maxsize=64)
def mesh_of(mesh: DeviceMesh) -> Mesh:
    """The global ranks of a device mesh."""
    return Mesh(tuple(mesh.mesh.shape), tuple(mesh.mesh.flatten().tolist()))


def holds_unreduced_gradients(module: nn.Module) -> bool:
    """True if FSDP2 has gradients of this module that it has not reduced yet: with `set_requires_gradient_sync(False)`
    they accumulate unsharded, in places of its own (`FSDPParam.unsharded_accumulated_grad` or the gradient of its
    `_unsharded_param`, torch 2.6 to 2.13)."""
    fsdp = sys.modules.get("torch.distributed.fsdp._fully_shard._fully_shard")
    if fsdp is None or not isinstance(module, fsdp.FSDPModule):
        return False
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    parameters = [parameter for group in groups if group is not None for parameter in group.fsdp_params]
    return any(
        parameter.unsharded_accumulated_grad is not None
        or getattr(getattr(parameter, "_unsharded_param", None), "grad", None) is not None
        for parameter in parameters
    )


def reshard(module: nn.Module) -> None:
    """Let FSDP2 drop whole parameters that a forward without a backward left, as after an evaluation.

    They have no names then, and no optimizer knows them. The next forward gathers them again.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp._fully_shard._fully_shard")
    if fsdp is not None and isinstance(module, fsdp.FSDPModule):
        module.reshard()


def beside(spread: Spread | None, shape: tuple[int, ...]) -> Spread | None:
    """How a plain tensor of an optimizer's state is spread, beside a parameter that is spread so.

    A step counter is the same on every rank that holds a part of the parameter. Of a whole parameter's replicas all
    state is alike. What else an optimizer keeps in plain tensors beside a shard is this rank's own.
    """
    if spread is None:
        return None
    if isinstance(spread, Cuts) and (not spread.order or math.prod(shape) == 1):
        return Cuts(shape, spread.mesh)
    if math.prod(shape) != 1:
        return None
    return replicated(shape, holding(spread).ranks)
