"""Which stretch of its flat parameter FSDP1 (`FullyShardedDataParallel`) leaves on this rank, parameter by parameter.

With `use_orig_params=True` each parameter of the module is a flat view of what this rank holds of it. Without it there
is only the flat parameter, registered as `_flat_param`, of which each parameter is a part. Which part that is stands in
private attributes of torch, all of them read here: `FullyShardedDataParallel._handle.flat_param` with `_is_flat_param`,
`_params`, `_param_infos`, `_shared_param_infos`, `_param_extensions`, `_fqns`, `_shapes`, `_strides`,
`_numels_with_padding`, `_is_padding_mask`, `_unpadded_unsharded_size` and `_full_param_padded`, and `_handle` itself
with `uses_sharded_strategy`, `needs_unshard`, `reshard` and `post_reshard` (torch 2.6 to 2.13,
`torch/distributed/fsdp/_flat_param.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch.distributed as dist
from torch import Tensor, nn

from unbroken.errors import UnsupportedValue
from unbroken.layout.spread import Mesh, Spread, Stretch, replicated
from unbroken.state.parts import Placed, part_of

WRAPPED = "_fsdp_wrapped_module"


def is_fsdp1(module: object) -> TypeGuard[nn.Module]:
    """True for a FullyShardedDataParallel. Importing its module is slow, and needless where nobody used one."""
    fsdp = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)


def is_flat(tensor: Tensor) -> bool:
    """True for a flat parameter, whose values have no names without the module that made it."""
    return getattr(tensor, "_is_flat_param", False) is True


@dataclass(frozen=True, slots=True)
class Sharded:
    """What is known of the parameters of FullyShardedDataParallel modules."""

    spreads: dict[int, Spread] = field(default_factory=dict)
    """How those that are still there lie on the ranks, by id."""
    flattened: dict[int, dict[str, Placed]] = field(default_factory=dict)
    """Those that are not, by the id of the module that they belong to and by their name in it."""
    flat_ids: set[int] = field(default_factory=set)
    """The flat parameters that the latter are parts of."""

    def add(self, module: Any, name: str) -> None:
        """Look at one FullyShardedDataParallel; the parameters of those below it are not its own.

        Raises UnsupportedValue for parameters whose place in the whole cannot be told; `name` is the module's.
        """
        if module._handle is None:
            return
        flat = module._handle.flat_param
        stretches = list(_stretches(module, flat))
        if flat._params is None or module._handle.uses_sharded_strategy:
            _refuse_unordered(flat, name)
        if flat._params is not None:
            for parameter, stretch in zip(flat._params, stretches, strict=True):
                whole = parameter.shape == stretch.shape and stretch.cutting is None
                self.spreads[id(parameter)] = replicated(stretch.shape, stretch.mesh.ranks) if whole else stretch
        else:
            self._add_parts(flat, stretches)

    def has_parts(self, tensor: Tensor) -> bool:
        """True for a flat parameter whose parts are known."""
        return is_flat(tensor) and id(tensor) in self.flat_ids

    def _add_parts(self, flat: Any, stretches: list[Stretch]) -> None:
        self.flat_ids.add(id(flat))
        for number, (info, stretch) in enumerate(zip(flat._param_infos, stretches, strict=True)):
            own = self.flattened.setdefault(id(info.module), {})
            own[info.param_name] = Placed(flat, part_of(number, stretch), stretch)
        for info in flat._shared_param_infos:
            first = self.flattened[id(info.prim_module)][info.prim_param_name]
            self.flattened.setdefault(id(info.module), {})[info.param_name] = first


def drop_gathered(module: Any) -> None:
    """Free the whole values that a forward without a backward leaves: the next one would not see those restored."""
    handle = module._handle
    if handle is not None and hasattr(handle.flat_param, "_full_param_padded") and not handle.needs_unshard():
        handle.reshard(True)
        handle.post_reshard()


def is_gathered(module: Any) -> bool:
    """True from a forward to its backward, if whole values stand in for parameters till then (SHARD_GRAD_OP)."""
    flat = module._handle.flat_param if module._handle is not None else None
    if flat is None or flat._params is None:
        return False
    registered = [info.module._parameters.get(info.param_name) for info in flat._param_infos]
    return any(tensor is not None and not tensor.is_leaf for tensor in registered)


def _refuse_unordered(flat: Any, name: str) -> None:
    """Raise for a parameter of which a stretch is no stretch of its rows."""
    for fqn, shape, stride, extension in zip(
        flat._fqns, flat._shapes, flat._strides, flat._param_extensions, strict=True
    ):
        problem = "a shard of tensor parallel" if extension is not None else ""
        if not problem and not _is_row_major(shape, stride):
            problem = "not laid out row by row (channels_last, or transposed)"
        if problem:
            raise UnsupportedValue(
                f"{name}.{fqn.replace(f'{WRAPPED}.', '')} was {problem} when FullyShardedDataParallel flattened it, "
                "so that its parts have no place in the whole: use fully_shard (FSDP2)"
            )


def _is_row_major(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size > 1 and step != expected:
            return 0 in shape
        expected *= size
    return True


def _stretches(module: Any, flat: Any) -> Iterator[Stretch]:
    """Of each parameter in a flat one, in order."""
    mesh, cutting = _mesh_of(module)
    length = -(-flat._unpadded_unsharded_size.numel() // (1 if cutting is None else mesh.shape[cutting]))
    shapes = iter(flat._shapes)
    begin = 0
    for numel, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if not is_padding:
            yield Stretch(tuple(next(shapes)), mesh, cutting, begin, length)
        begin += numel


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
