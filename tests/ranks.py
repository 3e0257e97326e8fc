"""Ranks as threads: protocols are tried without process groups, with a control store in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
import torch.distributed as dist

from unbroken.cluster import Channel, Cluster
from unbroken.layout.spread import replicated
from unbroken.state.captured import LiveTensor

T = TypeVar("T")


def clusters(world_size: int) -> list[Cluster]:
    """One cluster object per rank, all on one store."""
    store = dist.HashStore()
    return [Cluster(rank, world_size, store) for rank in range(world_size)]


def channels(world_size: int) -> list[Channel]:
    """One channel per rank, in one namespace."""
    return [cluster.channel("test", threading.Event()) for cluster in clusters(world_size)]


def on_all(each: list[T], act: Callable[[T], object]) -> list[object]:
    """Run `act` for every rank at once; results by rank, an exception as itself."""

    def run(item: T) -> object:
        try:
            return act(item)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(each)) as pool:
        return list(pool.map(run, each))


def replica(tensor: torch.Tensor, world_size: int) -> LiveTensor:
    """A tensor that every rank holds whole, as under DDP."""
    return LiveTensor(tensor, replicated(tuple(tensor.shape), tuple(range(world_size))))
