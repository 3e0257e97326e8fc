"""A rank's part as bytes in memory, in its final file format: one image, many homes.

An `ImageLayout` fixes where each tensor lies; an `Arena` is the memory; together they give typed views to copy into.
What stands in the arena after the copy *is* the file: nothing is serialised afterwards.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from mmap import mmap

import torch

from unbroken.cuda import Pin
from unbroken.image.header import FILE_METADATA, Entry, build_header, header_room
from unbroken.image.memory import warm_memory


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that an image shall hold."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """Where everything lies in an image."""

    entries: tuple[Entry, ...]
    """In the order of their bytes; no holes between them."""
    header: bytes
    """The first bytes of the file; a multiple of a page."""
    size: int
    """Bytes of the whole file."""


def lay_out(specs: Sequence[TensorSpec], metadata: Mapping[str, str] = FILE_METADATA) -> ImageLayout:
    """Place tensors one after another, larger elements first, ties by name: the same specs give the same bytes.

    metadata  what the header says of the file as a whole
    """
    begin = header_room([(spec.name, len(spec.shape)) for spec in specs], metadata)
    data_begin = begin
    entries = []
    for spec in sorted(specs, key=lambda spec: (-spec.dtype.itemsize, spec.name)):
        end = begin + spec.dtype.itemsize * torch.Size(spec.shape).numel()
        entries.append(Entry(spec.name, spec.dtype, spec.shape, begin, end))
        begin = end
    return ImageLayout(tuple(entries), build_header(entries, data_begin, metadata), begin)


class Arena:
    """Page-aligned memory that is kept and reused: fresh pages cost ten times what warm ones do (DESIGN section 10).

    Used by one thread at a time; whoever holds it may write to it, nobody else reads it meanwhile.
    """

    def __init__(self) -> None:
        self._memory: mmap | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._layout: ImageLayout | None = None
        self._views: dict[str, torch.Tensor] = {}
        self._pin: Pin | None = None

    def take_shape(self, layout: ImageLayout) -> dict[str, torch.Tensor]:
        """Make room for `layout`, write its header, and return a typed view of each tensor's bytes by name."""
        if layout is self._layout:
            return self._views
        self.reserve(layout.size)
        assert self._memory is not None
        self._memory[: len(layout.header)] = layout.header
        self._layout = layout
        self._views = {entry.name: view_as(self._bytes, entry) for entry in layout.entries}
        return self._views

    def reserve(self, size: int) -> None:
        """Have memory for an image of `size` bytes, touched already. Bytes that were in it may be lost."""
        if self._memory is None or len(self._memory) < size:
            self._layout, self._views = None, {}  # before the new memory comes, what keeps the old one has to go
            self._bytes = torch.empty(0, dtype=torch.uint8)
            if self._pin is not None:
                self._pin.release()
            self._memory = self._pin = None
            self._memory = warm_memory(max(size, 1))
            self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)

    def pin(self) -> None:
        """Let CUDA devices write to its memory by themselves, if the system allows it. For the training thread."""
        if self._pin is None and self._memory is not None:
            self._pin = Pin(self._memory)
            # At the end of the process there may be copies under way, and all goes at once anyway.
            weakref.finalize(self, self._pin.release).atexit = False

    @property
    def is_pinned(self) -> bool:
        """True if CUDA has to hear of it before the memory goes."""
        return self._pin is not None and self._pin.is_held

    def content(self) -> memoryview:
        """The image's bytes: the whole file."""
        assert self._memory is not None and self._layout is not None, "take_shape comes first"
        return memoryview(self._memory)[: self._layout.size]


def view_as(data: torch.Tensor, entry: Entry) -> torch.Tensor:
    """The tensor that lies at `entry` in a flat uint8 tensor, without a copy."""
    return data[entry.begin : entry.end].view(entry.dtype).view(entry.shape)
