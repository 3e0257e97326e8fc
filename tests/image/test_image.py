import json

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from unbroken.image.header import LENGTH_BYTES, PAGE_BYTES, dtype_name, dtype_of
from unbroken.image.image import Arena, TensorSpec, lay_out

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.complex64,
    torch.complex128,
]
specs = st.lists(
    st.tuples(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12),
        st.sampled_from(DTYPES),
        st.lists(st.integers(0, 4), max_size=3).map(tuple),
    ),
    unique_by=lambda spec: spec[0],
    max_size=8,
).map(lambda items: [TensorSpec(*item) for item in items if item[0] != "__metadata__"])


def random_bytes_like(view: torch.Tensor) -> torch.Tensor:
    return torch.randint(0, 2 if view.dtype == torch.bool else 256, (view.nbytes,), dtype=torch.uint8)


@given(specs)
def test_any_safetensors_reader_gets_back_the_bytes(specs):
    arena = Arena()
    views = arena.take_shape(lay_out(specs))
    written = {}
    for name, view in views.items():
        data = random_bytes_like(view)
        view.flatten().view(torch.uint8).copy_(data)
        written[name] = data
    loaded = safetensors.torch.load(bytes(arena.content()))
    assert loaded.keys() == written.keys()
    for name, tensor in loaded.items():
        assert torch.equal(tensor.flatten().view(torch.uint8), written[name])


@given(specs)
def test_data_begins_on_a_page_and_has_no_holes(specs):
    layout = lay_out(specs)
    length = int.from_bytes(layout.header[:LENGTH_BYTES], "little")
    assert (LENGTH_BYTES + length) % PAGE_BYTES == 0
    ends = [LENGTH_BYTES + length, *(entry.end for entry in layout.entries)]
    assert [entry.begin for entry in layout.entries] == ends[:-1]
    assert layout.size == ends[-1]
    assert all(entry.begin % entry.dtype.itemsize == 0 for entry in layout.entries)


@given(specs, st.randoms())
def test_the_same_tensors_in_any_order_give_the_same_header(specs, random):
    shuffled = list(specs)
    random.shuffle(shuffled)
    assert lay_out(specs).header == lay_out(shuffled).header


def test_a_reused_arena_holds_only_the_new_image():
    arena = Arena()
    arena.take_shape(lay_out([TensorSpec("big", torch.float32, (5000,))]))["big"].fill_(1)
    small = lay_out([TensorSpec("small", torch.float32, (2,))])
    arena.take_shape(small)["small"].zero_()
    assert len(arena.content()) == small.size
    assert safetensors.torch.load(bytes(arena.content()))["small"].tolist() == [0, 0]


def test_a_dtype_that_safetensors_lacks_is_stored_as_bytes():
    layout = lay_out([TensorSpec("z", torch.complex128, (3,))])
    described = json.loads(layout.header[LENGTH_BYTES:])["z"]
    assert described == {"dtype": "U8", "shape": [3, 16], "data_offsets": [0, 48]}


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_manifest_names_every_dtype(dtype):
    assert dtype_of(dtype_name(dtype)) is dtype


@pytest.mark.parametrize("name", ["float33", "Tensor", "nn", "__class__", "os.system", ""])
def test_a_name_that_is_no_dtype_is_refused(name):
    with pytest.raises(ValueError, match="has no dtype"):
        dtype_of(name)
