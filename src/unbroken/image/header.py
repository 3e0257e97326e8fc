"""The header of a safetensors file: 8 bytes of length, then JSON, padded with spaces to a page.

The format (https://github.com/huggingface/safetensors, README "Format") allows no hole between tensors and ends with
the last tensor. So the header is padded until the data begins on a page, and tensors lie in order of falling element
size: each is aligned to its element without padding (DESIGN section 5).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

PAGE_BYTES = 4096
LENGTH_BYTES = 8
MOST_HEADER_BYTES = 256 << 20
"""A longer header is not read; safetensors itself refuses more than 100 MB."""

_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor inside a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    """First byte, counted from the start of the file."""
    end: int
    """One past the last byte."""


FILE_METADATA = {"format": "pt"}
"""What a header says of the file as a whole: Hugging Face's loaders ask for the framework."""


def build_header(entries: Sequence[Entry], data_begin: int, metadata: Mapping[str, str] = FILE_METADATA) -> bytes:
    """The header's bytes, exactly `data_begin` of them. `entries` in the order of their bytes.

    A dtype that safetensors lacks (complex, say) is written as bytes, with one more dimension for an element's bytes;
    the manifest says what it is.
    """
    described: dict[str, object] = {"__metadata__": dict(metadata)}
    for entry in entries:
        name, shape = stored_form(entry.dtype, entry.shape)
        described[entry.name] = {
            "dtype": name,
            "shape": shape,
            "data_offsets": [entry.begin - data_begin, entry.end - data_begin],
        }
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    room = data_begin - LENGTH_BYTES
    if len(text) > room:
        raise ValueError(f"header needs {len(text)} bytes but has {room}")
    return room.to_bytes(LENGTH_BYTES, "little") + text.ljust(room, b" ")


def header_room(names_and_dims: Sequence[tuple[str, int]], metadata: Mapping[str, str] = FILE_METADATA) -> int:
    """Bytes to keep free for the header of tensors with these names and numbers of dimensions: a multiple of a page.

    An upper bound, so that offsets can be fixed before the text is written.
    """
    digits = 20
    text = 64 + 4 * len(json.dumps(dict(metadata)))
    text += sum(len(json.dumps(name)) * 4 + 64 + digits * (dims + 3) for name, dims in names_and_dims)
    return -(-(LENGTH_BYTES + text) // PAGE_BYTES) * PAGE_BYTES


def stored_form(dtype: torch.dtype, shape: Sequence[int]) -> tuple[str, list[int]]:
    """The dtype's name and the shape under which a safetensors header lists a tensor."""
    if dtype in _NAMES:
        return _NAMES[dtype], list(shape)
    return "U8", [*shape, dtype.itemsize]


def bytes_of_element(name: str) -> int:
    """Bytes of one element of a dtype of a safetensors header. Raises ValueError for one that we do not write."""
    for dtype, known_as in _NAMES.items():
        if known_as == name:
            return dtype.itemsize
    raise ValueError(f"no dtype {name!r}")


def dtype_name(dtype: torch.dtype) -> str:
    """How the manifest names a dtype: torch's own name without `torch.`."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a manifest's name. Raises ValueError if this torch has none of that name."""
    dtype = getattr(torch, name, None) if name.isidentifier() else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch {torch.__version__} has no dtype {name!r}")
    return dtype
