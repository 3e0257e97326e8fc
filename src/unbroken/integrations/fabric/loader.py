"""A loader that Fabric has set up, with an exact position: it stays the object that it is."""

from __future__ import annotations

from typing import Any

from lightning.fabric import Fabric
from lightning.fabric.utilities.data import _update_dataloader
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.fabric.wrappers import _FabricDataLoader
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from unbroken.data.cursor import WhenRanksChange
from unbroken.data.loader import ResumableLoader, resumable
from unbroken.integrations.fabric.private import OF_A_DEALT_SAMPLER, OF_A_LOADER, check


class ResumableFabricLoader(_FabricDataLoader):
    """What `fabric.setup_dataloaders` gave, over a loader with an exact position.

    `epoch`, `micro_batches`, `batch_size`, … are those of the `ResumableLoader`.
    """

    @property
    def batch_size(self) -> int | None:
        """Samples per batch on this rank, as it is now; Fabric's own attribute is a copy of what was configured."""
        size: int | None = self._dataloader.batch_size
        return size

    def __getattr__(self, name: str) -> Any:
        if name == "_dataloader":  # not yet set: do not look for it in itself
            raise AttributeError(name)
        return getattr(self._dataloader, name)


def made_resumable(fabric: Fabric, loader: _FabricDataLoader, when_ranks_change: WhenRanksChange) -> ResumableLoader:
    """Let Fabric's loader iterate one with a position, from the next `iter()` on; that one."""
    check(loader, OF_A_LOADER)
    inner: Any = loader._dataloader
    if isinstance(inner, ResumableLoader):
        return inner
    if type(getattr(inner, "sampler", None)) is DistributedSamplerWrapper:
        check(inner.sampler.dataset, OF_A_DEALT_SAMPLER)
        # Where `resumable` looks for the generators and the history of a sampler inside another.
        inner.sampler.sampler = inner.sampler.dataset._sampler
    found = resumable(inner, when_ranks_change=when_ranks_change)
    if getattr(fabric.strategy, "distributed_sampler_kwargs", None) is None and _is_dealt_on_several(inner):
        # On one device Fabric leaves the sampler alone. Dealt to one rank, the order is the one that several ranks
        # share, so that the run may go on with more of them, or have come from more.
        sampler = fabric._get_distributed_sampler(inner, num_replicas=1, rank=0, seed=found.seed)
        found = resumable(_update_dataloader(inner, sampler), when_ranks_change=when_ranks_change)
    loader.__class__ = ResumableFabricLoader
    loader._dataloader = found  # type: ignore[assignment]  # it asks for no more than iter() and len()
    return found


def _is_dealt_on_several(loader: DataLoader[Any]) -> bool:
    """Whether Fabric's DistributedSampler gives each sample of an epoch once, as the loader's own sampler does."""
    if type(loader) is not DataLoader or loader.batch_size is None:
        return False
    sampler = loader.sampler
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    return type(sampler) is SequentialSampler
