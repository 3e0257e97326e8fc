"""Reads a pickle as data: what it would call and with which arguments, without looking anything up or calling it.

`torch.distributed.checkpoint` keeps its metadata as a pickle. Python's `pickletools` splits it into instructions; here
they build lists, dicts, numbers and strings, and an `Inert` wherever the pickle names a class or asks for an object. So
reading the metadata of a hostile directory runs nothing (invariant 10).
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from unbroken.errors import DamagedCheckpoint


@dataclass(eq=False, slots=True)
class Inert:
    """What a pickle names or would make. Equal only to itself, so that it may be a key."""

    name: str
    """`module.qualified.name` of the class or function."""
    arguments: Any = None
    """What it would be called with; None if it is named only."""
    state: Any = None
    """What the made object would be given afterwards."""


def read_inert(data: bytes, what: str) -> Any:
    """The value of a pickle, of inert parts. `what` names it in errors.

    Raises DamagedCheckpoint if it is cut, or uses instructions that plain objects do not need.
    """
    machine = _Machine()
    try:
        for operation, argument, _ in pickletools.genops(data):
            if operation.name == "STOP":
                return machine.stack.pop()
            machine.run(operation.name, argument)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise DamagedCheckpoint(f"{what} cannot be read: {error or type(error).__name__}") from error
    raise DamagedCheckpoint(f"{what} is cut")


class _Machine:
    """The stack and the memory of one pickle."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memory: dict[int, Any] = {}

    def run(self, name: str, argument: Any) -> None:
        """One instruction. Raises ValueError for one that plain objects do not need."""
        if name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _LITERALS:
            self.stack.append(argument)
        elif name in _EMPTY:
            self.stack.append(_EMPTY[name]())
        elif name in _IGNORED:
            pass
        elif name in _PUTS:
            self._memory[len(self._memory) if argument is None else int(argument)] = self.stack[-1]
        elif name in _GETS:
            self.stack.append(self._memory[int(argument)])
        else:
            step = _STEPS.get(name)
            if step is None:
                raise ValueError(f"the instruction {name} is not expected here")
            step(self, argument)

    def since_mark(self) -> list[Any]:
        """What was pushed after the last mark, taken off."""
        items = self.stack
        self.stack = self._marks.pop()
        return items

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def mark(self, argument: Any) -> None:
        self._marks.append(self.stack)
        self.stack = []

    def name(self, argument: Any) -> None:
        self.stack.append(Inert(str(argument).replace(" ", ".", 1)))

    def stack_name(self, argument: Any) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.stack.append(Inert(f"{module}.{name}"))

    def make(self, argument: Any) -> None:
        arguments, target = self.stack.pop(), self.stack.pop()
        if not isinstance(target, Inert) or not isinstance(arguments, tuple):
            raise ValueError("something is called that is no name")
        self.stack.append(Inert(target.name, arguments))

    def build(self, argument: Any) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if not isinstance(target, Inert) or target.arguments is None:
            raise ValueError("state is given to what is no object")
        target.state = state

    def set_items(self, pairs: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(pairs) % 2:
            raise ValueError("items are put into what is no dict")
        target.update(zip(pairs[::2], pairs[1::2], strict=True))

    def append(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, list):
            raise ValueError("items are appended to what is no list")
        target.extend(items)

    def tuple_of(self, count: int) -> None:
        items = [self.stack.pop() for _ in range(count)]
        self.stack.append(tuple(reversed(items)))

    def two(self) -> list[Any]:
        value, key = self.stack.pop(), self.stack.pop()
        return [key, value]


_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_EMPTY: dict[str, type] = {"EMPTY_LIST": list, "EMPTY_DICT": dict}
_IGNORED = ("PROTO", "FRAME")
_PUTS = ("MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT")
_GETS = ("GET", "BINGET", "LONG_BINGET")
_NUMBERS = ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT")
_TEXTS = ("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8")
_LITERALS = frozenset({*_NUMBERS, *_TEXTS})
_STEPS: dict[str, Callable[[_Machine, Any], None]] = {
    "MARK": _Machine.mark,
    "GLOBAL": _Machine.name,
    "STACK_GLOBAL": _Machine.stack_name,
    "REDUCE": _Machine.make,
    "NEWOBJ": _Machine.make,
    "BUILD": _Machine.build,
    "TUPLE": lambda machine, _: machine.push(tuple(machine.since_mark())),
    "TUPLE1": lambda machine, _: machine.tuple_of(1),
    "TUPLE2": lambda machine, _: machine.tuple_of(2),
    "TUPLE3": lambda machine, _: machine.tuple_of(3),
    "APPEND": lambda machine, _: machine.append([machine.stack.pop()]),
    "APPENDS": lambda machine, _: machine.append(machine.since_mark()),
    "SETITEM": lambda machine, _: machine.set_items(machine.two()),
    "SETITEMS": lambda machine, _: machine.set_items(machine.since_mark()),
}
