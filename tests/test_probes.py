"""A few elements of each tensor tell whether it was written into."""

import pytest
import torch

from unbroken.probes import PER_TENSOR, Probes, RowProbes

TENSORS = {
    "matrix": lambda: torch.arange(60.0).reshape(12, 5),
    "scalar": lambda: torch.tensor(3.0),
    "one": lambda: torch.ones(1, dtype=torch.bfloat16),
    "few": lambda: torch.arange(5, dtype=torch.int8),
    "empty": lambda: torch.empty(0, 3),
    "complex": lambda: torch.randn(4, 4, dtype=torch.complex128),
    "transposed": lambda: torch.arange(60.0).reshape(12, 5).t(),
    "sliced": lambda: torch.arange(60.0).reshape(12, 5)[:, 1:4],
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "bool": lambda: torch.ones(9, dtype=torch.bool),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_copy_shows_the_same_elements_and_another_value_does_not(name):
    tensor = TENSORS[name]()
    rows = tensor.is_contiguous()
    copy = tensor.clone(memory_format=torch.contiguous_format)
    live, copied = Probes([tensor], [rows]), Probes([copy], [rows])
    before = live.read()
    assert list(live.where_different(before, copied.read())) == []
    tensor.data.copy_(tensor.logical_not() if tensor.dtype is torch.bool else tensor + 1)
    assert list(live.where_different(before, live.read())) == ([0] if tensor.numel() else [])
    assert list(live.where_different(before, copied.read())) == []


def test_the_tensor_that_differs_is_told():
    tensors = [torch.zeros(100) for _ in range(5)]
    probes = Probes(tensors, [True] * 5)
    before = probes.read()
    tensors[3].data.add_(1)
    assert list(probes.where_different(before, probes.read())) == [3]


def test_first_and_last_are_among_the_elements():
    for length in range(1, 50):
        tensor = torch.zeros(length)
        probes = Probes([tensor], [True])
        for index in (0, -1) if length <= PER_TENSOR else (0,):
            before = probes.read()
            tensor[index] += 1
            assert list(probes.where_different(before, probes.read())) == [0]


def test_nan_and_negative_zero_are_compared_by_bytes():
    tensor = torch.tensor([float("nan"), -0.0])
    probes = Probes([tensor], [True])
    before = probes.read()
    assert list(probes.where_different(before, probes.read())) == []
    tensor[1] = 0.0
    assert list(probes.where_different(before, probes.read())) == [0]


def test_nothing_is_nothing():
    probes = Probes([], [])
    assert list(probes.where_different(probes.read(), probes.read())) == []


def test_probes_of_rows_tell_which_tensor_differs_whatever_their_dtypes():
    dtypes = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex128, torch.int8)
    tensors = [torch.randn(100).to(dtype) for dtype in dtypes] + [torch.empty(0, 3), torch.tensor(float("nan"))]
    probes, copied = RowProbes(tensors), RowProbes([tensor.clone() for tensor in tensors])
    before = probes.read()
    assert list(probes.where_different(before, copied.read())) == []
    for index in (*range(len(dtypes)), len(tensors) - 1):
        tensors[index].data.copy_(tensors[index].logical_not() if index == 4 else torch.full_like(tensors[index], 7))
        assert list(probes.where_different(before, probes.read())) == [index]
        before = probes.read()
    assert list(RowProbes(tensors[7:8]).read()) == []
