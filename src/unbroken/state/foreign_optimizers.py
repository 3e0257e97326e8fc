"""Optimizers that have a `state_dict` or `load_state_dict` of their own: what they give is kept, by parameter name.

Such a class may hold more than `torch.optim.Optimizer` knows of (a scaler, a second optimizer), so its own methods are
used. Where its state dict has the usual shape, the positions in it are turned into names, so that reordered parameters
and groups find their state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from unbroken.errors import UnsupportedValue
from unbroken.layout.spread import Spread
from unbroken.state.captured import Captured, Json
from unbroken.state.codec import encode
from unbroken.state.draft import Draft, Phase
from unbroken.state.names import ParameterNames
from unbroken.state.optimizer_state import Owner, capture_beside
from unbroken.state.optimizers import MatchedGroup, match_groups, owners_in

KIND = "optimizer with its own state_dict"


def is_foreign(optimizer: Optimizer) -> bool:
    """True if the class does not use torch's own `state_dict` and `load_state_dict`."""
    cls = type(optimizer)
    return cls.state_dict is not Optimizer.state_dict or cls.load_state_dict is not Optimizer.load_state_dict


def capture_foreign(captured: Captured, name: str, optimizer: Optimizer, parameters: ParameterNames) -> None:
    """The optimizer's `state_dict()`, with parameters named where it has the usual shape."""
    owners = owners_in(name, optimizer, parameters)
    _refuse_parts(name, optimizer, owners)
    members = [[owner.name for owner in group] for group in owners]
    state_dict = dict(optimizer.state_dict())
    order = _order(state_dict, members)
    state = {order[index]: entry for index, entry in state_dict.pop("state").items()} if order else {}
    groups = [_options(group) for group in state_dict.pop("param_groups")] if order else []
    spreads = {owner.name: owner.spread for group in owners for owner in group}
    captured.values[name] = {
        "kind": KIND,
        "named": bool(order),
        "members": members,
        "groups": _encode(captured, groups, f"{name}/group", f"{name}.state_dict()['param_groups']", None),
        "state": {
            parameter: _encode(
                captured,
                entry,
                f"{name}/state/{parameter}",
                f"{name}.state_dict()['state'][{parameter}]",
                spreads[parameter],
            )
            for parameter, entry in state.items()
        },
        "more": _encode(captured, state_dict, f"{name}/own", f"{name}.state_dict()", None),
    }


def _refuse_parts(name: str, optimizer: Optimizer, owners: Sequence[Sequence[Owner]]) -> None:
    """Raise for flat parameters: what a class of its own makes of them cannot be told apart by parameter."""
    part = next((owner.name for members in owners for owner in members if owner.part is not None), None)
    if part is not None:
        raise UnsupportedValue(
            f"{name}: {type(optimizer).__qualname__} has a state_dict of its own, and {part} is only a part of a flat "
            "parameter: with FullyShardedDataParallel give use_orig_params=True"
        )


def _encode(captured: Captured, value: object, path: str, text: str, spread: Spread | None) -> Json:
    tensors: dict[str, Tensor] = {}
    encoded = encode(value, path, tensors, text=text)
    capture_beside(captured, tensors, spread)
    return encoded


def _order(state_dict: Mapping[str, Any], members: list[list[str]]) -> dict[Any, str]:
    """Name by position in the state dict, or {} if it has not the usual shape."""
    state, groups = state_dict.get("state"), state_dict.get("param_groups")
    if not isinstance(state, dict) or not isinstance(groups, list):
        return {}
    positions = [group.get("params") for group in groups if isinstance(group, dict)]
    if [len(group) if isinstance(group, list) else -1 for group in positions] != [len(group) for group in members]:
        return {}
    pairs = zip(positions, members, strict=True)
    order = {position: name for group, names in pairs for position, name in zip(group or (), names, strict=True)}
    return order if set(state) <= set(order) else {}


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in group.items() if key not in ("params", "param_names")}


def prepare_foreign(draft: Draft, name: str, optimizer: Optimizer, parameters: ParameterNames) -> None:
    """Hand the optimizer its own state dict back, in the order that its parameters and groups have now."""
    value = draft.value_of(name, KIND)
    if value is None:
        return
    _refuse_parts(name, optimizer, owners_in(name, optimizer, parameters))
    matched = match_groups(draft, name, optimizer, parameters, value["members"])
    decoded_groups = draft.decoder(value["groups"])
    decoded_state = {parameter: draft.decoder(entry) for parameter, entry in value["state"].items()}
    decoded_more = draft.decoder(value["more"])

    def load() -> None:
        more: Any = decoded_more()
        state_dict = dict(more)
        state = {parameter: decode() for parameter, decode in decoded_state.items()}
        if value["named"]:
            groups: Any = decoded_groups()
            state_dict.update(_positional(matched, groups, state))
        optimizer.load_state_dict(state_dict)
        if value["named"]:
            _undo_casts(optimizer, matched, state)

    draft.then(Phase.FOREIGN_OPTIMIZERS, load)


def _positional(matched: list[MatchedGroup], options: list[dict[str, Any]], state: Mapping[str, Any]) -> dict[str, Any]:
    """`state` and `param_groups` as torch writes them, for the live order."""
    by_position: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    position = 0
    for group in matched:
        begin = position
        for owner in group.owners:
            if owner.name in state:
                by_position[position] = state[owner.name]
            position += 1
        saved = _options(group.live) if group.saved_index is None else options[group.saved_index]
        kept = {key: item for key, item in group.live.items() if key == "param_names"}
        groups.append({**saved, **kept, "params": list(range(begin, position))})
    return {"state": by_position, "param_groups": groups}


def _undo_casts(optimizer: Optimizer, matched: list[MatchedGroup], state: Mapping[str, Any]) -> None:
    """torch's own `load_state_dict`, which most others call, casts moments to the parameter's dtype."""
    for group in matched:
        for owner in group.owners:
            live = optimizer.state.get(owner.parameter, {})
            for key, saved in (state.get(owner.name) or {}).items():
                loaded = live.get(key)
                if isinstance(saved, Tensor) and isinstance(loaded, Tensor) and loaded.dtype != saved.dtype:
                    live[key] = saved.to(loaded.device)
