"""Tensors and NumPy arrays inside plain values: which of them are plain bytes, and how arrays become tensors and back.

An array of a dtype that torch shares is stored as a tensor of that dtype, any other (big-endian, fixed-length strings,
records) as its bytes. Object arrays have no bytes and are refused by the codec.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

_SHARED_DTYPES = frozenset(np.dtype(code) for code in "?bhilqBHILQefdFD")
"""Those that torch has too, in native byte order; by NumPy's one-letter codes."""


def reason_not_plain(tensor: Tensor) -> str | None:
    """Why a tensor is not simply a block of numbers (`a sparse tensor`), or None if it is."""
    if type(tensor) is not Tensor and type(tensor) is not Parameter:
        if isinstance(tensor, (UninitializedBuffer, UninitializedParameter)):
            return "a tensor whose shape is not known yet"
        return f"a tensor of the class {type(tensor).__module__}.{type(tensor).__qualname__}"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}"
    if tensor.is_inference():
        return "a tensor of torch.inference_mode()"
    if tensor.is_quantized:
        return "a quantised tensor"
    if tensor.is_meta:
        return "a tensor on the meta device, without values"
    return None


def unusual_stride(tensor: Tensor) -> tuple[int, ...] | None:
    """The strides of a tensor that fills its storage in another order than row-major (`channels_last`), else None."""
    if tensor.is_contiguous():
        return None
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return None
        expected *= size
    return tuple(tensor.stride())


def describe_dtype(dtype: np.dtype[Any]) -> Any:
    """A dtype as strings, lists and tuples, as in .npy files."""
    return np.lib.format.dtype_to_descr(dtype)


def dtype_of(description: Any) -> np.dtype[Any]:
    """The dtype of a description. Raises ValueError for one with objects."""
    dtype: np.dtype[Any] = np.lib.format.descr_to_dtype(description)
    if dtype.hasobject:
        raise ValueError("an array of objects cannot be read")
    return dtype


def tensor_of(array: np.ndarray[Any, Any]) -> Tensor:
    """The elements in C order (F order for a Fortran array), one-dimensional; shares memory where it can."""
    fortran = array.flags.f_contiguous and not array.flags.c_contiguous
    flat = np.asarray(array).reshape(-1, order="F" if fortran else "C")
    if not flat.flags.c_contiguous or not flat.flags.writeable:
        flat = np.array(flat)
    if flat.dtype not in _SHARED_DTYPES:
        flat = np.frombuffer(bytearray(flat.tobytes()), np.uint8)
    return torch.from_numpy(flat)


def array_of(tensor: Tensor, dtype: np.dtype[Any], shape: tuple[int, ...], order: str) -> np.ndarray[Any, Any]:
    """The array that `tensor_of` was given; a writable copy. Raises ValueError if the bytes do not fit the shape."""
    raw = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
    count = int(np.prod(shape, dtype=np.int64))
    if raw.size != count * dtype.itemsize:
        raise ValueError(f"{raw.size} bytes for an array of {count} elements of {dtype}")
    elements = np.frombuffer(bytearray(raw.tobytes()), dtype) if raw.size else np.zeros(count, dtype)
    return elements.reshape(shape, order="F" if order == "F" else "C")
