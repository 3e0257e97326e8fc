"""Live state -> image: what this rank writes, copied into its arena.

Called on the training thread between two steps; when `take` returns, the loop may go on and change everything but what
is copied later. Sources are looked up anew unless their tensors stand where they stood (`Captured.standing`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import msgspec
import torch

from unbroken import cuda
from unbroken.image.image import Arena
from unbroken.kept import Frozen
from unbroken.layout.boxes import Box
from unbroken.layout.spread import Spread, Stretch
from unbroken.overlap import Copy, FromDevice, Waiting, versions_of
from unbroken.planning import Part, Plan
from unbroken.probes import Probes, RowProbes
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
    from_devices: dict[torch.device, tuple[list[torch.Tensor], RowProbes]]
    """Where that goes which comes later from each CUDA device, with its elements."""


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
    """What the host's memory has, and is copied by a thread."""
    from_devices: dict[torch.device, Waiting] = field(default_factory=dict)
    """What each CUDA device has, and copies by itself."""
    on_cuda: bool = False
    """True if anything lies on a CUDA device."""
    waiting: frozenset[str] = frozenset()
    """Names of the tensors that are copied later."""
    _targets: dict[int, tuple[dict[str, torch.Tensor], Targets]] = field(default_factory=dict)

    def targets(self, views: dict[str, torch.Tensor]) -> Targets:
        """Where all goes in an arena of these views."""
        known = self._targets.get(id(views))
        if known is None or known[0] is not views:
            later = [views[name] for name in self.later.stored_as]
            devices = {}
            for device, waiting in self.from_devices.items():
                arriving = [views[name] for name in waiting.stored_as]
                devices[device] = arriving, RowProbes(arriving)
            probes = Probes(later, self.later.in_rows())
            found = Targets([views[name] for name in self.now_to], later, probes, devices)
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
        source, begin = part.source(captured.tensors[part.tensor].tensor), begins[part.stored_as]
        route.on_cuda |= cuda.is_on_cuda(source)
        queue = _queue_for(source, route) if part.tensor in waiting else None
        if queue is not None:
            queue.add(part.tensor, source, part.stored_as, begin)
            continue
        if part.tensor not in captured.standing:
            route.loose.append((len(route.now), part))
        route.now.append(source)
        route.now_to.append(part.stored_as)
    route.waiting = frozenset(name for part in (route.later, *route.from_devices.values()) for name in part.names)
    return route


def _queue_for(source: torch.Tensor, route: Route) -> Waiting | None:
    """Where it waits to be copied later; None if it has to be copied at once."""
    if cuda.can_cross(source):
        return route.from_devices.setdefault(source.device, Waiting())
    return route.later if source.device.type == "cpu" and not cuda.is_on_cuda(source) else None


@torch.no_grad()
def take(captured: Captured, plan: Plan, arena: Arena, route: Route) -> Snapshot:
    """Copy this rank's parts into `arena`, but for those that `route` leaves to `Snapshot.rest`.

    When it returns, all other live tensors may change, and the rest is to be given to a Copier. Waits for the device if
    others lie on one.
    """
    targets = route.targets(arena.take_shape(plan.layout))
    if route.on_cuda:
        arena.pin()
    if route.now:
        torch._foreach_copy_(targets.now, route.now)
    rest, later = None, route.later
    if route.waiting:
        rest = Copy(later, targets.later, targets.probes, versions_of(later.sources), later.probes().read())
        rest.arena = arena
        rest.from_devices = _from_devices(route, targets)
    values = {name: msgspec.json.encode(value) for name, value in captured.values.items()}
    return Snapshot(plan, arena, values, rest=rest)


def _from_devices(route: Route, targets: Targets) -> list[FromDevice]:
    """What each device is to bring; its probes are gathered by kernels that are enqueued here."""
    found = []
    for device, waiting in route.from_devices.items():
        arriving, arrived = targets.from_devices[device]
        crossing = cuda.Crossing(device, waiting.sources, arriving, [waiting.row_probes().read()])
        found.append(FromDevice(waiting, crossing, arrived, versions_of(waiting.sources)))
    return found


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
