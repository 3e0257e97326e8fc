"""A restore while it is being checked: what fits, what does not, where bytes will go, what is to be done afterwards.

Every kind of state adds to one `Draft`; only when all have looked and nothing is wrong does it become a `Restoration`.
Nothing live is touched before that.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum

import torch
from torch import Tensor

from unbroken.errors import StateMismatch, UnbrokenError, UsageError
from unbroken.layout.spread import Spread
from unbroken.state.captured import Json, Restoration, SavedTensor
from unbroken.state.codec import decode, references

SHOWN = 3
"""Names of each sort that an error or warning lists; the rest is counted."""


class Phase(IntEnum):
    """The order of `Restoration.finish`. Later ones undo what earlier ones did to them on the side."""

    MODULES = 0
    BEFORE_LOADING = 1
    FOREIGN_OPTIMIZERS = 2
    OBJECTS = 3
    """`load_state_dict` of the user's objects, which may write learning rates into optimizers."""
    AFTER_LOADING = 4
    OPTIMIZERS = 5
    BUCKETS = 6
    """The replay leaves no gradients, so gradients come after it."""
    GRADIENTS = 7
    GENERATORS = 8
    """Last: whatever ran before may have drawn random numbers."""


@dataclass(slots=True)
class Draft:
    """One restore of one rank."""

    tensors: Mapping[str, SavedTensor]
    """What the checkpoint has."""
    values: Mapping[str, Json]
    targets: dict[str, Tensor] = field(default_factory=dict)
    spreads: dict[str, Spread] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """The live objects have it, the checkpoint does not."""
    unexpected: list[str] = field(default_factory=list)
    """The checkpoint has it, the live objects do not."""
    differing: list[str] = field(default_factory=list)
    """Sentences; both have it, and it is not the same."""
    transient: set[str] = field(default_factory=set)
    """Targets that another checkpoint may lack without harm."""
    _used: set[str] = field(default_factory=set)
    _steps: list[tuple[Phase, str, Callable[[], None]]] = field(default_factory=list)
    _what: str = "restoring"

    def value_of(self, name: str, kind: str) -> Json | None:
        """The values of a registered name, or None (and noted) if it is missing or was another kind of object."""
        value = self.values.get(name)
        if value is None:
            self.missing.append(name)
            return None
        if value.get("kind") != kind:
            self.differing.append(f"{name} is registered as {kind}, and was as {value.get('kind')}")
            self.ignore(name)
            return None
        return value

    def ignore(self, root: str) -> None:
        """Leave all tensors of a registered name out of `unexpected`; something better was said about them."""
        self.skip(name for name in self.tensors if name == root or name.startswith(f"{root}/"))

    def saved(self, name: str) -> SavedTensor | None:
        """What the checkpoint says of a tensor, or None (and noted) if it has none of that name."""
        found = self.tensors.get(name)
        if found is None and name not in self._used:
            self.missing.append(name)
        self._used.add(name)
        return found

    def skip(self, names: Iterable[str]) -> None:
        """Leave these tensors out of `unexpected`."""
        self._used.update(names)

    def fits(self, name: str, target: Tensor, spread: Spread | None = None) -> bool:
        """True if the saved tensor `name` has the dtype and shape of `target`, or of what it is a part of.

        Notes it if not.
        """
        saved = self.saved(name)
        if saved is None:
            return False
        shape = tuple(target.shape) if spread is None else spread.shape
        if saved.dtype != target.dtype or tuple(saved.shape) != shape:
            here, there = _describe(target.dtype, shape), _describe(saved.dtype, tuple(saved.shape))
            self.differing.append(f"{name} is {here}, and was {there}")
            return False
        return True

    def fill(self, name: str, target: Tensor, spread: Spread | None = None) -> None:
        """Read the saved tensor `name` into `target`, or into what this rank holds of it, if it fits."""
        if self.fits(name, target, spread):
            self.targets[name] = target.detach() if target.requires_grad else target
            if spread is not None:
                self.spreads[name] = spread

    def decoder(self, value: Json) -> Callable[[], object]:
        """Make room for the tensors of an encoded value; what is returned decodes it once they are filled."""
        found: dict[str, Tensor] = {}
        for reference in references(value):
            saved = self.saved(reference.name)
            if saved is not None:
                device = device_of_kind(reference.device)
                if reference.stride is not None and len(reference.stride) == len(saved.shape):
                    target = torch.empty_strided(saved.shape, reference.stride, dtype=saved.dtype, device=device)
                else:
                    target = torch.empty(saved.shape, dtype=saved.dtype, device=device)
                self.targets[reference.name] = found[reference.name] = target
        return lambda: decode(value, found)

    def then(self, phase: Phase, step: Callable[[], None]) -> None:
        """Do this after the targets are filled."""
        self._steps.append((phase, self._what, step))

    @contextmanager
    def steps_of(self, what: str) -> Iterator[None]:
        """Steps that are added meanwhile say in their errors that they were doing `what`."""
        self._what, before = what, self._what
        try:
            yield
        finally:
            self._what = before

    def finished(self, *, strict: bool) -> Restoration:
        """The restore, ready to be filled. Raises StateMismatch if it does not fit.

        strict  False: what the checkpoint lacks is left as it is, with a warning

        What only the checkpoint has is left to the caller (`only_saved`), who knows what other ranks have.
        """
        self.unexpected += sorted(set(self.tensors) - self._used)
        missing = [_listed("missing in the checkpoint", self.missing)] if self.missing else []
        differing = [_listed("differ", self.differing)] if self.differing else []
        if differing or (strict and missing):
            raise _misfit([*missing, _listed("only in the checkpoint", self.unexpected), *differing])
        steps = sorted(self._steps, key=lambda entry: entry[0])
        self.warnings += [f"not restored: {text}" for text in missing]
        transient = self.transient if strict else set(self.targets)
        return Restoration(self.targets, self.spreads, lambda: _run(steps), self.unexpected, self.warnings, transient)


def only_saved(restoration: Restoration, names: list[str], *, strict: bool) -> None:
    """What the checkpoint has and no rank's live objects do: an error, or with strict=False a warning."""
    if names and strict:
        raise _misfit([_listed("only in the checkpoint", names)])
    if names:
        restoration.warnings.append(f"not restored: {_listed('only in the checkpoint', names)}")


def _misfit(problems: list[str]) -> StateMismatch:
    return StateMismatch(
        f"the checkpoint does not fit the live objects: {'; '.join(filter(None, problems))}\n"
        "nothing was changed; build the same objects as when it was saved, and register them by the same names"
    )


def count_and_name(names: list[str]) -> str:
    """`5 (a, b, c, …)`."""
    return f"{len(names)} ({', '.join(names[:SHOWN])}{', …' if len(names) > SHOWN else ''})"


def _listed(what: str, names: list[str]) -> str:
    return f"{what}: {count_and_name(names)}" if names else ""


def _describe(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def device_of_kind(kind: str) -> torch.device:
    """The current device of a kind, or the CPU where this machine has none of it."""
    if kind == "cpu":
        return torch.device("cpu")
    accelerator = getattr(torch, kind, None)
    available = accelerator is not None and getattr(accelerator, "is_available", bool)()
    return torch.device(kind if available else "cpu")


def _run(steps: list[tuple[Phase, str, Callable[[], None]]]) -> None:
    for what, same in itertools.groupby(steps, key=lambda entry: entry[1]):
        with naming(what):
            for _, _, step in same:
                step()


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Let an error out of the user's own code say which entry it came from."""
    try:
        yield
    except UnbrokenError:
        raise
    except Exception as error:
        raise UsageError(f"{what} failed in its own code: {type(error).__name__}: {error}") from error
