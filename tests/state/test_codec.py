"""Laws and refusals of the codec for plain values."""

from __future__ import annotations

import dataclasses
import enum
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from datetime import UTC, date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rebuild import same_bytes
from unbroken.errors import DamagedCheckpoint, StateMismatch, UnsupportedValue
from unbroken.state.codec import decode, encode, references

Point = namedtuple("Point", "x y")


class Colour(enum.Enum):
    RED = 1
    BLUE = "b"


class Bits(enum.IntFlag):
    ONE = 1
    TWO = 2


@dataclasses.dataclass
class Progress:
    done: int
    best: float = math.inf
    history: list[int] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        CALLS.append("init")

    def __setattr__(self, name: str, value: object) -> None:
        CALLS.append(name)
        object.__setattr__(self, name, value)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    name: str


CALLS: list[str] = []


def through(value: object) -> Any:
    """Encode, pass through JSON bytes and copies of the tensors, decode."""
    tensors: dict[str, torch.Tensor] = {}
    encoded = msgspec.json.decode(msgspec.json.encode(encode(value, "thing", tensors)))
    assert {reference.name for reference in references(encoded)} == set(tensors)
    return decode(encoded, {name: tensor.clone() for name, tensor in tensors.items()})


def bits(value: object) -> object:
    """The value in a form in which `==` compares types, order and every bit."""
    if isinstance(value, float):
        return ("float", type(value), struct.pack(">d", value))
    if isinstance(value, complex):
        return ("complex", bits(value.real), bits(value.imag))
    if isinstance(value, dict):
        return (type(value), tuple((bits(key), bits(item)) for key, item in value.items()))
    if isinstance(value, (set, frozenset)):
        return (type(value), frozenset(bits(item) for item in value))
    if isinstance(value, (list, tuple, deque)):
        return (type(value), getattr(value, "maxlen", None), tuple(bits(item) for item in value))
    return (type(value), value)


nan = st.integers(1, (1 << 52) - 1).map(lambda low: struct.unpack(">d", struct.pack(">Q", 0x7FF0 << 48 | low))[0])
atoms = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    nan,
    st.complex_numbers(),
    st.text(st.characters()),
    st.binary(),
    st.datetimes(timezones=st.sampled_from([None, UTC, timezone(timedelta(minutes=-90))])),
    st.dates(),
    st.timedeltas(),
)
CONTAINERS = {
    "list": list,
    "tuple": tuple,
    "deque": lambda items: deque(items, 3),
    "dict": lambda items: dict(zip(NAMES, items, strict=False)),
    "ordered": lambda items: OrderedDict(zip(reversed(NAMES), items, strict=False)),
}
NAMES = ["a", 1, True, (2, "b"), "$", "1", "\udfff", -0.0, ""]
scalars_in_sets = st.lists(st.one_of(st.integers(), st.text(), st.tuples(st.integers())))


def grow(inner):
    return st.tuples(st.sampled_from(sorted(CONTAINERS)), st.lists(inner)).map(
        lambda pair: CONTAINERS[pair[0]](pair[1])
    )


trees = st.recursive(st.one_of(atoms, scalars_in_sets.map(set), scalars_in_sets.map(frozenset)), grow)


@given(trees)
def test_every_tree_of_plain_values_comes_back_with_its_types_and_bits(value):
    assert bits(through(value)) == bits(value)


@given(trees)
def test_an_encoded_value_is_the_same_after_a_second_round(value):
    assert encode(through(value), "x", {}) == encode(value, "x", {})


@pytest.mark.parametrize(
    "value",
    [
        -0.0,
        math.inf,
        16**5000,
        -(1 << 63) - 1,
        1 << 63,
        "\ud800",
        {"\udfff": 1},
        {1: "a", "1": "b", 1.5: "c", (1, "x"): "d"},
        Counter({"x": 3, 4: -1}),
        OrderedDict([("b", 1), ("a", 2)]),
        deque([1, 2], maxlen=3),
        Path("/tmp/x"),
        torch.Size([2, 0]),
        torch.bfloat16,
        torch.device("cuda", 1),
        bytearray(b"ab"),
        Point(1, (2,)),
        Colour.BLUE,
        Bits.TWO,
        Frozen("n"),
        date(2026, 12, 1),
        datetime(2026, 12, 1, 2, 30, fold=1),
        [True, 1, 1.0],
    ],
    ids=lambda value: ascii(value)[:30] if not isinstance(value, int) or abs(value) < 1 << 70 else "huge",
)
def test_a_value_comes_back_as_what_it_was(value):
    assert bits(through(value)) == bits(value)


def test_a_flag_is_no_bare_integer_and_a_bool_no_one():
    assert type(through(Bits.TWO)) is Bits
    assert through({True: 1}).popitem()[0] is True


@pytest.mark.parametrize("factory", [list, int, dict, set, float, None])
def test_a_default_dict_keeps_its_factory(factory):
    value = defaultdict(factory, {"a": 1})
    again = through(value)
    assert type(again) is defaultdict and again == value and again.default_factory is factory


def test_a_dataclass_is_filled_without_running_its_code():
    value = Progress(3, history=[1])
    CALLS.clear()
    again = through(value)
    assert CALLS == []
    assert again == value


def dtypes():
    names = "float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 uint16 uint32 uint64 bool complex64"
    return [getattr(torch, name) for name in [*names.split(), "complex128", "float8_e4m3fn", "float8_e5m2"]]


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)], ids=str)
def test_a_tensor_of_any_dtype_keeps_every_bit(dtype, shape):
    count = math.prod(shape) * dtype.itemsize
    raw = (torch.arange(count, dtype=torch.uint8) * 37) % 2 if dtype is torch.bool else torch.randint(0, 256, (count,))
    value = raw.to(torch.uint8).view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    assert same_bytes(through({"a": value})["a"], value)


def test_a_tensor_is_referred_to_and_not_copied():
    tensors: dict[str, torch.Tensor] = {}
    shadow = torch.nn.Parameter(torch.ones(2))
    encode({"shadow": [shadow]}, "ema", tensors)
    assert tensors["ema/shadow/0"].data_ptr() == shadow.data_ptr()
    assert not tensors["ema/shadow/0"].requires_grad


def test_keys_with_one_spelling_do_not_share_a_tensor():
    value = {1: torch.ones(1), "1": torch.zeros(1)}
    again = through(value)
    assert same_bytes(again[1], value[1]) and same_bytes(again["1"], value["1"])


def test_a_dense_tensor_in_another_order_says_so():
    tensors: dict[str, torch.Tensor] = {}
    image = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    encoded = encode([image, image[:, :2]], "x", tensors)
    assert [reference.stride for reference in references(encoded)] == [image.stride(), None]


ARRAYS = [
    np.arange(6, dtype=">i4").reshape(2, 3),
    np.array(["ab", "c"]),
    np.array([b"ab", b"c"]),
    np.array([1.5, np.nan], np.float16),
    np.array(3, np.uint32),
    np.zeros((0, 2), np.uint64),
    np.zeros(2, [("a", "<i4"), ("b", "S3")]),
    np.array(["2026-12-01"], "datetime64[D]"),
    np.arange(6, dtype=np.longdouble),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.arange(6)[::-2],
    np.array([True, False]),
    np.array([1j], np.complex64),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}{array.shape}")
def test_an_array_keeps_dtype_byte_order_shape_and_bits_and_is_writable(array):
    again = through([array])[0]
    assert (again.dtype.str, again.dtype.descr, again.shape) == (array.dtype.str, array.dtype.descr, array.shape)
    assert again.tobytes() == array.tobytes()
    assert again.flags.f_contiguous == array.flags.f_contiguous or array.flags.c_contiguous is False
    again[...] = again


@pytest.mark.parametrize("scalar", [np.float64(-0.0), np.int8(3), np.bool_(True), np.str_("é"), np.float32("nan")])
def test_a_numpy_scalar_is_no_python_number(scalar):
    again = through(scalar)
    assert type(again) is type(scalar) and again.tobytes() == scalar.tobytes()


class Plain:
    pass


def cycle() -> list[Any]:
    value: list[Any] = []
    value.append({"a": value})
    return value


def deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(5000):
        value = [value]
    return value


class Strange(str):
    pass


REFUSED = [
    ({"fn": lambda x: x}, r"scheduler\.state_dict\(\)\['fn'\] is a builtins\.function"),
    ({"a": [1, Plain()]}, r"state_dict\(\)\['a'\]\[1\] is a .*Plain"),
    ({"c": cycle()}, r"\['c'\]\[0\]\['a'\] refers back"),
    (deep(), "nested deeper than 200"),
    (np.array([None]), "numpy.ndarray"),
    (defaultdict(lambda: 1), r"default_factory is a builtins\.function"),
    (torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
    (torch.empty(2, device="meta"), "meta device"),
    (Strange("x"), "Strange"),
    (Bits.ONE | Bits.TWO, "integer value"),
    (open, "builtin_function"),
    (Plain, "builtins.type"),
    ({Plain(): 1}, "Plain"),
    (torch.nn.Linear(1, 1), "Linear"),
]


@pytest.mark.parametrize(("value", "text"), REFUSED, ids=lambda item: item if isinstance(item, str) else "")
def test_what_has_no_exact_form_is_refused_by_its_path(value, text):
    with pytest.raises(UnsupportedValue, match=text):
        encode(value, "scheduler", {}, text="scheduler.state_dict()")


def test_a_dataclass_with_attributes_of_its_own_is_refused():
    value = Progress(1)
    value.more = 2  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedValue, match=r"'more'"):
        encode(value, "x", {})


def test_sets_have_one_form_whatever_order_they_have_in_this_process():
    assert encode({"b", "a", "c"}, "x", {}) == encode({"c", "b", "a"}, "x", {})
    assert list(encode({"b", "a", "c"}, "x", {})["items"]) == ["a", "b", "c"]


HOSTILE = [
    ({"$": "enum", "class": "os:system", "member": "x"}, StateMismatch),
    ({"$": "dataclass", "class": "subprocess:Popen", "fields": {"args": ["true"]}}, StateMismatch),
    ({"$": "dataclass", "class": f"{__name__}:Progress", "fields": {"__class__": 1}}, StateMismatch),
    ({"$": "dataclass", "class": f"{__name__}:Frozen", "fields": {"other": 1}}, StateMismatch),
    ({"$": "namedtuple", "class": f"{__name__}:Point", "fields": {"x": 1}}, StateMismatch),
    ({"$": "namedtuple", "class": "this:Point", "fields": {}}, StateMismatch),
    ({"$": "dtype", "name": "load"}, DamagedCheckpoint),
    ({"$": "dtype", "name": "nothing"}, DamagedCheckpoint),
    ({"$": "defaultdict", "pairs": [], "factory": "eval"}, DamagedCheckpoint),
    ({"$": "array", "name": "a", "dtype": "|O", "shape": [1], "order": "C"}, DamagedCheckpoint),
    ({"$": "array", "name": "a", "dtype": "<i8", "shape": [1 << 40], "order": "C"}, DamagedCheckpoint),
    ({"$": "numpy-scalar", "dtype": "|O", "base64": "AAAAAAAAAAA="}, DamagedCheckpoint),
    ({"$": "tensor", "name": "b"}, DamagedCheckpoint),
    ({"$": "list"}, DamagedCheckpoint),
    ({"$": 3}, DamagedCheckpoint),
    ({"$": "init__"}, DamagedCheckpoint),
    ({"$": "set", "items": [[]]}, DamagedCheckpoint),
]


@pytest.mark.parametrize(("value", "error"), HOSTILE, ids=lambda item: str(item)[:60])
def test_a_hostile_value_is_refused_and_imports_and_calls_nothing(value, error):
    CALLS.clear()
    with pytest.raises(error):
        decode(value, {"a": torch.zeros(8, dtype=torch.uint8)})
    assert CALLS == []
