"""What one rank writes of a save: which parts of which tensors, where in its file, and what the manifest says of them.

Worked out once per structure (names, dtypes, shapes, spreads), from what this rank knows alone: holders of the same
parts divide them alike.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
import xxhash

from unbroken.garbage import without_collecting
from unbroken.image.header import dtype_name
from unbroken.image.image import ImageLayout, TensorSpec, lay_out
from unbroken.layout.boxes import Box, name_of_part, whole
from unbroken.layout.ownership import Extent, share_out, spread_evenly
from unbroken.layout.spread import Cuts, Stretch
from unbroken.manifest import CutsRecord, MeshRecord, PieceRecord, TensorRecord, record_of
from unbroken.state.captured import Captured, LiveTensor

LEAST_KEPT_BYTES = 1 << 20
"""Less than this that does not change is not worth a file of its own."""
MOST_PIECES = 16
"""A tensor in more pieces than this, each another rank's, is not listed piece by piece: a manifest of 1,000 tensors on
16,384 ranks would have a gigabyte."""


@dataclass(frozen=True, slots=True)
class Part:
    """What is copied from where: one tensor of the image."""

    tensor: str
    """Full name of the tensor."""
    box: Box
    """Which part of it."""
    stored_as: str
    """Its name in the file."""
    shared: bool
    """True: a part of what ranks share; False: this rank's own."""
    held: Box
    """What the live tensor holds, or that box of it which `box` lies in."""
    offset: int | None = None
    """Where that box begins in a live tensor that is flat, in elements; None if the live tensor is that box."""

    def source(self, live: torch.Tensor) -> torch.Tensor:
        """The view of the live tensor that is copied."""
        if self.offset is not None:
            live = live[self.offset : self.offset + self.held.numel].view(self.held.shape)
        return live if self.box == self.held else live[self.box.slices(self.held)]


@dataclass(frozen=True, slots=True)
class Plan:
    """What one rank writes as long as the structure of the state stays the same."""

    structure: str
    """Digest of the names, dtypes and shapes of all tensors of this rank."""
    parts: tuple[Part, ...]
    layout: ImageLayout
    shared: dict[str, TensorRecord]
    """Records of this rank's pieces of shared tensors; its files are counted from 0 until the commit."""
    cut: tuple[dict[str, TensorRecord], list[MeshRecord]]
    """Records of tensors in too many pieces to be listed, with their meshes; from the first rank of each mesh only."""
    own: dict[str, TensorRecord]
    """Records of this rank's own tensors."""
    frozen: frozenset[str] = frozenset()
    """Tensors that do not change, as far as was known."""
    kept: tuple[tuple[Part, ...], ImageLayout] | None = None
    """Parts that do not change, in a file of their own, which is this rank's last."""


def structure_of(captured: Captured, shared_only: bool = False) -> str:
    """Digest of what tensors there are: names, dtypes, shapes, and how they lie on the ranks.

    Of shared tensors it is the same for all ranks that have the same ones, whatever parts of them they hold.
    """
    return Structures().of(captured, shared_only)


@dataclass(slots=True)
class Structures:
    """The same, looking at standing tensors only when they are others than last time."""

    _standing: Mapping[str, LiveTensor] | None = None
    _digests: dict[bool, str] = field(default_factory=dict)

    def of(self, captured: Captured, shared_only: bool = False) -> str:
        """See `structure_of`."""
        if self._standing is not captured.standing:
            self._standing, self._digests = captured.standing, {}
        if shared_only not in self._digests:
            self._digests[shared_only] = _digest_structure(captured.standing, shared_only)
        others = captured.tensors.keys() - captured.standing.keys()
        rest = _digest_structure({name: captured.tensors[name] for name in others}, shared_only)
        return f"{self._digests[shared_only]} {rest}"


def _digest_structure(tensors: Mapping[str, LiveTensor], shared_only: bool) -> str:
    text = "\n".join(
        f"{name}\t{live.tensor.dtype}\t{live.spread.describe() if live.spread else tuple(live.tensor.shape)}"
        for name, live in sorted(tensors.items())
        if live.spread is not None or not shared_only
    )
    return xxhash.xxh3_128_hexdigest(text.encode())


def is_shared(name: str, live: LiveTensor, world_size: int) -> bool:
    """True if the tensor goes into the common part of the checkpoint.

    A single process owns everything, so that a later job of any size finds it; only RNG stays a rank's own.
    """
    return live.spread is not None if world_size > 1 else not name.startswith("rng/")


@without_collecting()
def plan_snapshot(
    captured: Captured,
    rank: int,
    world_size: int,
    apart: Collection[str] = (),
    ceded: Collection[str] = (),
    structure: str = "",
    frozen: frozenset[str] = frozenset(),
) -> Plan:
    """What `rank` writes. All holders of a part, with the same `apart`, divide it alike.

    apart  names of tensors that only some ranks have, or that differ between ranks: each holder stores its own
    ceded  names of tensors that others, who hold the same, write
    structure  the captured state's, if it is known
    frozen  names of tensors that do not change; those whose parts lie in rows go into a file of their own
    """
    live = captured.tensors
    shared = [name for name in sorted(live) if is_shared(name, live[name], world_size) and name not in apart]
    written = [name for name in shared if name not in ceded]
    cut = _written_as_cuts(live, written)
    parts = []
    for holders, held in _held_together(live, [name for name in written if name not in cut], rank).items():
        extents = [Extent(part.tensor, part.held, live[part.tensor].tensor.dtype.itemsize) for part in held]
        by_box = {(part.tensor, part.held): part for part in held}
        for share in share_out(extents, len(holders))[holders.index(rank)]:
            part = by_box[share.name, share.held]
            stored_as = name_of_part(share.name, share.box, live[share.name].shape)
            parts.append(replace(part, box=share.box, stored_as=stored_as))
    for name, cuts in cut.items():
        box = cuts.boxes_of(rank)[0] if rank in cuts.mesh else None
        if box is not None and box.numel:
            parts.append(Part(name, box, name_of_part(name, box, cuts.shape), True, box))
    for name in sorted(set(live) - set(shared)):
        box = whole(tuple(live[name].tensor.shape))
        parts.append(Part(name, box, f"rank-{rank:05d}/{name}", False, box))
    keeping = _keeping([part for part in parts if part.tensor in frozen and part.tensor not in cut], live)
    parts = [part for part in parts if part.tensor not in keeping]
    layout = _layout(parts, live)
    shared_records, own_records = _records([part for part in parts if part.tensor not in cut], layout, live)
    kept = None
    if keeping:
        kept = tuple(keeping.values()), _layout(keeping.values(), live)
        more = _records(keeping.values(), kept[1], live, 1 if parts else 0)
        shared_records, own_records = shared_records | more[0], own_records | more[1]
    described = _cut_records(live, cut, rank)
    structure = structure or structure_of(captured)
    return Plan(structure, tuple(parts), layout, shared_records, described, own_records, frozen, kept)


def _keeping(parts: Iterable[Part], live: Mapping[str, LiveTensor]) -> dict[str, Part]:
    """By tensor: parts that a file of their own may hold, if they are worth one. They are written as they lie there."""
    by_tensor: dict[str, list[Part]] = {}
    for part in parts:
        by_tensor.setdefault(part.tensor, []).append(part)
    found = {}
    for name, pieces in by_tensor.items():
        tensor = live[name].tensor
        source = pieces[0].source(tensor)
        plain = tensor.device.type == "cpu" and source.is_contiguous() and not (source.is_conj() or source.is_neg())
        if len(pieces) == 1 and plain and source.nbytes:
            found[name] = pieces[0]
    return found if sum(live[name].tensor.nbytes for name in found) >= LEAST_KEPT_BYTES else {}


def _layout(parts: Iterable[Part], live: Mapping[str, LiveTensor]) -> ImageLayout:
    return lay_out([TensorSpec(part.stored_as, live[part.tensor].tensor.dtype, part.box.shape) for part in parts])


def _written_as_cuts(live: Mapping[str, LiveTensor], names: list[str]) -> dict[str, Cuts]:
    """Tensors in so many pieces that a manifest tells how they are cut, on the ranks that write them.

    Of several replicas one writes a tensor whole, so that its pieces are still found by the cuts alone.
    """
    by_mesh: dict[str, list[tuple[str, Cuts]]] = {}
    for name in names:
        spread = live[name].spread
        if isinstance(spread, Cuts) and spread.order and len(spread.mesh.ranks) > MOST_PIECES:
            by_mesh.setdefault(f"{spread.mesh.key} {spread.replicas}", []).append((name, spread))
    found: dict[str, Cuts] = {}
    for tensors in by_mesh.values():
        sizes = [whole(cuts.shape).numel * live[name].tensor.dtype.itemsize for name, cuts in tensors]
        replicas = spread_evenly(sizes, tensors[0][1].replicas)
        for (name, cuts), replica in zip(tensors, replicas, strict=True):
            found[name] = cuts.of_replica(replica)
    return found


def _cut_records(
    live: Mapping[str, LiveTensor], cut: Mapping[str, Cuts], rank: int
) -> tuple[dict[str, TensorRecord], list[MeshRecord]]:
    records: dict[str, TensorRecord] = {}
    meshes: dict[str, int] = {}
    found: list[MeshRecord] = []
    for name, cuts in cut.items():
        if cuts.mesh.ranks[0] == rank:
            if cuts.mesh.key not in meshes:
                meshes[cuts.mesh.key] = len(found)
                found.append(record_of(cuts.mesh))
            described = CutsRecord(meshes[cuts.mesh.key], list(cuts.order))
            records[name] = TensorRecord(dtype_name(live[name].tensor.dtype), list(cuts.shape), [], described)
    return records, found


def _held_together(live: Mapping[str, LiveTensor], names: list[str], rank: int) -> dict[tuple[int, ...], list[Part]]:
    """What this rank holds of shared tensors, by the ranks that hold exactly the same."""
    together: dict[tuple[int, ...], list[Part]] = {}
    for name in names:
        tensor, spread = live[name].tensor, live[name].spread
        if spread is None:  # of a single process
            box = whole(tuple(tensor.shape))
            together.setdefault((rank,), []).append(Part(name, box, name, True, box))
            continue
        holders = spread.holders_of(rank)
        offset = 0 if isinstance(spread, Stretch) else None
        for box in spread.boxes_of(rank):
            if box.numel or whole(spread.shape).numel == 0:
                together.setdefault(holders, []).append(Part(name, box, name, True, box, offset))
            if offset is not None:
                offset += box.numel
    return together


def _records(
    parts: Iterable[Part], layout: ImageLayout, live: Mapping[str, LiveTensor], file: int = 0
) -> tuple[dict[str, TensorRecord], dict[str, TensorRecord]]:
    places = {entry.name: entry for entry in layout.entries}
    shared: dict[str, TensorRecord] = {}
    own: dict[str, TensorRecord] = {}
    for part in parts:
        tensor = live[part.tensor].tensor
        shape = live[part.tensor].shape if part.shared else tuple(tensor.shape)
        place = places[part.stored_as]
        box = None if part.box == whole(shape) else list(zip(part.box.begin, part.box.end, strict=True))
        piece = PieceRecord(file, place.begin, place.end, box)
        records = shared if part.shared else own
        known = records.get(part.tensor)
        pieces = [*known.pieces, piece] if known else [piece]
        records[part.tensor] = TensorRecord(dtype_name(tensor.dtype), list(shape), pieces)
    return shared, own
