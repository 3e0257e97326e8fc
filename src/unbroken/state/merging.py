"""What several ranks saved under one registered name, as one value: for a job that is laid out in another way.

Pipeline stages hold different layers of one model, and FSDP1 keeps optimizer state only where a part of a parameter
lies. Values are merged by the names of parameters; where ranks say different things of one parameter, the first one
given counts, so a rank gives its own first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from unbroken.state.captured import Json

MERGED = ("module", "optimizer", "gradients", "tensor")
"""Kinds of values that can be merged; of all others a rank's own is restored."""


def merge(values: Sequence[Json]) -> Json:
    """The values of one name, all of one of the kinds MERGED, as one."""
    merge_kind = _KINDS.get(values[0]["kind"])
    alike = [value for value in values if value["kind"] == values[0]["kind"]]
    return values[0] if merge_kind is None or all(value is values[0] for value in alike) else merge_kind(alike)


def _merge_module(values: Sequence[Json]) -> Json:
    lists = ("parameters", "frozen", "buffers", "transient_buffers", "broadcast")
    merged: dict[str, Any] = {"kind": values[0]["kind"], "merged": True}
    for key in lists:
        merged[key] = _union(value.get(key, []) for value in values)
    for key in ("extra", "aliases", "buckets"):
        merged[key] = _first(value.get(key, {}) for value in values)
    return merged


def _merge_optimizer(values: Sequence[Json]) -> Json:
    """Groups that stand at one place, if all ranks have as many; else those of the first rank alone."""
    groups = values[0]["groups"]
    if all(len(value["groups"]) == len(groups) for value in values):
        groups = [_merge_group([value["groups"][at] for value in values]) for at in range(len(groups))]
    first = values[0]
    state = _first(value["state"] for value in values)
    return {"kind": first["kind"], "class": first.get("class"), "groups": groups, "state": state}


def _merge_group(groups: Sequence[Json]) -> Json:
    return {**groups[0], "params": _union(group["params"] for group in groups)}


def _merge_gradients(values: Sequence[Json]) -> Json:
    accumulating = any(value["accumulating"] for value in values)
    return {
        "kind": values[0]["kind"],
        "accumulating": accumulating,
        "present": _union(value["present"] for value in values),
        "placements": _first(value.get("placements", {}) for value in values),
    }


_KINDS = {"module": _merge_module, "optimizer": _merge_optimizer, "gradients": _merge_gradients}


def _union(lists: Iterable[Sequence[str]]) -> list[str]:
    return list(dict.fromkeys(item for items in lists for item in items))


def _first(maps: Iterable[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for entries in maps:
        for key, item in entries.items():
            merged.setdefault(key, item)
    return merged
