"""Tensors that do not change (frozen weights): written once, and linked into each later checkpoint.

They are not copied. At each save their version counters and a few elements are compared with those of the save that
wrote them; and before a link counts, the digests of all their bytes with those of the file. What changed unseen costs
that save, and is copied and written at every save from then on.

Each checkpoint has a name of its own for the file, so that none depends on another that may be deleted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from unbroken.elements import as_bytes
from unbroken.image.digest import HEX_CHARS, BlockDigests
from unbroken.image.image import ImageLayout
from unbroken.overlap import moved, versions_of
from unbroken.planning import Plan
from unbroken.probes import Probes
from unbroken.state.captured import Captured, LiveTensor


@dataclass(slots=True)
class Frozen:
    """The tensors of a plan that do not change, and how they were when they were first looked at."""

    layout: ImageLayout
    names: list[str]
    """In the order of their bytes, as all that follows."""
    sources: list[Tensor]
    probes: Probes
    versions: list[int]
    elements: Tensor
    thawed: set[str] = field(default_factory=set)
    """Those that were found changed after all."""

    def is_where(self, other: Frozen) -> bool:
        """True if both are the same tensors in the same places."""
        if self.layout is not other.layout or self.names != other.names:
            return False
        return list(map(Tensor.data_ptr, self.sources)) == list(map(Tensor.data_ptr, other.sources))

    def look(self) -> set[str]:
        """Tensors that changed, as far as version counters and a few elements tell."""
        different = self.probes.where_different(self.elements, self.probes.read())
        self.thawed.update(moved(self.names, self.sources, self.versions), (self.names[index] for index in different))
        return self.thawed

    def content(self) -> Iterator[memoryview]:
        """The bytes of the file, from the tensors themselves."""
        yield memoryview(self.layout.header)
        for source in self.sources:
            yield as_bytes(source).numpy().data

    def compare(self, blocks: str, block_bytes: int) -> set[str]:
        """Tensors with bytes that do not match a file's digests. Reads all of them."""
        digests = BlockDigests(block_bytes)
        for _ in digests.of(self.content()):
            pass
        found = digests.text()
        for block in range(len(found) // HEX_CHARS):
            place = slice(block * HEX_CHARS, (block + 1) * HEX_CHARS)
            if found[place] != blocks[place]:
                begin, end = block * block_bytes, (block + 1) * block_bytes
                places = zip(self.names, self.layout.entries, strict=True)
                self.thawed.update(name for name, entry in places if entry.begin < end and entry.end > begin)
        return self.thawed


@dataclass(slots=True)
class Freezer:
    """Which tensors of a job are frozen. Used by the training thread."""

    _frozen: Frozen | None = None
    _found_in: tuple[Plan, Mapping[str, LiveTensor]] | None = None
    """The plan and the standing tensors that it was found in."""
    _thawed: set[str] = field(default_factory=set)
    """What seemed frozen, and changed."""

    def names(self, captured: Captured) -> frozenset[str]:
        """What wants no gradient, and did not change as long as it was looked at."""
        if self._frozen is not None:
            self._thawed |= self._frozen.look()
        return captured.frozen - self._thawed

    def of(self, plan: Plan, captured: Captured) -> Frozen | None:
        """The frozen tensors of a plan; the same object as before if they are the same in the same places.

        Takes a look at new ones, against which later looks are compared.
        """
        if self._found_in is not None and self._found_in[0] is plan and self._found_in[1] is captured.standing:
            return self._frozen
        self._found_in = plan, captured.standing
        found = _find(plan, captured)
        if found is None or self._frozen is None or not found.is_where(self._frozen):
            self._frozen = found
        return self._frozen


def _find(plan: Plan, captured: Captured) -> Frozen | None:
    if plan.kept is None:
        return None
    parts, layout = plan.kept
    by_stored = {part.stored_as: part for part in parts}
    ordered = [by_stored[entry.name] for entry in layout.entries]
    sources = [part.source(captured.tensors[part.tensor].tensor) for part in ordered]
    probes = Probes(sources, [True] * len(sources))
    return Frozen(layout, [part.tensor for part in ordered], sources, probes, versions_of(sources), probes.read())
