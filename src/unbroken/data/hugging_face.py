"""What an IterableDataset of Hugging Face's `datasets` can restore from its own `state_dict`, told from its stages.

Read from the chain of stages by their names, without importing `datasets`. For any other data set: its word is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

_ONE_BY_ONE = (
    "ExamplesIterable",
    "ArrowExamplesIterable",
    "ShuffledDataSourcesExamplesIterable",
    "ShuffledDataSourcesArrowExamplesIterable",
    "SelectColumnsIterable",
    "MappedExamplesIterable",
    "FilteredExamplesIterable",
    "TakeExamplesIterable",
    "SkipExamplesIterable",
    "FormattedExamplesIterable",
    "RepeatExamplesIterable",
)
"""Stages that ask the stage below for an example when one is asked of them, and hold none back."""
_FUNCTIONS = ("MappedExamplesIterable", "FilteredExamplesIterable")
_THREADED = (
    "CyclingMultiSourcesExamplesIterable",
    "RandomlyCyclingMultiSourcesExamplesIterable",
    "InterleavedShardsExamplesIterable",
)
"""Stages that fetch the next example of each source on a thread pool."""


def state_is_exact(dataset: Any) -> bool:
    """Whether a state of `dataset`, if it has any, brings back all that comes after, randomness included.

    Not with a shuffle buffer, whose content the state leaves out. And not with a function that runs ahead of the
    example that comes out (mapped over batches, or below a stage that fetches ahead): after a restore it would run
    again, at another item and so with that item's randomness.
    """
    for stage in _stages(_first_stage(dataset)):
        if "BufferShuffled" in type(stage).__name__:
            return False
        if type(stage).__name__ in _FUNCTIONS and getattr(stage, "batched", False):
            return False
    return not _function_below(_first_stage(dataset), lambda name: name not in _ONE_BY_ONE)


def runs_functions_on_threads(dataset: Any) -> bool:
    """Whether functions of the user's run on several threads at once, so that no seed fixes what they draw."""
    return _function_below(_first_stage(dataset), lambda name: name in _THREADED)


def _first_stage(dataset: Any) -> Any:
    is_theirs = any(kind.__module__.startswith("datasets.") for kind in type(dataset).__mro__)
    return getattr(dataset, "_ex_iterable", None) if is_theirs else None


def _sources(stage: Any) -> list[Any]:
    below = [getattr(stage, "ex_iterable", None), *(getattr(stage, "ex_iterables", None) or [])]
    return [source for source in below if source is not None]


def _stages(stage: Any) -> Iterator[Any]:
    if stage is not None:
        yield stage
        for source in _sources(stage):
            yield from _stages(source)


def _function_below(stage: Any, matches: Callable[[str], bool], below: bool = False) -> bool:
    """Whether a stage whose name matches stands between a mapped function and the loop."""
    if stage is None:
        return False
    name = type(stage).__name__
    if below and name in _FUNCTIONS:
        return True
    return any(_function_below(source, matches, below or matches(name)) for source in _sources(stage))
