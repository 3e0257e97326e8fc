"""Live state -> image: what this rank writes, copied into its arena.

Called on the training thread between two steps; when `take` returns, the loop may go on and change everything. The
layout is computed once per structure (names, dtypes, shapes) and reused; the source tensors are looked up anew every
time, because a cached plan over replaced tensors writes old values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import msgspec
import torch
import xxhash

from unbroken.image.header import dtype_name
from unbroken.image.image import Arena, ImageLayout, TensorSpec, lay_out
from unbroken.layout.boxes import Box, name_of_part, whole
from unbroken.layout.ownership import Extent, share_out
from unbroken.manifest import PieceRecord, TensorRecord
from unbroken.state.captured import Captured, LiveTensor


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
    """True: a part of what all ranks share; False: this rank's own."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one rank writes as long as the structure of the state stays the same."""

    structure: str
    """Digest of the names, dtypes and shapes of all tensors of this rank."""
    parts: tuple[Part, ...]
    layout: ImageLayout
    shared: dict[str, TensorRecord]
    """Records of this rank's pieces of shared tensors; the file's index is 0 until the commit."""
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


def structure_of(captured: Captured, replicated_only: bool = False) -> str:
    """Digest of what tensors there are: names, dtypes, shapes, and who holds them."""
    text = "\n".join(
        f"{name}\t{live.tensor.dtype}\t{tuple(live.tensor.shape)}\t{live.replicated}"
        for name, live in sorted(captured.tensors.items())
        if live.replicated or not replicated_only
    )
    return xxhash.xxh3_128_hexdigest(text.encode())


def is_shared(name: str, live: LiveTensor, world_size: int) -> bool:
    """True if the tensor goes into the common part of the checkpoint.

    A single process owns everything, so that a later job of any size finds it; only RNG stays a rank's own.
    """
    return live.replicated if world_size > 1 else not name.startswith("rng/")


def plan_snapshot(captured: Captured, rank: int, world_size: int, apart: Collection[str]) -> Plan:
    """What `rank` writes. All ranks with the same shared tensors and the same `apart` divide them alike.

    apart  names of tensors that only some ranks have, or that differ between ranks: each holder stores its own
    """
    live = captured.tensors
    shared = [name for name in sorted(live) if is_shared(name, live[name], world_size) and name not in apart]
    extents = [Extent(name, tuple(live[name].tensor.shape), live[name].tensor.dtype.itemsize) for name in shared]
    parts = [
        Part(share.name, share.box, name_of_part(share.name, share.box, tuple(live[share.name].tensor.shape)), True)
        for share in share_out(extents, world_size)[rank]
    ]
    for name in sorted(set(live) - set(shared)):
        parts.append(Part(name, whole(tuple(live[name].tensor.shape)), f"rank-{rank:05d}/{name}", False))
    layout = lay_out([TensorSpec(part.stored_as, live[part.tensor].tensor.dtype, part.box.shape) for part in parts])
    shared_records, own_records = _records(parts, layout, live)
    return Plan(structure_of(captured), tuple(parts), layout, shared_records, own_records)


def _records(
    parts: list[Part], layout: ImageLayout, live: Mapping[str, LiveTensor]
) -> tuple[dict[str, TensorRecord], dict[str, TensorRecord]]:
    places = {entry.name: entry for entry in layout.entries}
    shared: dict[str, TensorRecord] = {}
    own: dict[str, TensorRecord] = {}
    for part in parts:
        tensor = live[part.tensor].tensor
        shape = tuple(tensor.shape)
        place = places[part.stored_as]
        box = None if part.box == whole(shape) else list(zip(part.box.begin, part.box.end, strict=True))
        piece = PieceRecord(0, place.begin, place.end, box)
        records = shared if part.shared else own
        records[part.tensor] = TensorRecord(dtype_name(tensor.dtype), list(shape), [piece])
    return shared, own


@torch.no_grad()
def take(captured: Captured, plan: Plan, arena: Arena) -> Snapshot:
    """Copy this rank's parts into `arena`. When it returns, the live tensors may change.

    Waits for the device if tensors lie on one.
    """
    views = arena.take_shape(plan.layout)
    sources = []
    targets = []
    for part in plan.parts:
        tensor = captured.tensors[part.tensor].tensor
        sources.append(tensor[part.box.slices(whole(tuple(tensor.shape)))] if part.shared else tensor)
        targets.append(views[part.stored_as])
    if targets:
        torch._foreach_copy_(targets, sources)
    return Snapshot(plan, arena, {name: msgspec.json.encode(value) for name, value in captured.values.items()})


def digest_replicas(captured: Captured, apart: Collection[str]) -> dict[str, str]:
    """A digest of the values of each replicated tensor that is not kept `apart`, by name, to compare between ranks.

    Reads every such tensor. On the CPU xxh3 of the bytes; elsewhere a sum of their integers, taken on the device, so
    that a replica is not copied to be compared: it finds values that drifted apart, not a permutation of them.
    """
    names = [name for name, live in sorted(captured.tensors.items()) if live.replicated and name not in apart]
    digests = {}
    sums: dict[str, torch.Tensor] = {}
    for name in names:
        tensor = captured.tensors[name].tensor
        if tensor.device.type == "cpu":
            digests[name] = xxhash.xxh3_64_hexdigest(_as_bytes(tensor).numpy().data)
        else:
            sums[name] = _as_bytes(tensor).sum(dtype=torch.int64)
    # One transfer for all, not one for each.
    totals = torch.stack([total.cpu() for total in sums.values()]).tolist() if sums else []
    return {**digests, **{name: f"{total:x}" for name, total in zip(sums, totals, strict=True)}}


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The values in row-major order, as flat uint8."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)
