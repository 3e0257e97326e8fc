"""A prepared loader with an exact position: it stays the object that it is.

Inside, in place of the DataLoader whose batches Accelerate deals to the ranks, it has one with a position that deals
samples. A prepared loader fetches one batch ahead of the loop: saved is the position of what the loop has had.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler

from unbroken.data.loader import ResumableLoader, resumable
from unbroken.integrations.ahead import Ahead
from unbroken.integrations.dealing import deal, loader_like


class Position(Ahead):
    """Where a prepared loader is. It counts its passes by itself."""

    def __init__(self, prepared: Any, accelerator: Any) -> None:
        super().__init__(_loader_of(prepared, accelerator))
        self._prepared = prepared
        self._iteration = -1
        prepared.base_dataloader = _Inside(prepared.base_dataloader, self)

    def __iter__(self) -> Iterator[Any]:
        self._iteration = self._prepared.iteration
        is_empty = True
        for batch in super().__iter__():
            is_empty = False
            yield batch
        if is_empty:  # it went on at the end of an epoch; Accelerate does not count a pass without a batch
            self._prepared.iteration += 1

    def state_dict(self) -> dict[str, Any]:
        """Of what the loop has had; after the loop, the next epoch."""
        if self._iteration != self._prepared.iteration:
            self.pass_is_over()
        return {"position": super().state_dict(), "iteration": self._prepared.iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there at the next iter()."""
        super().load_state_dict(state["position"])
        self._prepared.iteration = state["iteration"]


class _Inside:
    """What stands inside a prepared loader in place of its DataLoader, and looks like that."""

    def __init__(self, base: Any, position: Position) -> None:
        self._base, self._position = base, position

    @property  # type: ignore[misc]  # isinstance() asks for it, of Accelerate's own wrappers too
    def __class__(self) -> Any:
        return type(self._base)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._position)

    def __len__(self) -> int:
        return len(self._position.loader)

    def __getattr__(self, name: str) -> Any:
        if name in ("_base", "_position"):  # not yet set: do not look for them in themselves
            raise AttributeError(name)
        return getattr(self._base, name)


def _loader_of(prepared: Any, accelerator: Any) -> ResumableLoader:
    """One with a position, of the same samples in the same settings as a prepared one."""
    base = prepared.base_dataloader
    if isinstance(base.dataset, IterableDataset):
        return resumable(base)
    batches = base.batch_sampler
    inner = getattr(batches, "batch_sampler", batches)  # what Accelerate deals from, if it deals
    sampler = getattr(inner, "sampler", None)
    seed = _seed_of(sampler, accelerator)
    if type(inner) is BatchSampler and _is_seedable(sampler):
        sampler = RandomSampler(base.dataset)
    options: dict[str, Any] = {"batch_sampler": inner}
    if type(inner) is BatchSampler:
        options = {"batch_size": inner.batch_size, "sampler": sampler, "drop_last": inner.drop_last}
    return resumable(
        deal(loader_like(base, base.dataset, **options), accelerator.process_index, accelerator.num_processes, seed),
        seed=seed,
    )


def _is_seedable(sampler: Any) -> bool:
    return type(sampler).__name__ == "SeedableRandomSampler" and isinstance(sampler, RandomSampler)


def _seed_of(sampler: Any, accelerator: Any) -> int:
    """Rank 0's, since every rank must have the same order."""
    generator = getattr(sampler, "generator", None)
    seed = generator.initial_seed() if isinstance(generator, torch.Generator) else torch.initial_seed()
    told = [int(getattr(sampler, "initial_seed", None) or seed)]
    if accelerator.num_processes > 1:
        broadcast_object_list(told)
    return told[0] % (1 << 63)
