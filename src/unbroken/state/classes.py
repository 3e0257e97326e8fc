"""Enums, dataclasses and named tuples in plain values.

A checkpoint names a class; nothing of it is ever imported or called, because a checkpoint may come from anyone
(invariant 10). Classes are looked up in the modules that this process has loaded by itself, must be what the checkpoint
says they are, and are filled field by field: no `__init__`, no `__new__`, no property, no `__setattr__` of theirs runs.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import sys
from types import MemberDescriptorType
from typing import Any

from unbroken.errors import StateMismatch


def name_of(cls: type) -> str:
    """`module:qualified name`."""
    return f"{cls.__module__}:{cls.__qualname__}"


def reason_not_storable(value: object) -> str | None:
    """None if the value is an enum member, dataclass or named tuple that can be stored; else a hint, perhaps ""."""
    cls = type(value)
    if isinstance(value, enum.Enum):
        if value.name is None or type(value).__members__.get(value.name) is not value:
            return "store the flags' integer value"
    elif dataclasses.is_dataclass(value):
        if not _is_plain_object(cls):
            return "a dataclass that is also another kind of object; store its fields"
        extra = set(getattr(value, "__dict__", {})) - {field.name for field in dataclasses.fields(value)}
        if extra:
            return f"its attributes {sorted(extra)[:3]} are no fields of the dataclass"
        if not all(_is_plain_field(cls, field.name) for field in dataclasses.fields(value)):
            return "a dataclass with a field that is computed; store its fields"
    elif not _is_namedtuple(cls):
        return ""
    return None if _find(name_of(cls)) is cls else "its class cannot be found by its name; define it in a module"


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that are set, by name."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if hasattr(value, field.name)}


def member_of(name: str, member: str) -> enum.Enum:
    """A member of an enum. Raises StateMismatch if this process has no such enum or member."""
    cls = _find(name)
    if not (isinstance(cls, enum.EnumMeta) and member in cls.__members__):
        raise _changed(name, f"the enum member {member!r}")
    found: enum.Enum = cls.__members__[member]
    return found


def make_namedtuple(name: str, fields: dict[str, Any]) -> tuple[Any, ...]:
    """A named tuple. Raises StateMismatch if its class is not there or has other fields."""
    cls = _find(name)
    if not (isinstance(cls, type) and _is_namedtuple(cls)) or cls._fields != tuple(fields):  # type: ignore[attr-defined]
        raise _changed(name, f"a named tuple of {sorted(fields)}")
    return tuple.__new__(cls, tuple(fields.values()))


def make_dataclass(name: str, fields: dict[str, Any]) -> object:
    """A dataclass. Raises StateMismatch if its class is not there or lacks a field."""
    cls = _find(name)
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls) and _is_plain_object(cls)):
        raise _changed(name, f"a dataclass of {sorted(fields)}")
    known = {field.name for field in dataclasses.fields(cls)}
    if not set(fields) <= known or not all(_is_plain_field(cls, field) for field in fields):
        raise _changed(name, f"a dataclass of {sorted(fields)}")
    made: object = object.__new__(cls)
    for field, item in fields.items():
        object.__setattr__(made, field, item)
    return made


def _find(name: str) -> object:
    """The object that a loaded module holds under a qualified name, or None. Runs no module's `__getattr__`."""
    module, _, qualname = name.partition(":")
    found: object = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found


def _is_namedtuple(cls: type) -> bool:
    fields = getattr(cls, "_fields", None)
    return issubclass(cls, tuple) and isinstance(fields, tuple) and all(isinstance(field, str) for field in fields)


def _is_plain_object(cls: type) -> bool:
    """True if an instance consists of its attributes alone (no dict, tensor or module underneath)."""
    foreign = (dict, list, tuple, set, frozenset, str, bytes, int, float, BaseException)
    return not issubclass(cls, foreign) and not hasattr(cls, "state_dict")


def _is_plain_field(cls: type, field: str) -> bool:
    """True if setting the field stores it and does nothing else."""
    found = inspect.getattr_static(cls, field, None)
    return isinstance(found, MemberDescriptorType) or not hasattr(type(found), "__set__")


def _changed(name: str, what: str) -> StateMismatch:
    return StateMismatch(f"the checkpoint holds {what} of {name}, which this process does not have: import it first")
