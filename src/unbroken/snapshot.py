"""Live state -> image: what this rank writes, copied into its arena.

Called on the training thread between two steps; when `take` returns, the loop may go on and change everything but what
is copied later. Sources are looked up anew unless their tensors stand where they stood (`Captured.standing`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import msgspec
import torch
import xxhash

from unbroken.image.image import Arena
from unbroken.kept import Frozen
from unbroken.layout.boxes import Box
from unbroken.layout.spread import Spread, Stretch
from unbroken.overlap import Copy, Waiting, versions_of
from unbroken.planning import Part, Plan
from unbroken.probes import Probes
from unbroken.state.captured import Captured, LiveTensor


@dataclass(slots=True)
class Snapshot:
    """One rank's part of a checkpoint, complete in memory."""

    plan: Plan
    arena: Arena
    """Belongs to the snapshot until it is written."""
    values: dict[str, bytes] = field(default_factory=dict)
    """Encoded JSON by registered name."""
    frozen: Frozen | None = None
    """What does not change, and is not copied."""
    rest: Copy | None = None
    """What is still being copied; the arena is complete when it is done."""
    replicas: dict[tuple[int, ...], dict[str, str]] = field(default_factory=dict)
    """Digests of what others hold as well, by those ranks and by name; complete when `rest` is done."""

    @property
    def kept(self) -> frozenset[str]:
        """Names of the tensors that are not copied."""
        return frozenset(self.frozen.names) if self.frozen is not None else frozenset()


@dataclass(frozen=True, slots=True)
class Targets:
    """Where the parts of a route go in one arena."""

    now: list[torch.Tensor]
    later: list[torch.Tensor]
    probes: Probes
    """Elements of `later`."""


@dataclass(slots=True)
class Route:
    """From where the parts of a plan are copied, and when."""

    now: list[torch.Tensor] = field(default_factory=list)
    """Sources that are copied at once."""
    now_to: list[str] = field(default_factory=list)
    """Their names in the file."""
    loose: list[tuple[int, Part]] = field(default_factory=list)
    """Which of `now` are looked up anew each time: a cached source of a replaced tensor is an old value."""
    later: Waiting = field(default_factory=Waiting)
    waiting: frozenset[str] = frozenset()
    """Names of the tensors that are copied later."""
    _targets: dict[int, tuple[dict[str, torch.Tensor], Targets]] = field(default_factory=dict)

    def targets(self, views: dict[str, torch.Tensor]) -> Targets:
        """Where all goes in an arena of these views."""
        known = self._targets.get(id(views))
        if known is None or known[0] is not views:
            later = [views[name] for name in self.later.stored_as]
            found = Targets([views[name] for name in self.now_to], later, Probes(later, self.later.in_rows()))
            known = self._targets[id(views)] = views, found
        return known[1]


@dataclass(slots=True)
class Routes:
    """The newest route, kept as long as plan, standing tensors and what may wait are the same."""

    _key: tuple[Plan, Mapping[str, LiveTensor], Collection[str]] | None = None
    _route: Route | None = None

    def of(self, captured: Captured, plan: Plan, waiting: Collection[str]) -> Route:
        """The way of this captured state into an arena."""
        route, key = self._route, self._key
        same = key is not None and key[0] is plan and key[1] is captured.standing and key[2] == waiting
        if route is None or not same:
            self._key = plan, captured.standing, waiting
            self._route = route = _route_of(captured, plan, waiting)
        for place, part in route.loose:
            route.now[place] = part.source(captured.tensors[part.tensor].tensor)
        return route


def _route_of(captured: Captured, plan: Plan, waiting: Collection[str]) -> Route:
    route = Route()
    begins = {entry.name: entry.begin for entry in plan.layout.entries}
    for part in sorted(plan.parts, key=lambda part: begins[part.stored_as]):
        tensor = captured.tensors[part.tensor].tensor
        if part.tensor in waiting and tensor.device.type == "cpu":
            route.later.add(part.tensor, part.source(tensor), part.stored_as, begins[part.stored_as])
            continue
        if part.tensor not in captured.standing:
            route.loose.append((len(route.now), part))
        route.now.append(part.source(tensor))
        route.now_to.append(part.stored_as)
    route.waiting = frozenset(route.later.names)
    return route


@torch.no_grad()
def take(captured: Captured, plan: Plan, arena: Arena, route: Route) -> Snapshot:
    """Copy this rank's parts into `arena`, but for those that `route` leaves to `Snapshot.rest`.

    When it returns, all other live tensors may change. Waits for the device if tensors lie on one.
    """
    targets = route.targets(arena.take_shape(plan.layout))
    if route.now:
        torch._foreach_copy_(targets.now, route.now)
    rest, later = None, route.later
    if later.names:
        rest = Copy(later, targets.later, targets.probes, versions_of(later.sources), later.probes().read())
    values = {name: msgspec.json.encode(value) for name, value in captured.values.items()}
    return Snapshot(plan, arena, values, rest=rest)


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
