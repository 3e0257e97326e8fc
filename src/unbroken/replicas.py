"""Digests of what several ranks hold, to compare between them (invariant 8). Reads every such tensor.

In the host's memory xxh3 of the bytes; on a device a sum of their integers, taken there, so that a replica is not
copied to be compared: it finds values that drifted apart, not a permutation of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
import xxhash

from unbroken.elements import as_bytes
from unbroken.snapshot import Snapshot
from unbroken.state.captured import Captured

Holders: TypeAlias = tuple[int, ...]
"""The ranks that hold the same."""
Digests: TypeAlias = dict[Holders, dict[str, str]]
"""By name."""


def digest_replicas(captured: Captured, rank: int, names: Collection[str]) -> Digests:
    """A digest of each tensor that other ranks hold as well. Waits for the device if tensors lie on one."""
    digests = _digest_on_host(captured, rank, names)
    sums = _sum_on_devices(captured, rank, names)
    _add(digests, sums.digests(sums.totals))
    return digests


def digest_snapshot(
    snapshot: Snapshot, captured: Captured, rank: int, names: Collection[str], waiting: Collection[str]
) -> None:
    """Put digests of these tensors into `snapshot.replicas`; of what is still to be copied, when it is.

    waiting  names of the tensors that are copied later
    Devices take their sums now, in the order of the stream that is current; so these are of this step in any case.
    """
    digests, rest = snapshot.replicas, snapshot.rest
    later = [name for name in names if name in waiting]
    _add(digests, _digest_on_host(captured, rank, set(names).difference(later)))
    sums = _sum_on_devices(captured, rank, names)
    brought = rest.bring(sums.totals) if rest is not None else None
    if rest is None or brought is None:
        _add(digests, sums.digests(sums.totals))
    else:
        rest.at_the_end = lambda: _add(digests, sums.digests(brought()))
    if rest is not None:
        rest.afterwards = lambda: _add(digests, _digest_on_host(captured, rank, later))


def digest_kept(snapshot: Snapshot, captured: Captured, rank: int, names: Collection[str]) -> None:
    """The same of those among `names` that are not copied because they do not change. On the writer's thread."""
    _add(snapshot.replicas, _digest_on_host(captured, rank, snapshot.kept.intersection(names)))


def _digest_on_host(captured: Captured, rank: int, names: Collection[str]) -> Digests:
    """Of those in the host's memory."""
    digests: Digests = {}
    for holders, name, tensor in _replicas(captured, rank, names):
        if tensor.device.type == "cpu":
            digests.setdefault(holders, {})[name] = xxhash.xxh3_64_hexdigest(as_bytes(tensor).numpy().data)
    return digests


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums that devices are taking."""

    of: dict[torch.device, list[tuple[Holders, str]]] = field(default_factory=dict)
    """Which tensors, in the order of the sums."""
    totals: dict[torch.device, torch.Tensor] = field(default_factory=dict)
    """On each device; complete when the stream comes to it that was current."""

    def digests(self, totals: Mapping[torch.device, torch.Tensor]) -> Digests:
        """The sums, wherever they lie now; one transfer a device if they still lie there."""
        digests: Digests = {}
        for device, replicas in self.of.items():
            for (holders, name), total in zip(replicas, totals[device].tolist(), strict=True):
                digests.setdefault(holders, {})[name] = f"{total:x}"
        return digests


def _sum_on_devices(captured: Captured, rank: int, names: Collection[str]) -> Sums:
    """Let devices take the sums of those that lie there; waits for none."""
    sums = Sums()
    found: dict[torch.device, list[torch.Tensor]] = {}
    for holders, name, tensor in _replicas(captured, rank, names):
        if tensor.device.type != "cpu":
            sums.of.setdefault(tensor.device, []).append((holders, name))
            found.setdefault(tensor.device, []).append(as_bytes(tensor).sum(dtype=torch.int64))
    sums.totals.update({device: torch.stack(totals) for device, totals in found.items()})
    return sums


def _add(digests: Digests, more: Digests) -> None:
    """Put more digests beside those that are there."""
    for holders, by_name in more.items():
        digests.setdefault(holders, {}).update(by_name)


def _replicas(captured: Captured, rank: int, names: Collection[str]) -> Iterator[tuple[Holders, str, torch.Tensor]]:
    for name in sorted(names):
        live = captured.tensors[name]
        holders = live.spread.holders_of(rank) if live.spread is not None else ()
        if len(holders) > 1:
            yield holders, name, live.tensor
