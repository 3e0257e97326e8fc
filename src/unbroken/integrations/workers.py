"""Loaders beside the training's, whose workers persist: of these a resumed job has others.

The workers of the job before had drawn random numbers, and the one seed that they share was drawn from the main
process once, when they started. Started for each pass, they do the same in every job.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader


def ending_with_each_pass(loader: Any) -> Any:
    """The loader, or what a framework put around it, with workers that end with each pass over it."""
    inner = getattr(loader, "base_dataloader", loader)  # Accelerate's wrapper has it
    if isinstance(inner, DataLoader) and inner.persistent_workers:
        object.__setattr__(inner, "persistent_workers", False)  # a DataLoader refuses to have it set
    return loader
