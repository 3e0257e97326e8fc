"""Which loaders feed the training loop, and do it from a position that no checkpoint has.

An evaluation loader looks the same. So a plain DataLoader counts if the loop is inside it at the save; between two
epochs, if it shuffles and nothing that is registered could be the training's loader. A loader that was made resumable
was meant to be registered.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from unbroken.state.alive import ITERATION, LOADER, Alive, is_resumable
from unbroken.state.covered import Covered
from unbroken.state.peek import attributes, is_a

_SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def loaders_in_use(alive: Alive, covered: Covered) -> list[object]:
    """Loaders that are not covered and that the training takes its batches from, each source of batches once."""
    resumables = [value for value in alive.of(LOADER) if is_resumable(value)]
    owned = Covered()
    for loader in resumables:
        owned.add(loader)
    forgotten = [loader for loader in resumables if loader not in covered]
    plain = [
        loader
        for loader in alive.of(LOADER)
        if not is_resumable(loader) and loader not in covered and loader not in owned
    ]
    inside = [loader for loader in plain if any(_is_inside(each, loader) for each in alive.of(ITERATION))]
    if not inside and not forgotten and not covered.has_loader:
        inside = [loader for loader in plain if _shuffles(loader)]
    return forgotten + _once_each(inside)


def _is_inside(iteration: Any, loader: object) -> bool:
    """Whether this is an iteration over `loader` that has given batches and is not at its end."""
    state, own = attributes(iteration), attributes(loader)
    index_sampler = state.get("_index_sampler")
    if index_sampler is None or state.get("_dataset") is not own.get("dataset"):
        return False
    if index_sampler is not own.get("batch_sampler") and index_sampler is not own.get("sampler"):
        return False
    if own.get("_iterator") is iteration and (state.get("_finished") or not state.get("_tasks_outstanding", 1)):
        return False  # persistent workers, or torchdata's loader: kept after its end
    return bool(state.get("_num_yielded"))


def _shuffles(loader: object) -> bool:
    own = attributes(loader)
    samplers = [own.get("sampler"), attributes(own.get("batch_sampler")).get("sampler")]
    return any(
        is_a(sampler, *_SHUFFLING) or (is_a(sampler, DistributedSampler) and attributes(sampler).get("shuffle"))
        for sampler in samplers
    )


def _once_each(loaders: list[Any]) -> list[object]:
    """Without the wrappers that share another's sampler."""
    sources: dict[tuple[int, int], object] = {}
    for loader in loaders:
        own = attributes(loader)
        sources.setdefault((id(own.get("dataset")), id(own.get("batch_sampler") or own.get("sampler"))), loader)
    return list(sources.values())
