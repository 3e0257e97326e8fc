"""What the registered objects bring into the checkpoint with them, beside themselves.

Follows how the state is captured: a module's submodules and tensors; a scheduler's inner schedulers; the optimizer
inside an optimizer; a loader's sampler and generators; and of any other object with a `state_dict` what it holds as
attributes, one or two levels deep. A scheduler's optimizer and an optimizer's parameters are not saved with them.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, IterableDataset

from unbroken.coverage.alive import is_resumable
from unbroken.coverage.peek import attributes, elements, has_methods, is_a, is_container, is_leaf
from unbroken.state.rng import GENERATORS

_OBJECT_LEVELS = 2
_LOADER_LEVELS = 4
"""A resumable loader, its feed, the inner loader, its sampler's generator."""
_DATA = ("dataset", "_dataset", "data_source")
"""Attributes of loaders and samplers under which the data set lies."""


class Covered:
    """Objects and tensors, by identity. Valid while they live: for one search only."""

    def __init__(self) -> None:
        self._known: set[int] = set()
        self.has_loader = False
        """Whether something in it may be what the training takes its batches from."""

    def __contains__(self, value: object) -> bool:
        return id(value) in self._known

    def add(self, value: object, levels: int = _OBJECT_LEVELS) -> None:
        """A registered object, or one that a registered object holds, and what is saved with it.

        levels  of attributes to go on through, if it is an object of no particular kind
        """
        if id(value) in self._known or is_leaf(value):
            if is_a(value, Tensor):
                self._known.add(id(value))
            return
        self._known.add(id(value))
        self.has_loader |= (
            not is_a(value, nn.Module) and not is_container(value) and has_methods(type(value), "__iter__")
        )
        if is_container(value):
            for _, held in elements(value):
                self.add(held, levels)
        elif is_a(value, nn.Module):
            self._add_module(value)
        elif is_a(value, Optimizer):
            self._add_parts(value, Optimizer)
        elif is_a(value, LRScheduler):
            self._add_parts(value, LRScheduler)
        elif is_a(value, DataLoader) or is_resumable(value):
            self._add_loader(value, _LOADER_LEVELS)
        elif levels and not is_a(value, GradScaler, *GENERATORS):
            for held in list(attributes(value).values()):
                self.add(held, levels - 1)

    def _add_module(self, root: object) -> None:
        for module in with_submodules(root):
            self._known.add(id(module))
            self._known |= {id(tensor) for tensor in own_tensors(module)}
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                for name, held in list(attributes(module).items()):
                    if name not in ("_modules", "_parameters", "_buffers"):
                        self.add(held, _OBJECT_LEVELS - 1)

    def _add_parts(self, whole: object, kind: type) -> None:
        for part in parts_of(whole, kind):
            self.add(part)

    def _add_loader(self, part: object, levels: int) -> None:
        for name, held in list(attributes(part).items()):
            if name in _DATA:
                if _is_saved_with_loader(held):
                    self.add(held)
            else:
                self._add_loader_part(held, levels)

    def _add_loader_part(self, held: object, levels: int) -> None:
        for _, inner in elements(held):
            self._add_loader_part(inner, levels)
        if is_leaf(held) or is_container(held) or is_a(held, nn.Module, Optimizer, LRScheduler):
            return  # a collate function may hold the model
        if levels and id(held) not in self._known:
            self._known.add(id(held))
            self._add_loader(held, levels - 1)


def _is_saved_with_loader(dataset: object) -> bool:
    return is_a(dataset, IterableDataset) and has_methods(type(dataset), "state_dict", "load_state_dict")


def with_submodules(root: object) -> Iterator[nn.Module]:
    """The module and all below it, each once."""
    seen: set[int] = set()
    stack = [root]
    while stack:
        module = stack.pop()
        if id(module) not in seen and is_a(module, nn.Module):
            seen.add(id(module))
            yield module  # type: ignore[misc]
            stack += children(module)


def children(module: object) -> list[object]:
    """The modules right below one."""
    return list((attributes(module).get("_modules") or {}).values())


def own_tensors(module: object) -> list[Tensor]:
    """A module's own parameters and buffers, without those of its submodules."""
    own = attributes(module)
    held = [*(own.get("_parameters") or {}).values(), *(own.get("_buffers") or {}).values()]
    return [tensor for tensor in held if is_a(tensor, Tensor)]


def parts_of(whole: object, kind: type) -> list[object]:
    """What an object holds of its own kind: an optimizer that it wraps, schedulers that it chains."""
    held = [value for attribute in list(attributes(whole).values()) for value in _one_or_many(attribute)]
    return [value for value in held if value is not whole and is_a(value, kind)]


def _one_or_many(value: object) -> list[object]:
    return [held for _, held in elements(value)] if is_container(value) else [value]
