"""Tensors of a foreign checkpoint on their way into ours: what they are, and how to get their parts one at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unbroken.errors import DamagedCheckpoint, UsageError
from unbroken.layout.boxes import Box, whole
from unbroken.state.arrays import reason_not_plain
from unbroken.state.names import storage_key


@dataclass(frozen=True, slots=True)
class IncomingPart:
    """A part of a tensor that lies in one place of the source."""

    box: Box
    load: Callable[[], Tensor]
    """Reads it; of the box's shape and the tensor's dtype. Raises DamagedCheckpoint."""


@dataclass(frozen=True, slots=True, eq=False)
class IncomingTensor:
    """A tensor of the source, not read yet."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[IncomingPart, ...]
    """They cover the tensor; whether exactly once is checked when a manifest is made of them."""
    identity: object
    """Equal for tensors that are one tensor in the source."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return whole(self.shape).numel * self.dtype.itemsize

    def load(self) -> Tensor:
        """All of it."""
        if len(self.parts) == 1:
            return self.load_part(self.parts[0])
        loaded = torch.empty(self.shape, dtype=self.dtype)
        for part in self.parts:
            loaded[part.box.slices(whole(self.shape))] = self.load_part(part)
        return loaded

    def load_part(self, part: IncomingPart) -> Tensor:
        """One part, which is what was said of it. Raises DamagedCheckpoint."""
        loaded = part.load()
        if (loaded.dtype, tuple(loaded.shape)) != (self.dtype, part.box.shape):
            found = f"{loaded.dtype} {list(loaded.shape)}"
            raise DamagedCheckpoint(f"a part that should be {self.dtype} {list(part.box.shape)} is {found}")
        return loaded.detach()


def incoming(tensor: Tensor, text: str) -> IncomingTensor:
    """A tensor that is there already, perhaps mapped from a file. `text` names it in errors.

    Raises UsageError for one that is no plain block of numbers.
    """
    problem = reason_not_plain(tensor)
    if problem is None and tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        problem = "a tensor whose elements share memory"  # a small file could ask for any number of bytes
    if problem is not None:
        raise UsageError(f"{text} is {problem}, which cannot be imported: save plain dense tensors")
    part = IncomingPart(whole(tuple(tensor.shape)), lambda: tensor)
    return IncomingTensor(tensor.dtype, tuple(tensor.shape), (part,), storage_key(tensor))


def with_incoming(tree: Any, text: str = "") -> Any:
    """The same tree of dicts and lists with its tensors as IncomingTensor. Raises UsageError."""
    if isinstance(tree, Tensor):
        return incoming(tree, text or "the tensor")
    if isinstance(tree, dict):
        return {key: with_incoming(item, f"{text}.{key}" if text else str(key)) for key, item in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(with_incoming(item, f"{text}.{index}") for index, item in enumerate(tree))
    return tree


def with_tensors(tree: Any) -> Any:
    """The inverse: everything loaded."""
    if isinstance(tree, IncomingTensor):
        return tree.load()
    if isinstance(tree, dict):
        return {key: with_tensors(item) for key, item in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(map(with_tensors, tree))
    return tree
