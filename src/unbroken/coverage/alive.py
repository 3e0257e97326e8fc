"""What is alive in this process that could be training state, and how the script calls it.

Two sources: the garbage collector knows every optimizer, module, loader, … wherever it is held; the variables of the
user's frames and modules give names, and the generators, which the collector does not know.
Nothing is kept: what is returned must be dropped before training goes on.
"""

from __future__ import annotations

import gc
import inspect
import random
import re
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import compress
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from unbroken.coverage.origins import is_users_class, is_users_module, namespace
from unbroken.coverage.peek import attributes, elements, has_methods, inherits, is_a, is_container, is_leaf
from unbroken.state.rng import GENERATORS

OPTIMIZER, SCHEDULER, SCALER, MODULE, TENSORS = "optimizer", "scheduler", "scaler", "module", "tensors"
GENERATOR, LOADER, ITERATION, OBJECT = "generator", "loader", "iteration", "object"
_BASES: tuple[tuple[type, str], ...] = (
    (Optimizer, OPTIMIZER),
    (LRScheduler, SCHEDULER),
    (GradScaler, SCALER),
    (nn.Module, MODULE),
    (DataLoader, LOADER),
    (_BaseDataLoaderIter, ITERATION),
)
_RESUMABLE, _LOADERS = "drain_samples", "unbroken.data"
"""What a class has that is a loader with an exact position, and where ours are. They are not imported here."""
_MOST_VISITED = 20_000
_not_users: set[str] = set()
"""Names of modules that were installed: thousands, which need not be looked at again."""
_OUTPUT = re.compile(r"_(\d+|_*|i+|oh|ih|dh|exit_code)|In|Out")
"""Names under which a notebook keeps what a cell gave: nobody knows a variable by them."""
_OF_MODULES = ("_parameters", "_buffers", "_modules")


@dataclass(slots=True)
class Alive:
    """Everything found, by kind, oldest first; and the name of what a variable leads to, by id."""

    by_kind: dict[str, list[Any]] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)

    def of(self, kind: str) -> list[Any]:
        """All of a kind."""
        return self.by_kind.get(kind, [])


def find_alive(frame: FrameType | None, *, everywhere: bool) -> Alive:
    """What is alive.

    frame       where the variables begin; its callers' follow
    everywhere  False: only what variables lead to, which is a tenth of the work
    """
    alive = Alive()
    modules = _users_modules()
    found: dict[int, tuple[str, object]] = {}
    if everywhere:
        kinds = _kinds_of_classes(modules)
        found = {id(value): (kinds[id(type(value))], value) for value in _collected(kinds)}
    kind_of_class: dict[int, str | None] = {}
    for name, value in _variables(frame, modules):
        alive.names.setdefault(id(value), name)
        cls = type(value)
        if id(cls) not in kind_of_class:
            kind_of_class[id(cls)] = _kind_of(cls)
        kind = kind_of_class[id(cls)]
        if kind is None and holds_tensors(value):
            kind = TENSORS
        if kind is not None and not (kind == GENERATOR and _is_global(value)):
            found.setdefault(id(value), (kind, value))
    for kind, value in found.values():
        alive.by_kind.setdefault(kind, []).append(value)
    return alive


def holds_tensors(value: object) -> bool:
    """Whether it is a plain dict, list or tuple of tensors and of nothing else."""
    if type(value) is dict:
        value = list(value.values())
    return (type(value) is list or type(value) is tuple) and bool(value) and all(is_a(v, torch.Tensor) for v in value)


def is_resumable(value: object) -> bool:
    """Whether it is a loader with an exact position."""
    return has_methods(type(value), _RESUMABLE)


def _kind_of(cls: type) -> str | None:
    """What the instances of a class are, if they could be training state."""
    for base, kind in _BASES:
        if inherits(cls, base):
            return kind
    if has_methods(cls, _RESUMABLE):
        return LOADER
    if inherits(cls, *GENERATORS):
        return GENERATOR
    if has_methods(cls, "state_dict", "load_state_dict"):
        author = next(base for base in cls.__mro__ if "state_dict" in base.__dict__)
        return OBJECT if is_users_class(author) else None
    return None


def _kinds_of_classes(modules: dict[str, dict[str, Any]]) -> dict[int, str]:
    """What to look for among all objects, by the id of the class: a metaclass may have a hash of its own.

    Of the user's classes those at the top of a module; instances of others are found if a variable leads to them.
    """
    kinds = {id(cls): kind for base, kind in _BASES for cls in _with_subclasses(base)}
    own = [namespace(module) for name, module in list(sys.modules.items()) if name.startswith(_LOADERS)]
    for names in [*own, *modules.values()]:
        for cls in list(names.values()):
            if is_a(cls, type) and id(cls) not in kinds:
                kind = _kind_of(cls)
                if kind in (LOADER, OBJECT):
                    kinds[id(cls)] = kind
    return kinds


def _with_subclasses(base: type) -> list[type]:
    known: dict[int, type] = {id(base): base}
    queue = [base]
    while queue:
        heirs: list[type] = type.__subclasses__(queue.pop())
        fresh = [heir for heir in heirs if id(heir) not in known]
        known.update((id(heir), heir) for heir in fresh)
        queue += fresh
    return list(known.values())


def _collected(kinds: dict[int, str]) -> list[object]:
    # The old generation first: then the order is that of their making, whenever the collector ran.
    found: list[object] = []
    for generation in (2, 1, 0):
        tracked = gc.get_objects(generation)
        found += compress(tracked, map(kinds.__contains__, map(id, map(type, tracked))))
    return found


def _is_global(generator: object) -> bool:
    hidden = [getattr(random, "_inst", None), getattr(np.random.mtrand, "_rand", None), torch.default_generator]
    for backend in ("cuda", "xpu"):
        hidden += getattr(getattr(torch, backend, None), "default_generators", ())
    return any(generator is other for other in hidden) or is_a(generator, random.SystemRandom)


def _variables(frame: FrameType | None, modules: dict[str, dict[str, Any]]) -> Iterator[tuple[str, Any]]:
    """What the user's variables lead to, each once under its shortest name: nearest first, then their attributes."""
    seen: set[int] = set()
    queue: deque[tuple[str, Any, int]] = deque((name, value, 0) for name, value in _roots(frame, modules))
    while queue and len(seen) < _MOST_VISITED:
        name, value, depth = queue.popleft()
        if id(value) in seen or is_leaf(value):
            continue
        seen.add(id(value))
        yield name, value
        if is_container(value):
            queue.extend((name + place, held, depth) for place, held in elements(value))
        elif depth < (2 if is_users_class(type(value)) else 1):
            hidden = _OF_MODULES if is_a(value, nn.Module) else ()
            own = [(key, held) for key, held in list(attributes(value).items()) if key not in hidden]
            queue.extend((f"{name}.{key}", held, depth + 1) for key, held in own)


def _users_modules() -> dict[str, dict[str, Any]]:
    """The globals of the script and of the user's own modules."""
    modules = {"__main__": namespace(sys.modules.get("__main__"))}
    for name in sorted(sys.modules.keys() - _not_users):
        names = namespace(sys.modules.get(name))
        if is_users_module(name, names):
            modules.setdefault(name, names)
        elif "__file__" in names:
            _not_users.add(name)
    return modules


def _roots(frame: FrameType | None, modules: dict[str, dict[str, Any]]) -> list[tuple[str, Any]]:
    roots: list[tuple[str, Any]] = []
    spaces = dict(modules)
    while frame is not None:
        name = frame.f_globals.get("__name__")
        if type(name) is str and is_users_module(name, frame.f_globals):
            spaces.setdefault(name, frame.f_globals)
            roots += _locals_of(frame)
        frame = frame.f_back
    roots += [entry for names in spaces.values() for entry in list(names.items())]
    named = [(name, value) for name, value in roots if type(name) is str and not _OUTPUT.fullmatch(name)]
    return sorted(named, key=lambda entry: entry[0].startswith("_"))


def _locals_of(frame: FrameType) -> list[tuple[str, Any]]:
    """The variables of a function that is running."""
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return []  # a module's or a class's body: its variables are globals, or short-lived
    snapshot: Any = frame.f_locals
    variables = list(snapshot.items())
    # Before Python 3.13 the frame keeps this copy until it ends, and with it the step's batch and loss. If the script
    # has called locals() itself, the copy is its own.
    if type(snapshot) is dict and sys.getrefcount(snapshot) <= 3:
        snapshot.clear()
    return variables
