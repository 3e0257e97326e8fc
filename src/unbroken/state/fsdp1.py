"""Which stretch of its flat parameter FSDP1 (`FullyShardedDataParallel`) leaves on this rank, parameter by parameter.

With `use_orig_params=True` each parameter of the module is a flat view of what this rank holds of it. Which part that
is stands in private attributes of torch, all of them read here: `FullyShardedDataParallel._handle.flat_param` with
`_params`, `_shapes`, `_numels_with_padding`, `_is_padding_mask` and `_unpadded_unsharded_size` (torch 2.6 to 2.13,
`torch/distributed/fsdp/_flat_param.py`).
"""

from __future__ import annotations

import sys
from typing import Any, TypeGuard

import torch.distributed as dist
from torch import nn

from unbroken.errors import UnsupportedValue
from unbroken.layout.spread import Mesh, Spread, Stretch, replicated

WRAPPED = "_fsdp_wrapped_module"


def is_fsdp1(module: object) -> TypeGuard[nn.Module]:
    """True for a FullyShardedDataParallel. Importing its module is slow, and needless where nobody used one."""
    fsdp = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)


def spreads_in(module: Any, name: str) -> dict[int, Spread]:
    """How the parameters of one FullyShardedDataParallel lie on the ranks, by id; those of modules below it excluded.

    Raises UnsupportedValue for one that keeps only a flat parameter; `name` is the module's, for the error.
    """
    handle = module._handle
    if handle is None:
        return {}
    flat = handle.flat_param
    if flat._params is None:
        raise UnsupportedValue(
            f"{name} is wrapped by FullyShardedDataParallel(use_orig_params=False), which leaves no parameter of its "
            "own: give use_orig_params=True"
        )
    mesh, cutting = _mesh_of(module)
    length = -(-flat._unpadded_unsharded_size.numel() // (1 if cutting is None else mesh.shape[cutting]))
    spreads: dict[int, Spread] = {}
    lengths = iter(zip(flat._numels_with_padding, flat._is_padding_mask, strict=True))
    begin = 0
    for parameter, shape in zip(flat._params, flat._shapes, strict=True):
        numel, is_padding = next(lengths)
        while is_padding:
            begin += numel
            numel, is_padding = next(lengths)
        whole = parameter.shape == shape and cutting is None
        stretch = Stretch(tuple(shape), mesh, cutting, begin, length)
        spreads[id(parameter)] = replicated(tuple(shape), mesh.ranks) if whole else stretch
        begin += numel
    return spreads


def _mesh_of(module: Any) -> tuple[Mesh, int | None]:
    """The ranks of a module's parameters, and which dimension of the mesh cuts them."""
    ranks = tuple(dist.get_process_group_ranks(module.process_group))
    if not module._handle.uses_sharded_strategy:
        return Mesh((len(ranks),), ranks), None
    between = getattr(module, "_inter_node_pg", None)
    if between is None:
        return Mesh((len(ranks),), ranks), 0
    # Hybrid: groups of shards that lie alike, one for each of the ranks that hold what this one holds.
    me = dist.get_rank()
    replicas = dist.get_process_group_ranks(between)
    return Mesh((len(replicas), len(ranks)), tuple(rank + other - me for other in replicas for rank in ranks)), 1
