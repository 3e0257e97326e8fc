"""Whether the values of a manifest are of the types that a save writes, before any live object sees them.

A digest shows that nobody changed a manifest by accident; whoever can write the directory can compute it. A learning
rate that is text, or a tensor reference without a tensor, would otherwise surface in the middle of a restore as the
user's own mistake, when half of the live state has been overwritten. Runs no code of the checkpoint's choosing and
looks up no class: that needs the running job (state/classes.py).

What an object's own `state_dict()` may hold is known to the object only; of that, the typed JSON alone is checked.
"""

from __future__ import annotations

import math
import re
from collections import ChainMap
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from unbroken.errors import DamagedCheckpoint
from unbroken.manifest import MOST, Manifest, TensorRecord, ValueRecord
from unbroken.state.codec import MOST_LEVELS, TAG

_INTEGER = re.compile("-?0x[0-9a-f]+")
_DEPTH = 4 * MOST_LEVELS
"""A level of a value takes at most this many levels of JSON: an object, a list of pairs, a pair, what is in it."""
_NUMBERS = ("lr", "initial_lr", "weight_decay", "momentum", "dampening", "betas", "eps", "alpha", "rho", "lambd")
"""Options that are a number, a tensor or a few of them in every optimizer of torch's."""
_RESERVED = {"rng": "generator", "gradients": "gradients"}
"""Names that are always of one kind."""

_NUMERIC = ("int", "float", "tensor", "array", "numpy-scalar")
_TEXT = (str,)
_LIST = (list,)
_OPTIONAL = (int, type(None))
_FIELDS: dict[str, dict[str, tuple[type, ...]]] = {
    "float": {"bits": _TEXT},
    "int": {"hex": _TEXT},
    "str": {"utf8": _TEXT},
    "complex": {"real": (float, dict), "imag": (float, dict)},
    "bytes": {"base64": _TEXT},
    "bytearray": {"base64": _TEXT},
    "size": {"shape": _LIST},
    "dtype": {"name": _TEXT},
    "device": {"name": _TEXT},
    "timedelta": {"parts": _LIST},
    "date": {"iso": _TEXT},
    "datetime": {"iso": _TEXT, "fold": (int,)},
    "path": {"text": (str, dict)},
    "tuple": {"items": _LIST},
    "set": {"items": _LIST},
    "frozenset": {"items": _LIST},
    "deque": {"items": _LIST, "maxlen": _OPTIONAL},
    "dict": {"pairs": _LIST},
    "OrderedDict": {"pairs": _LIST},
    "Counter": {"pairs": _LIST},
    "defaultdict": {"pairs": _LIST, "factory": (str, type(None))},
    "tensor": {"name": _TEXT, "device": _TEXT},
    "array": {"name": _TEXT, "dtype": (str, list, dict), "shape": _LIST, "order": _TEXT},
    "numpy-scalar": {"dtype": (str, list, dict), "base64": _TEXT},
    "numpy-dtype": {"dtype": (str, list, dict)},
    "enum": {"class": _TEXT, "member": _TEXT},
    "dataclass": {"class": _TEXT, "fields": (dict,)},
    "namedtuple": {"class": _TEXT, "fields": (dict,)},
}
"""Per type of the codec (state/codec.py): its fields and what JSON they are."""

Tensors = Mapping[str, TensorRecord]


class _Module(msgspec.Struct):
    """Value of a module."""

    parameters: list[str]
    frozen: list[str]
    transient_buffers: list[str]
    extra: dict[str, Any]
    aliases: dict[str, str] = {}
    buckets: dict[str, list[str]] = {}
    keeps_buffers: list[str] = []


class _Group(msgspec.Struct):
    """Options of one group of an optimizer."""

    params: list[str]
    options: dict[str, Any]
    shared: dict[str, str]


class _Placed(msgspec.Struct):
    """How a DTensor lay on the mesh of its parameter, which lay otherwise."""

    mesh: list[int]
    parameter: list[str]
    own: list[str]


class _ParameterState(msgspec.Struct):
    """What an optimizer keeps for one parameter."""

    keys: list[str]
    tensors: dict[str, str]
    shared: dict[str, str]
    rest: Any
    placements: dict[str, _Placed] = {}


class _Optimizer(msgspec.Struct):
    """Value of an optimizer."""

    groups: list[_Group]
    state: dict[str, _ParameterState]


class _ForeignOptimizer(msgspec.Struct):
    """Value of an optimizer with its own state_dict."""

    named: bool
    members: list[list[str]]
    groups: list[dict[str, Any]]
    state: dict[str, Any]
    more: dict[str, Any]


class _Object(msgspec.Struct):
    """Value of anything with state_dict."""

    state: Any


class _Generator(msgspec.Struct):
    """Value of a random number generator."""

    sort: str
    state: Any


class _Gradients(msgspec.Struct):
    """Which parameters had a gradient."""

    accumulating: bool
    present: list[str]
    placements: dict[str, _Placed] = {}


class _Tensor(msgspec.Struct):
    """Value of a tensor that is registered by itself: nothing but its kind."""


_KINDS: dict[str, type[msgspec.Struct]] = {
    "module": _Module,
    "optimizer": _Optimizer,
    "optimizer with its own state_dict": _ForeignOptimizer,
    "object": _Object,
    "generator": _Generator,
    "gradients": _Gradients,
    "tensor": _Tensor,
}


def check_values(manifest: Manifest, what: str) -> None:
    """Raise DamagedCheckpoint if a value is not as a save writes it, naming it by its path; `what` is the manifest."""
    try:
        _check_depth(manifest.environment, "environment", 0)
        for name, records in manifest.values.items():
            _check_ranks(name, records, manifest.world_size)
            for record in records:
                _check_value(name, record.value, ChainMap(manifest.rank_tensors[record.ranks[0][0]], manifest.tensors))
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise DamagedCheckpoint(f"{what} cannot be used: {error}") from error


def _check_ranks(name: str, records: list[ValueRecord], world_size: int) -> None:
    ranges = sorted(pair for record in records for pair in record.ranks)
    if not all(record.ranks for record in records):
        raise ValueError(f"a value of {name} belongs to no rank")
    next_rank = 0
    for first, last in ranges:
        if not next_rank <= first <= last < world_size:
            raise ValueError(f"values of {name} do not belong to ranks 0-{world_size - 1}, each at most once")
        next_rank = last + 1


def _check_value(name: str, value: Any, tensors: Tensors) -> None:
    kind = value.get("kind") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind != _RESERVED.get(name, kind):
        raise ValueError(f"the value of {name} does not say what kind of object it was")
    _check_tree(value, name, tensors, 0)
    if kind not in _KINDS:
        return  # of a later minor version; the live object that it does not fit says so
    try:
        checked = msgspec.convert(value, _KINDS[kind])
    except msgspec.ValidationError as error:
        raise ValueError(f"the value of {name}, {kind}: {error}") from error
    if isinstance(checked, _Optimizer):
        _check_optimizer(name, checked, tensors)
    elif isinstance(checked, _Generator) and name == "rng":
        _check_global_generators(checked.state)


def _check_optimizer(name: str, value: _Optimizer, tensors: Tensors) -> None:
    for index, group in enumerate(value.groups):
        for key, option in group.options.items():
            if key in ("params", "param_names"):
                raise ValueError(f"{name}/groups/{index}/options names parameters once more")
            if key in _NUMBERS and not _is_number(option):
                raise ValueError(f"{name}/groups/{index}/options/{key} is {_outline(option)}, not a number")
        _check_names(f"{name}/groups/{index}/shared", group.shared.values(), tensors)
    for parameter, state in value.state.items():
        place = f"{name}/state/{parameter}"
        _check_names(place, [f"{place}/{key}" for key in state.tensors], tensors)
        _check_names(place, state.shared.values(), tensors)
        if set(state.keys) != set(state.tensors) | set(state.shared) or not isinstance(state.rest, dict):
            raise ValueError(f"{place} lists other tensors than it has")


def _check_global_generators(state: Any) -> None:
    """Python and torch would raise in the middle of the restore, after everything else was overwritten."""
    if not isinstance(state, dict) or not isinstance(state.get("cuda", {}), dict):
        raise ValueError("rng/state is no object")
    python, numpy, torch = (state.get(key) for key in ("python", "numpy", "torch"))
    words = python.get("internal") if isinstance(python, dict) else None
    if not (isinstance(python, dict) and type(python.get("version")) is int and _tag(words) == "array"):
        raise ValueError("rng/state/python is no state of Python's generator")
    if not isinstance(python.get("gauss_next"), (float, type(None))):
        raise ValueError("rng/state/python/gauss_next is no number")
    inner = numpy.get("state") if isinstance(numpy, dict) else None
    if not (isinstance(inner, dict) and type(inner.get("pos")) is int and _tag(inner.get("key")) == "array"):
        raise ValueError("rng/state/numpy is no state of NumPy's generator")
    if _tag(torch) != "tensor":
        raise ValueError("rng/state/torch is no tensor")


def _check_names(place: str, names: Any, tensors: Tensors) -> None:
    for name in names:
        if name not in tensors:
            raise ValueError(f"{place} refers to the tensor {name[:80]!r}, which the checkpoint does not have")


def _check_tree(value: Any, place: str, tensors: Tensors, level: int) -> None:
    if level > _DEPTH:
        raise ValueError(f"{place[:80]}… is nested deeper than {MOST_LEVELS} levels")
    if isinstance(value, list):
        for index, item in enumerate(value):
            if isinstance(item, (list, dict)):  # spelling the place of each number costs more than the rest
                _check_tree(item, f"{place}/{index}", tensors, level + 1)
    elif isinstance(value, dict):
        if TAG in value:
            _check_tagged(value, place, tensors)
        for key, item in value.items():
            if isinstance(item, (list, dict)):
                _check_tree(item, f"{place}/{key}", tensors, level + 1)


def _check_tagged(value: dict[str, Any], place: str, tensors: Tensors) -> None:
    tag = value[TAG]
    fields = _FIELDS.get(tag) if isinstance(tag, str) else None
    if fields is None:
        raise ValueError(f"{place} has the unknown type {_outline(tag)}")
    for field, kinds in fields.items():
        if field not in value or type(value[field]) not in kinds:
            raise ValueError(f"{place}, a {tag}, has {_outline(value.get(field))} as its {field}")
    check = _CHECKS.get(tag)
    if check is not None and not check(value):
        raise ValueError(f"{place} is no {tag} as a save writes it")
    if tag in ("tensor", "array"):
        _check_names(place, [value["name"]], tensors)
        _check_stride(value, place, tensors[value["name"]])


def _check_stride(value: dict[str, Any], place: str, record: TensorRecord) -> None:
    """Strides that leave holes would allocate what they please."""
    stride = value.get("stride")
    if stride is None:
        return
    if not _is_shape(stride) or len(stride) != len(record.shape):
        raise ValueError(f"{place} has strides that do not fit its shape")
    expected = 1
    for step, length in sorted(zip(stride, record.shape, strict=True)):
        if length != 1 and step != expected:
            raise ValueError(f"{place} has strides that leave holes")
        expected *= length


def _check_depth(value: Any, place: str, level: int) -> None:
    if level > MOST_LEVELS:
        raise ValueError(f"{place} is nested deeper than {MOST_LEVELS} levels")
    if isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            _check_depth(item, place, level + 1)


def _tag(value: Any) -> str | None:
    tag = value.get(TAG) if isinstance(value, dict) else None
    return tag if isinstance(tag, str) else None


def _is_number(value: Any) -> bool:
    """True for what an option that is a number may be; None stands for one that is not set."""
    if _tag(value) == "tuple" or isinstance(value, list):
        return all(map(_is_number, value if isinstance(value, list) else value["items"]))
    return value is None or type(value) in (int, float, bool) or _tag(value) in _NUMERIC


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(type(length) is int and 0 <= length <= MOST for length in value)


def _is_pairs(value: dict[str, Any]) -> bool:
    return all(isinstance(pair, list) and len(pair) == 2 for pair in value["pairs"])


def _is_hex(text: str, digits: int | None = None) -> bool:
    try:
        return len(bytes.fromhex(text)) * 2 == len(text) and digits in (None, len(text))
    except ValueError:
        return False


_CHECKS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "int": lambda value: _INTEGER.fullmatch(value["hex"]) is not None,
    "float": lambda value: _is_hex(value["bits"], 16),
    "str": lambda value: _is_hex(value["utf8"]),
    "size": lambda value: _is_shape(value["shape"]),
    "array": lambda value: _is_shape(value["shape"]) and math.prod(value["shape"]) <= MOST,
    "timedelta": lambda value: len(value["parts"]) == 3 and all(type(part) is int for part in value["parts"]),
    "dict": _is_pairs,
    "OrderedDict": _is_pairs,
    "Counter": _is_pairs,
    "defaultdict": _is_pairs,
}


def _outline(value: Any) -> str:
    """A value for an error's text, short."""
    if value is None:
        return "nothing"
    if isinstance(value, str):
        return f"the text {value[:40]!r}"
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    return f"{value!r:.40}"
