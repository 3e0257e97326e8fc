"""Looking at objects that belong to somebody else without running any of their code.

`isinstance`, `getattr`, `vars` and `hasattr` may call `__class__`, `__getattr__`, properties or a lazy import. Here
types and instance dictionaries are read and nothing else, so that proxies, lazy modules and half-built objects stay as
they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType, FunctionType, GetSetDescriptorType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor

MOST_ELEMENTS = 64
"""Longer containers hold data, not the objects of a training script."""
_LEAVES = (str, bytes, int, float, complex, type, FunctionType, ModuleType, FrameType, Tensor, np.ndarray)
"""Not opened: they hold no training state as attributes, or are looked at in another way."""


def is_a(value: Any, *kinds: type) -> bool:
    """Like `isinstance`, by the true type only."""
    cls = type(value)
    for kind in kinds:  # noqa: SIM110  # asked of every tensor of a model: a generator costs three times as much
        if cls is kind or type.__subclasscheck__(kind, cls):
            return True
    return False


def inherits(cls: type, *kinds: type) -> bool:
    """Like `issubclass`, without what abstract classes make of it; a metaclass may have its own idea of equality."""
    return any(type.__subclasscheck__(kind, cls) for kind in kinds)


def attributes(value: object) -> dict[str, Any]:
    """The instance's own attributes; {} if it has none, or computes them. The live dictionary: not to be changed."""
    for base in type(value).__mro__:
        slot = base.__dict__.get("__dict__")
        if slot is not None:
            own = slot.__get__(value) if type(slot) is GetSetDescriptorType else None
            return own if type(own) is dict else {}
    return {}


def has_methods(cls: type, *names: str) -> bool:
    """Whether a class or one of its ancestors defines all these."""
    return all(any(name in base.__dict__ for base in cls.__mro__) for name in names)


def elements(value: Any) -> Iterator[tuple[str, Any]]:
    """What a small plain list, tuple, dict or set holds, each with its place (`[0]`, `['ema']`)."""
    if type(value) is dict and len(value) <= MOST_ELEMENTS:
        yield from ((f"[{key!r}]" if _is_exactly(key, str, int) else "[…]", held) for key, held in list(value.items()))
    elif _is_exactly(value, list, tuple, set) and len(value) <= MOST_ELEMENTS:
        yield from ((f"[{place}]", held) for place, held in enumerate(list(value)))


def is_container(value: Any) -> bool:
    """Whether `elements` is what to look into."""
    return _is_exactly(value, dict, list, tuple, set)


def is_leaf(value: object) -> bool:
    """Whether there is nothing to look into."""
    return value is None or is_a(value, *_LEAVES)


def _is_exactly(value: object, *kinds: type) -> bool:
    cls = type(value)
    return any(cls is kind for kind in kinds)
