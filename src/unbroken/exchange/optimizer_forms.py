"""The forms in which optimizer state is found, as one: groups and state by the full names of parameters.

by position   `Optimizer.state_dict()`: parameters are numbers; newer ones have `param_names`
by name       `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`
flattened     the same with `flatten_optimizer_state_dict=True`: `state.<parameter>.<key>`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unbroken.errors import UsageError
from unbroken.exchange.incoming import IncomingTensor

Parameters = Mapping[str, Mapping[str, tuple[int, ...]]]
"""Shapes of the tensors of each module, by registered name and name in it, in their order."""
_LIKE_PARAMETER = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "acc_delta", "sum")
"""State that has its parameter's shape in every optimizer of torch's."""
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers of torch's normalisations, which no optimizer has."""


@dataclass(frozen=True, slots=True)
class Group:
    """One group of parameters."""

    parameters: tuple[str, ...]
    options: dict[str, Any]


@dataclass(slots=True)
class OptimizerForm:
    """An optimizer's state."""

    groups: list[Group]
    state: dict[str, Mapping[Any, Any]]
    """By parameter."""
    notes: list[str] = field(default_factory=list)

    def group_of(self, parameter: str) -> Mapping[str, Any]:
        """The options of the group that a parameter is in; none if it is in none."""
        return next((group.options for group in self.groups if parameter in group.parameters), {})


def is_optimizer(entry: Any) -> bool:
    """True for a dict in any of the forms."""
    if not isinstance(entry, dict):
        return False
    if isinstance(entry.get("param_groups"), list):
        return isinstance(entry.get("state", {}), dict) and all(
            isinstance(group, dict) and "params" in group for group in entry["param_groups"]
        )
    return any(str(key).startswith("param_groups.") for key in entry)


def optimizer_form(
    entry: Mapping[Any, Any], parameters: Parameters, aliases: Mapping[str, str] | None = None
) -> OptimizerForm:
    """The state of an optimizer over these parameters. Raises UsageError if it cannot be told whose state is whose.

    aliases  further full names of tied parameters -> the one among `parameters`
    """
    if not isinstance(entry.get("param_groups"), list):
        entry, notes = _unflattened(entry, parameters)
    else:
        notes = []
    groups = entry["param_groups"]
    keys = [key for group in groups for key in group["params"]]
    short = dict(zip(keys, keys, strict=True))
    if not all(isinstance(key, str) for key in keys):
        short = _names_by_position(groups, keys, parameters, notes)
    names = {key: _full_name(str(name), parameters, aliases or {}) for key, name in short.items()}
    # A dict that went through torch.distributed.checkpoint has text for keys.
    known = {**{str(key): name for key, name in names.items()}, **names}
    state: dict[str, Mapping[Any, Any]] = {}
    for key, item in entry.get("state", {}).items():
        if key not in known or not isinstance(item, dict):
            raise UsageError(f"it has state for {key!s:.80}, which is in none of its groups")
        state[known[key]] = item
    form = OptimizerForm([_group(group, names) for group in groups], state, notes)
    _check_shapes(form, parameters)
    return form


def _group(group: Mapping[str, Any], names: Mapping[Any, str]) -> Group:
    options = {str(key): item for key, item in group.items() if key not in ("params", "param_names")}
    return Group(tuple(names[key] for key in group["params"]), options)


def _names_by_position(
    groups: Sequence[Mapping[str, Any]], keys: Sequence[Any], parameters: Parameters, notes: list[str]
) -> dict[Any, str]:
    listed = [group.get("param_names") for group in groups]
    if all(isinstance(names, list) and len(names) == len(g["params"]) for names, g in zip(listed, groups, strict=True)):
        return dict(zip(keys, [name for names in listed for name in names or ()], strict=True))
    if len(groups) > 1:
        raise UsageError(
            "which parameter is in which of its groups cannot be told from numbers: save it with names "
            "(give the optimizer model.named_parameters())"
        )
    if len(parameters) != 1:
        raise UsageError("which module its parameters are of cannot be told: save it with names, or one model")
    (module,) = parameters.values()
    order = list(module)
    if len(order) != len(keys):
        order = [name for name in order if name.rpartition(".")[2] not in _BUFFERS]
    if len(order) != len(keys):
        raise UsageError(
            f"it has {len(keys)} parameters and the model {len(order)} tensors, so which is which cannot be told: save "
            "it with names (give the optimizer model.named_parameters())"
        )
    notes.append("it had no names of parameters: they are taken in the order of the model's tensors")
    return dict(zip(keys, order, strict=True))


def _full_name(name: str, parameters: Parameters, aliases: Mapping[str, str]) -> str:
    """`model/up.weight` for `up.weight`, or for `model.up.weight`."""
    found = [root for root, module in parameters.items() if name in module or f"{root}/{name}" in aliases]
    if len(found) == 1:
        return aliases.get(f"{found[0]}/{name}", f"{found[0]}/{name}")
    root, _, rest = name.partition(".")
    if not found and rest in parameters.get(root, {}):
        return f"{root}/{rest}"
    wrapped = name.removeprefix("module.").removeprefix("_orig_mod.")
    if not found and wrapped != name:
        return _full_name(wrapped, parameters, aliases)
    problem = f"several modules have a {name}" if found else f"no module of the source has its parameter {name:.80}"
    raise UsageError(problem)


def _check_shapes(form: OptimizerForm, parameters: Parameters) -> None:
    for full, state in form.state.items():
        root, _, fqn = full.partition("/")
        shape = parameters[root][fqn]
        for key in _LIKE_PARAMETER:
            item = state.get(key)
            if isinstance(item, IncomingTensor) and item.shape != shape:
                raise UsageError(f"{key} of {full} has shape {list(item.shape)}, and the parameter {list(shape)}")


def _unflattened(entry: Mapping[Any, Any], parameters: Parameters) -> tuple[dict[str, Any], list[str]]:
    """The form by name. Groups are gone from the flattened form: parameters with the same options are one."""
    known = {name for module in parameters.values() for name in module}
    state: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, item in entry.items():
        what, _, rest = str(key).partition(".")
        into = {"state": state, "param_groups": options}.get(what)
        if into is None or not rest:
            raise UsageError(f"it has an entry {key!s:.80} that no form of optimizer state has")
        parameter, option = _split(rest, known)
        into.setdefault(parameter, {})[option] = item
    groups: list[dict[str, Any]] = []
    for parameter, chosen in options.items():
        group = next((group for group in groups if _same({**group, "params": None}, {**chosen, "params": None})), None)
        if group is None:
            groups.append({**chosen, "params": [parameter]})
        else:
            group["params"].append(parameter)
    notes = ["its groups are not in the source: parameters with the same options are taken for one"]
    return {"state": state, "param_groups": groups}, notes


def _split(text: str, known: set[str]) -> tuple[str, str]:
    """`up.weight` and `exp_avg` of `up.weight.exp_avg`; keys of options and state may have dots of their own."""
    at = text.rfind(".")
    while at > 0:
        if text[:at] in known:
            return text[:at], text[at + 1 :]
        at = text.rfind(".", 0, at)
    name, _, key = text.rpartition(".")
    return name, key


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        one[key] is other[key] or (type(one[key]) is type(other[key]) and one[key] == other[key]) for key in one
    )
