"""What a checkpoint holds, for a reader that has no live objects: registered names, the tensors of a module, its ties.

Needs no process group and no GPU. Tensors come in stretches of a few MiB whatever pieces they lie in, so a model may be
larger than memory; every byte is verified on the way (invariant 2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from unbroken.candidates import Saved, saved_for
from unbroken.comparison import Side, stretches
from unbroken.errors import DamagedCheckpoint, UsageError
from unbroken.image.header import dtype_of
from unbroken.manifest import Manifest, TensorRecord
from unbroken.state.draft import count_and_name
from unbroken.state.merging import MERGED
from unbroken.store.local import LocalStore

CHUNK_BYTES = 4 << 20

Progress = Callable[[int], None]
"""Called with the number of bytes read since the last call."""


@dataclass(frozen=True, slots=True)
class Contents:
    """One checkpoint as one of its ranks would restore it; of models and optimizers also what other ranks had."""

    side: Side
    saved: Saved
    rank: int
    notes: list[str] = field(default_factory=list)
    """What the reader should know, one line each: whose values were taken where ranks had their own."""

    @property
    def manifest(self) -> Manifest:
        """Of the checkpoint."""
        return self.side.manifest

    def registered(self, kind: str | None = None) -> list[str]:
        """Registered names, those of one kind if it is given; without what every rank has (`rng`, `gradients`)."""
        return [
            name
            for name, value in self.saved.values.items()
            if name not in ("rng", "gradients") and kind in (None, value["kind"])
        ]

    def record(self, name: str) -> TensorRecord:
        """Where a tensor lies, by its full name. Raises DamagedCheckpoint if the checkpoint refers to it without it."""
        found = self.saved.records.get(name)
        if found is None:
            raise DamagedCheckpoint(f"{self.side.directory} refers to the tensor {name!r}, which it does not have")
        return found

    def chunks(self, name: str, progress: Progress) -> Iterator[memoryview]:
        """The bytes of a tensor in row-major order, little endian, at most CHUNK_BYTES at once.

        Raises DamagedCheckpoint at the first block that does not match its digest.
        """
        record = self.record(name)
        most = max(CHUNK_BYTES // dtype_of(record.dtype).itemsize, 1)
        for box in stretches(tuple(record.shape), most):
            data = self.side.read(name, record, box).data.cast("B")
            yield data
            progress(len(data))

    def note_whose(self, names: Iterable[str]) -> None:
        """Remember which of these tensors and values several ranks had as their own, and whose are taken."""
        own = [name for name in names if self._holders(name) > 1]
        here = {**self.manifest.rank_tensors[self.rank], **self.manifest.values_of(self.rank)}
        lacking = any(name not in here for name in own)
        whose = f"rank {self.rank}, or of the first that had them," if lacking else f"rank {self.rank}"
        if own:
            self.notes.append(f"ranks had their own of {count_and_name(own)}: those of {whose} are taken")

    def _holders(self, name: str) -> int:
        """How many ranks had a tensor, or an object's values, as their own."""
        if name in self.manifest.values and self.saved.values[name]["kind"] not in MERGED:
            return len(self.manifest.values[name])
        if name in self.manifest.tensors:
            return 0
        return sum(name in own for own in self.manifest.rank_tensors)


def contents_of(store: LocalStore, directory: str, manifest: Manifest, rank: int = 0) -> Contents:
    """What `rank` would restore of a checkpoint. Raises UsageError if there was no such rank."""
    if not 0 <= rank < manifest.world_size:
        raise UsageError(f"{directory} was saved by ranks 0-{manifest.world_size - 1}: there is no rank {rank}")
    return Contents(Side(store, directory, manifest), saved_for(manifest, rank, manifest.world_size), rank)


def choose_module(contents: Contents, name: str | None) -> str:
    """The registered name of the module that is meant: the only one, unless `name` says which. Raises UsageError."""
    modules = contents.registered("module")
    if name is None:
        if len(modules) == 1:
            return modules[0]
        which = f"several modules: say which with --name ({', '.join(modules)})" if modules else "no module"
        raise UsageError(f"{contents.side.directory} holds {which}")
    if name not in modules:
        raise UsageError(f"{contents.side.directory} holds no module {name!r}; it holds {', '.join(modules) or 'none'}")
    return name


@dataclass(frozen=True, slots=True)
class ModuleTensors:
    """The tensors of a module as its `state_dict()` names them."""

    stored: dict[str, str]
    """Each tensor once: name in the module -> full name in the checkpoint."""
    aliases: dict[str, str]
    """Further names of tied tensors -> the name in `stored` of the same tensor."""
    extra: dict[str, Any]
    """Encoded extra state by the name of the submodule, "" for the module itself."""


def tensors_of_module(contents: Contents, module: str) -> ModuleTensors:
    """Parameters and persistent buffers of a registered module."""
    value = contents.saved.values[module]
    aliases = value.get("aliases", {})
    stored: dict[str, str] = {}
    kept: dict[str, str] = {}
    tied: dict[str, str] = {}
    for fqn in dict.fromkeys([*value["parameters"], *value.get("buffers", [])]):
        full = aliases.get(fqn, f"{module}/{fqn}")
        if full in kept:
            tied[fqn] = kept[full]
        else:
            kept[full] = fqn
            stored[fqn] = full
    return ModuleTensors(stored, tied, value["extra"])


def nbytes(record: TensorRecord) -> int:
    """Bytes of a whole tensor."""
    return math.prod(record.shape) * dtype_of(record.dtype).itemsize
