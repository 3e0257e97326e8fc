"""Which loaders feed the training loop, and do it from a position that no checkpoint has.

A loader that was made resumable was meant to be registered. A plain DataLoader counts if it shuffles and the loop is
inside it. If nothing that is registered could be the training's loader, one that does not shuffle counts too, and
between two epochs one that shuffles. That keeps out evaluation loaders, whose iterations frameworks like to hold; but
not those whose workers persist: a resumed job draws their seed once more, and all its random numbers move.
"""

from __future__ import annotations

import inspect
from types import GeneratorType
from typing import Any

from torch.utils.data import DistributedSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from unbroken.coverage.alive import ITERATION, LOADER, Alive, is_resumable
from unbroken.coverage.covered import Covered
from unbroken.coverage.peek import attributes, is_a

_SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def loaders_in_use(alive: Alive, covered: Covered) -> list[object]:
    """Loaders that are not covered and that the training takes its batches from, each source of batches once."""
    resumables = [value for value in alive.of(LOADER) if is_resumable(value)]
    owned = Covered()
    for loader in resumables:
        owned.add(loader)
    forgotten = [loader for loader in resumables if loader not in covered]
    plain = [loader for loader in alive.of(LOADER) if loader not in covered and loader not in owned]
    inside = [loader for loader in plain if any(_is_inside(each, loader) for each in alive.of(ITERATION))]
    shuffling = [loader for loader in plain if _shuffles(loader)]
    found = [loader for loader in inside if any(loader is other for other in shuffling)]
    if not found and not forgotten and not covered.has_loader:
        found = inside or shuffling
    persisting = [loader for loader in plain if _workers_persist(loader)]
    return forgotten + _once_each([*found, *persisting])


def _workers_persist(loader: object) -> bool:
    own = attributes(loader)
    return bool(own.get("persistent_workers") and own.get("num_workers") and own.get("generator") is None)


def _is_inside(iteration: object, loader: object) -> bool:
    """Whether this is an iteration over `loader` that has given batches and is not at its end."""
    state, own = attributes(iteration), attributes(loader)
    index_sampler = state.get("_index_sampler")
    if index_sampler is None or state.get("_dataset") is not own.get("dataset"):
        return False
    if index_sampler is not own.get("batch_sampler") and index_sampler is not own.get("sampler"):
        return False
    return bool(state.get("_num_yielded")) and not _is_at_its_end(state)


def _is_at_its_end(state: dict[str, Any]) -> bool:
    if "_tasks_outstanding" in state:  # with workers the sampler ends before the loop does
        return not state["_tasks_outstanding"]
    indices = state.get("_sampler_iter")
    ended = type(indices) is GeneratorType and inspect.getgeneratorstate(indices) == inspect.GEN_CLOSED
    return ended or bool(state.get("_finished"))  # torchdata's


def _shuffles(loader: object) -> bool:
    own = attributes(loader)
    samplers = [own.get("sampler"), attributes(own.get("batch_sampler")).get("sampler")]
    return any(
        is_a(sampler, *_SHUFFLING) or (is_a(sampler, DistributedSampler) and attributes(sampler).get("shuffle"))
        for sampler in samplers
    )


def _once_each(loaders: list[object]) -> list[object]:
    """Without those that share another's sampler, as a framework's copies do."""
    sources: dict[tuple[int, int], object] = {}
    for loader in loaders:
        own = attributes(loader)
        indices = own.get("sampler") if own.get("batch_sampler") is None else own["batch_sampler"]
        sources.setdefault((id(own.get("dataset")), id(indices)), loader)
    return list(sources.values())
