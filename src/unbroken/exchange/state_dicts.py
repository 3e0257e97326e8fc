"""A checkpoint as the state dicts that torch's own objects would give: names to values, no live object needed.

Tensors are mapped from a temporary file without a name in the directory of the output, so that a model larger than
memory can be handed to what wants tensors (`torch.save`, `torch.distributed.checkpoint`); the system gives the file
back however this process ends.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unbroken.errors import DamagedCheckpoint, UnbrokenError, UsageError
from unbroken.exchange.contents import Contents, Progress, nbytes, tensors_of_module
from unbroken.image.header import dtype_of
from unbroken.state.captured import Json
from unbroken.state.codec import TAG, decode
from unbroken.state.draft import count_and_name

ALIGN_BYTES = 64
_OF_CLASSES = ("enum", "dataclass", "namedtuple")
"""Values of classes that whoever loads the file may not have."""
_Builder = Callable[[Contents, str, Mapping[str, Tensor], bool], Any]


@dataclass(slots=True)
class StateDicts:
    """What is exported."""

    found: dict[str, Any] = field(default_factory=dict)
    """By registered name."""
    left_out: list[str] = field(default_factory=list)
    """Registered names that are not, each with the reason."""


def chosen_names(contents: Contents, names: Iterable[str] | None) -> list[str]:
    """Registered names to export: all, unless `names` says which. Raises UsageError for one that is not there."""
    known = contents.registered()
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise UsageError(f"{contents.side.directory} holds no {', '.join(unknown)}; it holds {', '.join(known)}")
    return list(dict.fromkeys(names)) if names else known


def tensors_needed(contents: Contents, names: Iterable[str]) -> list[str]:
    """Full names of the tensors of these registered names, those they share with others included, in file order."""
    roots = set(names)
    needed = {full for full in contents.saved.records if full.partition("/")[0] in roots}
    for name in contents.registered("module"):
        if name in roots:
            needed.update(tensors_of_module(contents, name).stored.values())
    return sorted(needed, key=lambda full: _place(contents, full))


def _place(contents: Contents, full: str) -> tuple[int, int]:
    pieces = contents.record(full).pieces
    return (pieces[0].file, pieces[0].begin) if pieces else (0, 0)


@contextmanager
def mapped_tensors(
    contents: Contents, names: Iterable[str], directory: Path, progress: Progress
) -> Iterator[dict[str, Tensor]]:
    """Tensors by full name, verified, each with a storage of its own. They must not be used after the end.

    directory  has room for all of them
    """
    with tempfile.TemporaryFile(dir=directory) as file:
        places: dict[str, int] = {}
        for name in names:
            file.write(bytes(-file.tell() % ALIGN_BYTES))
            places[name] = file.tell()
            for chunk in contents.chunks(name, progress):
                file.write(chunk)
        file.flush()
        size = file.tell()
        memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) if size else None
        yield {name: _tensor_at(memory, begin, contents, name) for name, begin in places.items()}


def _tensor_at(memory: mmap.mmap | None, begin: int, contents: Contents, name: str) -> Tensor:
    record = contents.record(name)
    dtype = dtype_of(record.dtype)
    count = nbytes(record) // dtype.itemsize
    if not count or memory is None:
        return torch.empty(record.shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=begin).reshape(record.shape)


def state_dicts(
    contents: Contents, names: Iterable[str], tensors: Mapping[str, Tensor], *, by_name: bool
) -> StateDicts:
    """The state dicts of registered objects.

    by_name  True: optimizer state by the names of parameters, as torch.distributed.checkpoint.state_dict gives it;
             False: by position, as `Optimizer.state_dict()` does
    """
    made = StateDicts()
    for name in names:
        value = contents.saved.values[name]
        build = _BUILDERS.get(value["kind"])
        if build is None:
            made.left_out.append(f"{name} is a {value['kind']}")
        elif build is not _module and _has_classes(value):
            made.left_out.append(f"{name} holds values of the script's own classes")
        else:
            made.found[name] = _built(build, contents, name, tensors, by_name)
    contents.note_whose([*names, *(full for full in tensors if full.partition("/")[0] in made.found)])
    return made


def _built(build: _Builder, contents: Contents, name: str, tensors: Mapping[str, Tensor], by_name: bool) -> Any:
    try:
        return build(contents, name, tensors, by_name)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, UnbrokenError):
            raise
        raise DamagedCheckpoint(f"the values of {name} are not as `unbroken` writes them: {error!r}") from error


def _has_classes(value: Json) -> bool:
    if isinstance(value, list):
        return any(map(_has_classes, value))
    if isinstance(value, dict):
        return value.get(TAG) in _OF_CLASSES or any(map(_has_classes, value.values()))
    return False


def _module(contents: Contents, name: str, tensors: Mapping[str, Tensor], by_name: bool) -> dict[str, Any]:
    found = tensors_of_module(contents, name)
    state: dict[str, Any] = {fqn: tensors[full] for fqn, full in found.stored.items()}
    state |= {alias: state[kept] for alias, kept in found.aliases.items()}
    foreign = [fqn for fqn, encoded in found.extra.items() if _has_classes(encoded)]
    if foreign:
        contents.notes.append(f"left out: extra state of the script's own classes of {count_and_name(foreign)}")
    for fqn, encoded in found.extra.items():
        if fqn in foreign:
            continue
        state[f"{fqn}{'.' if fqn else ''}_extra_state"] = decode(encoded, tensors)
    return state


def _optimizer(contents: Contents, name: str, tensors: Mapping[str, Tensor], by_name: bool) -> dict[str, Any]:
    value = contents.saved.values[name]
    members = [group["params"] for group in value["groups"]]
    options = [_options(group, tensors) for group in value["groups"]]
    state = {full: _parameter_state(name, full, entry, tensors) for full, entry in value["state"].items()}
    return _assembled(members, options, state, by_name)


def _options(group: Json, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    decoded = {key: decode(item, tensors) for key, item in group["options"].items()}
    return decoded | {key: tensors[stored_as] for key, stored_as in group["shared"].items()}


def _parameter_state(name: str, full: str, entry: Json, tensors: Mapping[str, Tensor]) -> dict[Any, Any]:
    path = f"{name}/state/{full}"
    own = {key: tensors[entry["shared"].get(key, f"{path}/{key}")] for key in entry["keys"]}
    return {**own, **decode(entry["rest"], tensors)}


def _foreign_optimizer(contents: Contents, name: str, tensors: Mapping[str, Tensor], by_name: bool) -> dict[str, Any]:
    value = contents.saved.values[name]
    more: dict[str, Any] = decode(value["more"], tensors)
    if not value["named"]:
        return more
    state = {full: decode(entry, tensors) for full, entry in value["state"].items()}
    options = [decode(group, tensors) for group in value["groups"]]
    return {**more, **_assembled(value["members"], options, state, by_name)}


def _assembled(
    members: list[list[str]], options: list[dict[str, Any]], state: Mapping[str, Any], by_name: bool
) -> dict[str, Any]:
    """An optimizer's state dict. Members by group, and state, go by full names."""
    order = [full for group in members for full in group]
    short = short_names(order)
    keys: dict[str, Any] = short if by_name else {full: at for at, full in enumerate(order)}
    groups = []
    for group, chosen in zip(members, options, strict=True):
        entry = {**chosen, "params": [keys[full] for full in group]}
        groups.append(entry if by_name else {**entry, "param_names": [short[full] for full in group]})
    return {"state": {keys[full]: state[full] for full in order if full in state}, "param_groups": groups}


def short_names(full_names: Iterable[str]) -> dict[str, str]:
    """Names of parameters within their module; with the registered name before it if they belong to several."""
    names = list(full_names)
    roots = {name.partition("/")[0] for name in names}
    if len(roots) == 1:
        return {name: name.partition("/")[2] or name for name in names}
    return {name: name.replace("/", ".", 1) for name in names}


def _object(contents: Contents, name: str, tensors: Mapping[str, Tensor], by_name: bool) -> Any:
    return decode(contents.saved.values[name]["state"], tensors)


def _tensor(contents: Contents, name: str, tensors: Mapping[str, Tensor], by_name: bool) -> Any:
    aliased = contents.saved.values[name].get("aliases", {}).get("", name)
    return tensors[aliased]


_BUILDERS: dict[str, _Builder] = {
    "module": _module,
    "optimizer": _optimizer,
    "optimizer with its own state_dict": _foreign_optimizer,
    "object": _object,
    "tensor": _tensor,
}
