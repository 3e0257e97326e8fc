"""Live state -> image: what this rank writes, copied into its arena.

Called on the training thread between two steps; when `take` returns, the loop may go on and change everything. The
layout is computed once per structure (names, dtypes, shapes) and reused; the source tensors are looked up anew every
time, because a cached plan over replaced tensors writes old values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import msgspec
import torch
import xxhash

from unbroken.image.header import dtype_name
from unbroken.image.image import Arena, ImageLayout, TensorSpec, lay_out
from unbroken.layout.boxes import Box, name_of_part, whole
from unbroken.layout.ownership import Extent, share_out, spread_evenly
from unbroken.layout.spread import Cuts, Spread, Stretch
from unbroken.manifest import CutsRecord, MeshRecord, PieceRecord, TensorRecord, record_of
from unbroken.overlap import Copy, versions_of
from unbroken.state.captured import Captured, LiveTensor

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
    """Records of this rank's pieces of shared tensors; the file's index is 0 until the commit."""
    cut: tuple[dict[str, TensorRecord], list[MeshRecord]]
    """Records of tensors in too many pieces to be listed, with their meshes; from the first rank of each mesh only."""
    own: dict[str, TensorRecord]
    """Records of this rank's own tensors."""


@dataclass(slots=True)
class Snapshot:
    """One rank's part of a checkpoint, complete in memory."""

    plan: Plan
    arena: Arena
    """Belongs to the snapshot until it is written."""
    values: dict[str, bytes] = field(default_factory=dict)
    """Encoded JSON by registered name."""
    rest: Copy | None = None
    """What is still being copied; the arena is complete when it is done."""
    replicas: dict[tuple[int, ...], dict[str, str]] = field(default_factory=dict)
    """Digests of what others hold as well, by those ranks and by name; complete when `rest` is done."""


def structure_of(captured: Captured, shared_only: bool = False) -> str:
    """Digest of what tensors there are: names, dtypes, shapes, and how they lie on the ranks.

    Of shared tensors it is the same for all ranks that have the same ones, whatever parts of them they hold.
    """
    text = "\n".join(
        f"{name}\t{live.tensor.dtype}\t{live.spread.describe() if live.spread else tuple(live.tensor.shape)}"
        for name, live in sorted(captured.tensors.items())
        if live.spread is not None or not shared_only
    )
    return xxhash.xxh3_128_hexdigest(text.encode())


def is_shared(name: str, live: LiveTensor, world_size: int) -> bool:
    """True if the tensor goes into the common part of the checkpoint.

    A single process owns everything, so that a later job of any size finds it; only RNG stays a rank's own.
    """
    return live.spread is not None if world_size > 1 else not name.startswith("rng/")


def plan_snapshot(
    captured: Captured, rank: int, world_size: int, apart: Collection[str] = (), ceded: Collection[str] = ()
) -> Plan:
    """What `rank` writes. All holders of a part, with the same `apart`, divide it alike.

    apart  names of tensors that only some ranks have, or that differ between ranks: each holder stores its own
    ceded  names of tensors that others, who hold the same, write
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
    layout = lay_out([TensorSpec(part.stored_as, live[part.tensor].tensor.dtype, part.box.shape) for part in parts])
    shared_records, own_records = _records([part for part in parts if part.tensor not in cut], layout, live)
    described = _cut_records(live, cut, rank)
    return Plan(structure_of(captured), tuple(parts), layout, shared_records, described, own_records)


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
    parts: list[Part], layout: ImageLayout, live: Mapping[str, LiveTensor]
) -> tuple[dict[str, TensorRecord], dict[str, TensorRecord]]:
    places = {entry.name: entry for entry in layout.entries}
    shared: dict[str, TensorRecord] = {}
    own: dict[str, TensorRecord] = {}
    for part in parts:
        tensor = live[part.tensor].tensor
        shape = live[part.tensor].shape if part.shared else tuple(tensor.shape)
        place = places[part.stored_as]
        box = None if part.box == whole(shape) else list(zip(part.box.begin, part.box.end, strict=True))
        piece = PieceRecord(0, place.begin, place.end, box)
        records = shared if part.shared else own
        known = records.get(part.tensor)
        pieces = [*known.pieces, piece] if known else [piece]
        records[part.tensor] = TensorRecord(dtype_name(tensor.dtype), list(shape), pieces)
    return shared, own


@torch.no_grad()
def take(captured: Captured, plan: Plan, arena: Arena, waiting: Collection[str] = ()) -> Snapshot:
    """Copy this rank's parts into `arena`, but for those of tensors that may wait: they are left to `Snapshot.rest`.

    When it returns, all other live tensors may change. Waits for the device if tensors lie on one.
    """
    views = arena.take_shape(plan.layout)
    names: list[str] = []
    at_once: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    later: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    for part in plan.parts:
        tensor = captured.tensors[part.tensor].tensor
        waits = part.tensor in waiting and tensor.device.type == "cpu"
        names += [part.tensor] if waits else []
        targets, sources = later if waits else at_once
        targets.append(views[part.stored_as])
        sources.append(part.source(tensor))
    if at_once[0]:
        torch._foreach_copy_(*at_once)
    rest = Copy(names, later[1], later[0], versions_of(later[1])) if names else None
    values = {name: msgspec.json.encode(value) for name, value in captured.values.items()}
    return Snapshot(plan, arena, values, rest)


def digest_replicas(captured: Captured, rank: int, names: Collection[str]) -> dict[tuple[int, ...], dict[str, str]]:
    """A digest of each part that other ranks hold as well, by those ranks and by name, to compare between them.

    Reads every such part. On the CPU xxh3 of the bytes; elsewhere a sum of their integers, taken on the device, so
    that a replica is not copied to be compared: it finds values that drifted apart, not a permutation of them.
    """
    digests: dict[tuple[int, ...], dict[str, str]] = {}
    sums: list[tuple[tuple[int, ...], str, torch.Tensor]] = []
    for name in sorted(names):
        live = captured.tensors[name]
        if live.spread is None:
            continue
        holders = live.spread.holders_of(rank)
        if len(holders) < 2:
            continue
        if live.tensor.device.type == "cpu":
            digests.setdefault(holders, {})[name] = xxhash.xxh3_64_hexdigest(as_bytes(live.tensor).numpy().data)
        else:
            sums.append((holders, name, as_bytes(live.tensor).sum(dtype=torch.int64)))
    # One transfer for all, not one for each.
    totals = torch.stack([total.cpu() for _, _, total in sums]).tolist() if sums else []
    for (group, name, _), total in zip(sums, totals, strict=True):
        digests.setdefault(group, {})[name] = f"{total:x}"
    return digests


def held_boxes(tensor: torch.Tensor, spread: Spread, rank: int) -> list[tuple[Box, torch.Tensor]]:
    """The boxes that `rank` holds of a tensor, each with the view of the live `tensor` that is it."""
    boxes = spread.boxes_of(rank)
    if not isinstance(spread, Stretch):
        return [(boxes[0], tensor)]
    found, offset = [], 0
    for box in boxes:
        found.append((box, tensor[offset : offset + box.numel].view(box.shape)))
        offset += box.numel
    return found


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The values in row-major order, as flat uint8."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)
