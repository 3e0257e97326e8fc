"""Plain values <-> typed JSON, exactly, and without pickle (invariant 10).

Comes in: any tree a `state_dict()` may give. Goes out: JSON that survives any JSON writer that keeps 64-bit integers
and shortest-form floats, and the tree's tensors by reference. What JSON has by itself (null, booleans, 64-bit integers,
finite floats, strings, lists, dicts with string keys) stands as it is; everything else is an object with the key `$`,
which names its type. A dict that has such a key itself is written as pairs.

What has no exact form here is refused by its path; nothing is ever dropped, rounded or turned into something similar.
Reading runs no code of the checkpoint's choosing: see `classes.py`. Two references to one object inside a tree may
come back as two objects; for tensors and arrays as two copies.
"""

from __future__ import annotations

import base64
import enum
import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from unbroken.errors import DamagedCheckpoint, UnsupportedValue
from unbroken.state import arrays, classes
from unbroken.state.captured import Json

TAG = "$"
MOST_LEVELS = 200
"""Values nested deeper than this are refused: JSON readers recurse, and must not be driven out of their stack."""
_FACTORIES: dict[str, Callable[[], Any]] = {kind.__name__: kind for kind in (list, int, dict, set, float)}
_INT64 = range(-(1 << 63), 1 << 63)


class Place(msgspec.Struct, frozen=True):
    """Where in the tree the encoder stands."""

    path: str
    """Name for a tensor found here: `ema/shadow/0`."""
    text: str
    """For people: `ema.state_dict()['shadow'][0]`."""
    level: int = 0

    def item(self, key: object) -> Place:
        """The place of `container[key]`."""
        spelled = _spelled(key)
        part = key if isinstance(key, str) and key and _is_text(key) else spelled
        return Place(f"{self.path}/{part}", f"{self.text}[{spelled}]", self.level + 1)

    def field(self, name: str) -> Place:
        """The place of `value.name`."""
        return Place(f"{self.path}/{name}", f"{self.text}.{name}", self.level + 1)


class TensorReference(msgspec.Struct, frozen=True):
    """A tensor that an encoded value refers to."""

    name: str
    device: str
    """Kind of device it lay on: `cpu`, `cuda`."""
    stride: tuple[int, ...] | None
    """In elements, if it was dense in another order than row-major."""


def encode(value: object, path: str, tensors: dict[str, Tensor], *, text: str | None = None) -> Json:
    """The value as JSON.

    path     prefix of the names under which the value's tensors are put into `tensors` (detached, not copied)
    text     how errors call the value, `scheduler.state_dict()`; `path` if not given

    Raises UnsupportedValue, which names the first part that cannot be stored exactly.
    """
    return _Encoder(tensors).encode(value, Place(path, text or path))


def decode(value: Json, tensors: Mapping[str, Tensor]) -> Any:
    """The value that `encode` was given; tensors are those of `tensors`, not copies.

    Raises StateMismatch if it needs a class that this process has not imported or that changed, DamagedCheckpoint if
    it is not what `encode` writes.
    """
    try:
        return _Decoder(tensors).decode(value)
    except (KeyError, ValueError, TypeError, AttributeError, OverflowError, RecursionError, struct.error) as error:
        if isinstance(error, DamagedCheckpoint) or type(error).__module__ == "unbroken.errors":
            raise
        raise DamagedCheckpoint(f"an encoded value is not as `unbroken` writes it: {error!r}") from error


def references(value: Json) -> Iterator[TensorReference]:
    """Every tensor that an encoded value refers to, arrays included."""
    if isinstance(value, list):
        for item in value:
            yield from references(item)
    elif isinstance(value, dict):
        if value.get(TAG) in ("tensor", "array"):
            stride = value.get("stride")
            yield TensorReference(value["name"], value.get("device", "cpu"), tuple(stride) if stride else None)
        for item in value.values():
            yield from references(item)


def _spelled(key: object) -> str:
    """A key for people; a number of thousands of digits and a key whose `repr` fails have none of their own."""
    try:
        return ascii(key)[:80]
    except Exception:
        return f"a {type(key).__name__}"


def _is_text(text: str) -> bool:
    """False for strings with lone surrogates, which UTF-8 and JSON writers refuse."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _tagged(tag: str, **fields: Json) -> dict[str, Json]:
    return {TAG: tag, **fields}


def _encode_float(value: float) -> Json:
    if math.isfinite(value):
        return value
    return _tagged("float", bits=struct.pack(">d", value).hex())


def _encode_text(value: str) -> Json:
    return value if _is_text(value) else _tagged("str", utf8=value.encode("utf-8", "surrogatepass").hex())


def _encode_datetime(value: datetime, place: Place) -> Json:
    if value.tzinfo is not None and type(value.tzinfo) is not timezone:
        raise _unsupported(value.tzinfo, place.field("tzinfo"), "use datetime.timezone or a POSIX time stamp")
    return _tagged("datetime", iso=value.isoformat(), fold=value.fold)


def _unsupported(value: object, place: Place, hint: str) -> UnsupportedValue:
    kind = type(value)
    return UnsupportedValue(
        f"{place.text} is a {kind.__module__}.{kind.__qualname__}, which cannot be stored without pickle: {hint}"
    )


_SIMPLE: dict[type, Callable[[Any], Json]] = {
    type(None): lambda value: None,
    bool: lambda value: value,
    int: lambda value: value if value in _INT64 else _tagged("int", hex=hex(value)),
    float: _encode_float,
    str: _encode_text,
    complex: lambda value: _tagged("complex", real=_encode_float(value.real), imag=_encode_float(value.imag)),
    bytes: lambda value: _tagged("bytes", base64=base64.b64encode(value).decode()),
    bytearray: lambda value: _tagged("bytearray", base64=base64.b64encode(value).decode()),
    torch.Size: lambda value: _tagged("size", shape=list(value)),
    torch.dtype: lambda value: _tagged("dtype", name=str(value).removeprefix("torch.")),
    torch.device: lambda value: _tagged("device", name=str(value)),
    timedelta: lambda value: _tagged("timedelta", parts=[value.days, value.seconds, value.microseconds]),
    date: lambda value: _tagged("date", iso=value.isoformat()),
}


class _Encoder:
    """One encoding of one tree."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self._open: set[int] = set()

    def encode(self, value: Any, place: Place) -> Json:
        simple = _SIMPLE.get(type(value))
        if simple is not None:
            return simple(value)
        if place.level >= MOST_LEVELS:
            raise UnsupportedValue(f"{place.text[:80]}… is nested deeper than {MOST_LEVELS} levels")
        if id(value) in self._open:
            raise UnsupportedValue(f"{place.text} refers back to a value that contains it; break the cycle")
        self._open.add(id(value))
        try:
            return self._encode_composed(value, place)
        finally:
            self._open.discard(id(value))

    def _encode_composed(self, value: Any, place: Place) -> Json:
        kind = type(value)
        if kind is list:
            return self._items(value, place)
        if kind in (tuple, deque):
            fields = {"maxlen": value.maxlen} if kind is deque else {}
            return _tagged(kind.__name__, items=self._items(value, place), **fields)
        if kind in (dict, OrderedDict, Counter, defaultdict):
            return self._mapping(value, place)
        if kind in (set, frozenset):
            # Sorted by their text, so that two saves of one state have the same bytes in every process.
            return _tagged(kind.__name__, items=sorted(self._items(value, place), key=json.dumps))
        if isinstance(value, Tensor):
            return self._tensor(value, place)
        if isinstance(value, (np.ndarray, np.generic, np.dtype)):
            return self._numpy(value, place)
        if kind is datetime:
            return _encode_datetime(value, place)
        if isinstance(value, Path):
            return _tagged("path", text=_encode_text(str(value)))
        return self._instance(value, place)

    def _items(self, values: Iterable[object], place: Place) -> list[Json]:
        return [self.encode(item, place.item(index)) for index, item in enumerate(values)]

    def _mapping(self, value: Mapping[Any, Any], place: Place) -> Json:
        if type(value) is dict and TAG not in value and all(type(key) is str and _is_text(key) for key in value):
            return {key: self.encode(item, place.item(key)) for key, item in value.items()}
        pairs = [[self.encode(key, place.item(key)), self.encode(item, place.item(key))] for key, item in value.items()]
        tagged = _tagged(type(value).__name__, pairs=pairs)
        if isinstance(value, defaultdict):
            factory = value.default_factory
            if factory is not None and _FACTORIES.get(getattr(factory, "__name__", "")) is not factory:
                raise _unsupported(factory, place.field("default_factory"), "use list, int, dict, set or float")
            tagged["factory"] = None if factory is None else getattr(factory, "__name__", None)
        return tagged

    def _refer(self, tensor: Tensor, place: Place) -> str:
        name = place.path
        while name in self._tensors:  # the keys 1 and "1" of one dict lead to one name
            name += "'"
        self._tensors[name] = tensor
        return name

    def _tensor(self, value: Tensor, place: Place) -> Json:
        problem = arrays.reason_not_plain(value)
        if problem is not None:
            raise UnsupportedValue(f"{place.text} is {problem}; store its parts as plain tensors")
        tagged = _tagged("tensor", name=self._refer(value.detach(), place), device=value.device.type)
        stride = arrays.unusual_stride(value)
        if stride is not None:
            tagged["stride"] = list(stride)
        return tagged

    def _numpy(self, value: Any, place: Place) -> Json:
        dtype = value if isinstance(value, np.dtype) else value.dtype
        if dtype.hasobject or type(value) in (np.ma.MaskedArray, np.matrix, np.recarray):
            raise _unsupported(value, place, "convert it to a numeric numpy.ndarray")
        described = self.encode(arrays.describe_dtype(dtype), place.field("dtype"))
        if isinstance(value, np.dtype):
            return _tagged("numpy-dtype", dtype=described)
        if isinstance(value, np.generic):
            raw = base64.b64encode(np.asarray(value).tobytes()).decode()
            return _tagged("numpy-scalar", dtype=described, base64=raw)
        name = self._refer(arrays.tensor_of(value), place)
        fortran = value.flags.f_contiguous and not value.flags.c_contiguous
        return _tagged("array", name=name, dtype=described, shape=list(value.shape), order="F" if fortran else "C")

    def _instance(self, value: Any, place: Place) -> Json:
        hint = "give it as numbers, strings, lists, dicts, tensors or NumPy arrays, or leave it out of the state"
        problem = classes.reason_not_storable(value)
        if problem is not None:
            raise _unsupported(value, place, problem or hint)
        name = classes.name_of(type(value))
        if isinstance(value, enum.Enum):
            return _tagged("enum", **{"class": name}, member=value.name)
        if isinstance(value, tuple):
            fields = dict(zip(type(value)._fields, value, strict=True))  # type: ignore[attr-defined]
            tag = "namedtuple"
        else:
            fields = classes.fields_of(value)
            tag = "dataclass"
        encoded = {field: self.encode(item, place.field(field)) for field, item in fields.items()}
        return _tagged(tag, **{"class": name}, fields=encoded)


class _Decoder:
    """One decoding of one tree."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def decode(self, value: Json) -> Any:
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        if TAG not in value:
            return {key: self.decode(item) for key, item in value.items()}
        tag = value[TAG]
        simple = _READERS.get(tag)
        if simple is not None:
            return simple(value)
        reader = getattr(self, "_read_" + tag.replace("-", "_").lower(), None)
        if reader is None:
            raise DamagedCheckpoint(f"an encoded value has the unknown type {tag!r}")
        return reader(value)

    def _list(self, value: Json) -> list[Any]:
        return [self.decode(item) for item in value["items"]]

    def _pairs(self, value: Json) -> list[tuple[Any, Any]]:
        return [(self.decode(key), self.decode(item)) for key, item in value["pairs"]]

    def _read_tuple(self, value: Json) -> object:
        return tuple(self._list(value))

    def _read_deque(self, value: Json) -> object:
        return deque(self._list(value), value["maxlen"])

    def _read_set(self, value: Json) -> object:
        return set(self._list(value))

    def _read_frozenset(self, value: Json) -> object:
        return frozenset(self._list(value))

    def _read_dict(self, value: Json) -> object:
        return dict(self._pairs(value))

    def _read_ordereddict(self, value: Json) -> object:
        return OrderedDict(self._pairs(value))

    def _read_counter(self, value: Json) -> object:
        counter: Counter[Any] = Counter()
        for key, count in self._pairs(value):
            counter[key] = count
        return counter

    def _read_defaultdict(self, value: Json) -> object:
        factory = value["factory"]
        return defaultdict(None if factory is None else _FACTORIES[factory], self._pairs(value))

    def _read_tensor(self, value: Json) -> object:
        return self._tensors[value["name"]]

    def _read_array(self, value: Json) -> object:
        dtype = arrays.dtype_of(self.decode(value["dtype"]))
        return arrays.array_of(self._tensors[value["name"]], dtype, tuple(value["shape"]), value["order"])

    def _read_numpy_dtype(self, value: Json) -> object:
        return arrays.dtype_of(self.decode(value["dtype"]))

    def _read_numpy_scalar(self, value: Json) -> object:
        dtype = arrays.dtype_of(self.decode(value["dtype"]))
        return np.frombuffer(base64.b64decode(value["base64"]), dtype)[0]

    def _read_enum(self, value: Json) -> object:
        return classes.member_of(value["class"], value["member"])

    def _read_namedtuple(self, value: Json) -> object:
        fields = {field: self.decode(item) for field, item in value["fields"].items()}
        return classes.make_namedtuple(value["class"], fields)

    def _read_dataclass(self, value: Json) -> object:
        fields = {field: self.decode(item) for field, item in value["fields"].items()}
        return classes.make_dataclass(value["class"], fields)


def _read_float(value: Json) -> float:
    if isinstance(value, float):
        return value
    (number,) = struct.unpack(">d", bytes.fromhex(value["bits"]))
    return float(number)


def _read_dtype(value: Json) -> torch.dtype:
    dtype = getattr(torch, value["name"])
    if not isinstance(dtype, torch.dtype):
        raise DamagedCheckpoint(f"torch.{value['name']} is no dtype")
    return dtype


def _read_text(value: Json) -> str:
    return value if isinstance(value, str) else bytes.fromhex(value["utf8"]).decode("utf-8", "surrogatepass")


_READERS: dict[str, Callable[[Json], Any]] = {
    "float": _read_float,
    "int": lambda value: int(value["hex"], 16),
    "str": _read_text,
    "complex": lambda value: complex(_read_float(value["real"]), _read_float(value["imag"])),
    "bytes": lambda value: base64.b64decode(value["base64"]),
    "bytearray": lambda value: bytearray(base64.b64decode(value["base64"])),
    "size": lambda value: torch.Size(value["shape"]),
    "dtype": _read_dtype,
    "device": lambda value: torch.device(value["name"]),
    "timedelta": lambda value: timedelta(*value["parts"]),
    "date": lambda value: date.fromisoformat(value["iso"]),
    "datetime": lambda value: datetime.fromisoformat(value["iso"]).replace(fold=value["fold"]),
    "path": lambda value: Path(_read_text(value["text"])),
}
