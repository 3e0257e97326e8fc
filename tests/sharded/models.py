"""A small model in every parallel layout, with the same full values in each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

CPU = torch.device("cpu")


class Net(nn.Module):
    """Uneven shapes: fewer rows than ranks here and there, a scalar, a frozen parameter, tied weights."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 5)
        self.few = nn.Linear(5, 3, bias=False)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Anything that uses all of it."""
        return self.frozen(self.few(self.down(torch.relu(self.up(x)))))


def full(tensor: Tensor) -> Tensor:
    """The whole tensor, gathered; a collective for a DTensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def single(net: Net) -> nn.Module:
    """One process, or every rank by itself."""
    return net


def ddp(net: Net) -> nn.Module:
    """Replicas."""
    return DistributedDataParallel(net)


def fsdp2(net: Net) -> nn.Module:
    """Sharded over all ranks."""
    for layer in (net.up, net.down):
        fully_shard(layer)
    return fully_shard(net)


def hsdp(net: Net) -> nn.Module:
    """Two replicas of shards."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(net.up, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def two_dimensional(net: Net) -> nn.Module:
    """FSDP2 over tensor parallel."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(net, mesh=mesh["dp"])


def fsdp1(net: Net) -> nn.Module:
    """FSDP1, nested."""
    net.up = FullyShardedDataParallel(net.up, use_orig_params=True, device_id=CPU)
    return FullyShardedDataParallel(net, use_orig_params=True, device_id=CPU)


def hybrid_fsdp1(net: Net) -> nn.Module:
    """Two replicas of FSDP1's shards."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    strategy = ShardingStrategy.HYBRID_SHARD
    return FullyShardedDataParallel(
        net, sharding_strategy=strategy, use_orig_params=True, device_id=CPU, device_mesh=mesh
    )


def fsdp1_flat(net: Net) -> nn.Module:
    """FSDP1 as it is by default: the optimizer holds flat parameters of several. What is frozen lies by itself."""
    net.up = FullyShardedDataParallel(net.up, device_id=CPU)
    net.frozen = FullyShardedDataParallel(net.frozen, device_id=CPU)
    return FullyShardedDataParallel(net, device_id=CPU)


def hybrid_fsdp1_flat(net: Net) -> nn.Module:
    """Two replicas of flat shards."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    options = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_id": CPU, "device_mesh": mesh}
    net.frozen = FullyShardedDataParallel(net.frozen, **options)
    return FullyShardedDataParallel(net, **options)


def whole_fsdp1_flat(net: Net) -> nn.Module:
    """Flat parameters that every rank holds whole."""
    net.frozen = FullyShardedDataParallel(net.frozen, sharding_strategy=ShardingStrategy.NO_SHARD, device_id=CPU)
    return FullyShardedDataParallel(net, sharding_strategy=ShardingStrategy.NO_SHARD, device_id=CPU)


LAYOUTS: dict[str, Callable[[Net], nn.Module]] = {
    "single": single,
    "ddp": ddp,
    "fsdp2": fsdp2,
    "hsdp": hsdp,
    "two_dimensional": two_dimensional,
    "fsdp1": fsdp1,
    "hybrid_fsdp1": hybrid_fsdp1,
    "fsdp1_flat": fsdp1_flat,
    "hybrid_fsdp1_flat": hybrid_fsdp1_flat,
    "whole_fsdp1_flat": whole_fsdp1_flat,
}


@dataclass
class Job:
    """A model in one layout, and its optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def state(self) -> dict[str, Any]:
        """As a Checkpointer takes it."""
        return {"model": self.model, "optimizer": self.optimizer}

    def step(self, seed: int) -> None:
        """One optimizer step on data that all ranks have alike."""
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        self.model(x).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def content(self) -> dict[str, bytes]:
        """Every value, gathered, by a name that no layout changes."""
        if isinstance(self.model, FullyShardedDataParallel):
            return self._content_of_fsdp1()
        found = {}
        for name, parameter in self.model.named_parameters():
            plain = name.removeprefix("module.").replace("_fsdp_wrapped_module.", "")
            found[plain] = raw(full(parameter))
            for key, item in self.optimizer.state.get(parameter, {}).items():
                found[f"{plain}/{key}"] = raw(full(item))
        return found

    def _content_of_fsdp1(self) -> dict[str, bytes]:
        """Weights, which are all that FSDP1 gathers on the CPU; of flat parameters the moments, too."""
        with FullyShardedDataParallel.summon_full_params(self.model, writeback=False):
            found = {
                name.replace("_fsdp_wrapped_module.", ""): raw(p.detach().clone())
                for name, p in self.model.named_parameters()
            }
        return found | gathered_moments(self.model, self.optimizer)


def gathered_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, bytes]:
    """The state of flat parameters by the names of their parts, gathered without what is tested."""
    found = {}
    for name, module in model.named_modules():
        flat = module._handle.flat_param if isinstance(module, FullyShardedDataParallel) and module._handle else None
        for key, item in optimizer.state.get(flat, {}).items() if flat is not None and flat._params is None else ():
            whole = item
            if item.dim() and module._handle.uses_sharded_strategy:
                pieces = [torch.empty_like(item) for _ in range(module.process_group.size())]
                dist.all_gather(pieces, item, module.process_group)
                whole = torch.cat(pieces)
            offset = 0
            for fqn, numel in zip(flat._fqns, flat._numels, strict=True):
                part = whole[offset : offset + numel] if item.dim() else item
                path = f"{name}.{fqn}/{key}".replace("_fsdp_wrapped_module", "")
                found[".".join(filter(None, path.split(".")))] = raw(part)
                offset += numel
    return found


def raw(tensor: Tensor) -> bytes:
    """The elements' bytes."""
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def make_job(layout: str, seed: int) -> Job:
    """A job with fresh values."""
    model = LAYOUTS[layout](Net(seed))
    return Job(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1))
