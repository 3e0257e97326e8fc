"""The DataLoader that does the fetching: the user's own, with every option, over our keys or our items.

It always runs with `batch_size=None`, because batches are put together inside the data set (`dataset.py`,
`iterable.py`), where their randomness can be seeded, in the main process and in workers alike.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

_logger = logging.getLogger("unbroken.data")


def build_inner(loader: DataLoader[Any], dataset: Any, sampler: Any = None) -> tuple[DataLoader[Any], torch.Generator]:
    """A DataLoader over `dataset` with the options of `loader`, and its generator.

    The generator is its own: iter() draws the workers' base seed from it, never from the global stream.
    """
    generator = torch.Generator()
    options: dict[str, Any] = {
        "batch_size": None,
        "collate_fn": as_is,
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": WorkerStart(loader.worker_init_fn),
        "multiprocessing_context": loader.multiprocessing_context,
        "prefetch_factor": loader.prefetch_factor if loader.num_workers > 0 else None,
        "persistent_workers": loader.persistent_workers,
        "generator": generator,
    }
    pin_device = getattr(loader, "pin_memory_device", "")
    if pin_device and "pin_memory_device" in inspect.signature(DataLoader.__init__).parameters:
        options["pin_memory_device"] = pin_device
    if sampler is not None:
        options["sampler"] = sampler
    if not getattr(loader, "in_order", True):
        # The order in which workers happen to finish cannot be repeated; the inner loader's default keeps the order.
        _logger.warning("in_order=False cannot be resumed exactly; batches are delivered in order")
    return DataLoader(dataset, **options), generator


def as_is(batch: Any) -> Any:
    """The inner loader's collate function: the batch was put together by the data set. A plain function, for spawn."""
    return batch


class WorkerStart:
    """Runs in each worker as it starts: shows the user's code the user's data set, then calls the user's function."""

    def __init__(self, worker_init_fn: Any) -> None:
        self.worker_init_fn = worker_init_fn

    def __call__(self, worker_id: int) -> None:
        info: Any = get_worker_info()
        wrapper = info.dataset
        # WorkerInfo refuses assignment; user functions read `info.dataset` and expect their own (torch's documentation
        # splits an IterableDataset among workers by it).
        object.__setattr__(info, "dataset", wrapper.dataset)
        identity = getattr(wrapper, "identity_of", None)
        if identity is not None:
            worker_id = identity(worker_id)
            object.__setattr__(info, "id", worker_id)
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker_id)
