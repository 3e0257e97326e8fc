"""A foreign state dict as what `State.capture` would have given: full names, and values by registered name.

What an entry is, is told by its form: a dict of tensors is a module, one with `state` and `param_groups` an optimizer,
any other dict the state of an object. What is none of these is left out and named. Nothing is guessed silently: an
optimizer whose positions cannot be told from its model is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from unbroken.errors import UnsupportedValue, UsageError
from unbroken.exchange.incoming import IncomingTensor, incoming, with_tensors
from unbroken.exchange.optimizer_forms import OptimizerForm, is_optimizer, optimizer_form
from unbroken.state.captured import Json
from unbroken.state.codec import encode
from unbroken.state.optimizer_state import WITH_PARAMETER
from unbroken.state.registry import check_name

MODEL = "model"
_SUFFIX = "_state_dict"
"""`model_state_dict` and `optimizer_state_dict` are what torch's tutorials call them."""
_BARE = ("state_dict", "model_state_dict")
_WRAPPERS = ("module.", "_orig_mod.")
_EXTRA = "_extra_state"


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the caller says of the source."""

    name: str = MODEL
    """Registered name of a module that has none in the source."""
    prefix: str | None = None
    """To be taken off each name of a module; None: those of wrappers, if all names have them."""
    ties: Mapping[str, str] = field(default_factory=dict)
    """Names in a module that are one tensor with another: name -> the other."""
    skip: frozenset[str] = frozenset()
    """Registered names that are not imported."""


@dataclass(slots=True)
class Registered:
    """What goes into the checkpoint."""

    tensors: dict[str, IncomingTensor] = field(default_factory=dict)
    """By full name."""
    values: dict[str, Json] = field(default_factory=dict)
    """By registered name."""
    notes: list[str] = field(default_factory=list)
    """What the user should know, one line each."""

    def add(self, name: str, tensor: IncomingTensor) -> None:
        """Take in a tensor. Raises UsageError if there is one of the name."""
        if name in self.tensors:
            raise UsageError(f"the source has two tensors that would be called {name}")
        self.tensors[name] = tensor

    def add_encoded(self, value: object, path: str) -> Json:
        """Encode a value; its tensors are taken in. Raises UnsupportedValue."""
        found: dict[str, Tensor] = {}
        encoded = encode(with_tensors(value), path, found)
        for name, tensor in found.items():
            self.add(name, incoming(tensor, name))
        return encoded


def register(tree: Any, wishes: Wishes) -> Registered:
    """Everything in a source that can be registered.

    tree  as `with_incoming` makes it

    Raises UsageError if there is nothing, or for an optimizer whose parameters cannot be named.
    """
    if not isinstance(tree, dict):
        raise UsageError(f"the source is a {type(tree).__name__}; import a dict of tensors or of state dicts")
    made = Registered()
    entries = {name: entry for name, entry in _entries(tree, wishes, made).items() if name not in wishes.skip}
    for name, entry in entries.items():
        if is_module(entry):
            _register_module(made, name, entry, wishes)
    for name, entry in entries.items():
        if not is_module(entry):
            _register_other(made, name, entry)
    if not made.values:
        raise UsageError(f"the source holds nothing that can be imported; {'; '.join(made.notes[:4])}")
    return made


def is_module(entry: Any) -> bool:
    """True for a flat dict of tensors, which may have extra state."""
    return (
        isinstance(entry, dict)
        and any(isinstance(item, IncomingTensor) for item in entry.values())
        and all(
            isinstance(key, str) and (isinstance(item, IncomingTensor) or _is_extra(key)) for key, item in entry.items()
        )
    )


def _is_extra(key: str) -> bool:
    return key == _EXTRA or key.endswith(f".{_EXTRA}")


def _entries(tree: dict[Any, Any], wishes: Wishes, made: Registered) -> dict[str, Any]:
    """The parts of the source by registered name."""
    bare = {key: item for key, item in tree.items() if isinstance(item, IncomingTensor) or _is_extra(str(key))}
    entries: dict[str, Any] = {}
    for key, item in tree.items():
        if key in bare:
            continue
        name = _registered_name(key, wishes)
        if not isinstance(item, dict) or name in entries:
            made.notes.append(f"left out: {key!s:.80} is no state dict")
            continue
        try:
            check_name(name)
        except UsageError as error:
            made.notes.append(f"left out: {error}")
            continue
        entries[name] = item
    if bare and wishes.name in entries:
        made.notes.append(f"left out: {len(bare)} tensors beside {wishes.name}, {next(iter(bare))!s:.80} is the first")
    elif is_module(bare):
        check_name(wishes.name)
        entries = {wishes.name: bare, **entries}
    return entries


def _registered_name(key: object, wishes: Wishes) -> str:
    name = str(key)
    return wishes.name if name in _BARE else name.removesuffix(_SUFFIX)


def _register_module(made: Registered, name: str, entry: dict[str, Any], wishes: Wishes) -> None:
    prefix = wishes.prefix
    if prefix is None:
        prefix = _common_wrapper(entry)
        if prefix:
            made.notes.append(f"{name}: the names are taken without {prefix}; --prefix '' keeps them")
    value: dict[str, Any] = {
        "kind": "module",
        "parameters": [],
        "frozen": [],
        "buffers": [],
        "transient_buffers": [],
        "extra": {},
        "broadcast": [],
    }
    made.values[name] = value
    named = {key.removeprefix(prefix): item for key, item in entry.items()}
    first: dict[object, str] = {}
    for fqn, item in named.items():
        if not isinstance(item, IncomingTensor):
            place = fqn.removesuffix(_EXTRA).removesuffix(".")
            value["extra"][place] = made.add_encoded(item, f"{name}/{fqn}")
            continue
        value["buffers"].append(fqn)
        other = first.setdefault(item.identity, fqn) if fqn not in wishes.ties else wishes.ties[fqn]
        if other == fqn:
            made.add(f"{name}/{fqn}", item)
        else:
            _check_tie(named, fqn, other)
            value.setdefault("aliases", {})[fqn] = f"{name}/{other}"


def _check_tie(named: Mapping[str, Any], fqn: str, other: str) -> None:
    one, two = named[fqn], named.get(other)
    if not isinstance(two, IncomingTensor) or (one.dtype, one.shape) != (two.dtype, two.shape):
        raise UsageError(f"{fqn} cannot be one tensor with {other}, which is not there or is another kind of tensor")


def _common_wrapper(names: Iterable[str]) -> str:
    """What DistributedDataParallel and torch.compile put before each name."""
    prefix = ""
    rest = list(names)
    while found := next((wrapper for wrapper in _WRAPPERS if all(name.startswith(wrapper) for name in rest)), None):
        prefix += found
        rest = [name.removeprefix(found) for name in rest]
    return prefix


def _register_other(made: Registered, name: str, entry: dict[Any, Any]) -> None:
    if is_optimizer(entry):
        _register_optimizer(made, name, entry)
        return
    before = dict(made.tensors)
    try:
        made.values[name] = {"kind": "object", "state": made.add_encoded(entry, name)}
    except UnsupportedValue as error:
        made.tensors = before
        made.notes.append(f"left out: {error}")


def _register_optimizer(made: Registered, name: str, entry: dict[Any, Any]) -> None:
    try:
        form = optimizer_form(entry, _parameters(made), _aliases(made))
    except UsageError as error:
        raise UsageError(f"{name}: {error}; or leave it out with --skip {name}") from error
    made.notes += [f"{name}: {note}" for note in form.notes]
    groups = [_group(made, name, index, form) for index in range(len(form.groups))]
    state = {full: _state(made, f"{name}/state/{full}", item, form.group_of(full)) for full, item in form.state.items()}
    made.values[name] = {"kind": "optimizer", "groups": groups, "state": state}
    _mark_parameters(made, form)


def _parameters(made: Registered) -> dict[str, dict[str, tuple[int, ...]]]:
    """Shapes of the tensors of each module, by registered name and name in it, in their order."""
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, value in made.values.items():
        for fqn in value.get("buffers", ()):
            full = value.get("aliases", {}).get(fqn)
            if full is None:
                found.setdefault(name, {})[fqn] = made.tensors[f"{name}/{fqn}"].shape
    return found


def _aliases(made: Registered) -> dict[str, str]:
    return {
        f"{name}/{fqn}": full for name, value in made.values.items() for fqn, full in value.get("aliases", {}).items()
    }


def _mark_parameters(made: Registered, form: OptimizerForm) -> None:
    """What an optimizer has is a parameter; of the rest of a module nothing says whether it is a buffer."""
    trained = {full for group in form.groups for full in group.parameters}
    for name, value in made.values.items():
        if value["kind"] == "module":
            value["parameters"] += [fqn for fqn in value["buffers"] if f"{name}/{fqn}" in trained]
            value["buffers"] = [fqn for fqn in value["buffers"] if f"{name}/{fqn}" not in trained]


def _group(made: Registered, name: str, index: int, form: OptimizerForm) -> Json:
    group = form.groups[index]
    path = f"{name}/group/{min(group.parameters, default=f'empty-{index}')}"
    options = {str(key): made.add_encoded(item, f"{path}/{key}") for key, item in group.options.items()}
    return {"params": list(group.parameters), "options": options, "shared": {}}


def _state(made: Registered, path: str, entry: Mapping[Any, Any], options: Mapping[str, Any]) -> Json:
    own = {key: item for key, item in entry.items() if isinstance(key, str) and isinstance(item, IncomingTensor)}
    for key, item in own.items():
        made.add(f"{path}/{key}", item)
    # As torch's own optimizers have it: the step counter stays on the host unless a kernel advances it.
    on_host = not (options.get("capturable") or options.get("fused"))
    where = {key: "cpu" if key == "step" and on_host else WITH_PARAMETER for key in own}
    rest = {key: item for key, item in entry.items() if key not in own}
    return {"keys": list(own), "tensors": where, "shared": {}, "rest": made.add_encoded(rest, path)}
