"""One look through the process for what is alive and not covered, and what of it is training state.

What an earlier look saw decides in doubt: what has not moved since is none. A `Search` holds what it found, so it must
be dropped before training goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from unbroken.coverage.alive import GENERATOR, LOADER, MODULE, OBJECT, OPTIMIZER, SCALER, SCHEDULER, TENSORS, find_alive
from unbroken.coverage.covered import Covered, children, own_tensors, parts_of, with_submodules
from unbroken.coverage.loops import loaders_in_use
from unbroken.coverage.movement import Mark, mark, sample, sample_tensors
from unbroken.coverage.peek import attributes, is_a

Marks = Mapping[int, Mark]
"""What an earlier look saw, by id."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Something that no registered object brings into the checkpoint."""

    kind: str
    value: object
    tensors: tuple[Tensor, ...] = ()
    """Of a module: those that are in no checkpoint."""

    def sample(self) -> str:
        """Equal as long as it does not move; "" if it has not begun to, or if that cannot be seen."""
        return sample_tensors(self.tensors) if self.kind in (MODULE, TENSORS) else sample(self.kind, self.value)


class Search:
    """What is alive now.

    everywhere  False: only what the script's variables lead to
    """

    def __init__(self, registered: Iterable[object], frame: FrameType | None, *, everywhere: bool = True) -> None:
        self._alive = find_alive(frame, everywhere=everywhere)
        self.names = self._alive.names
        """By id: how the script's variables lead to an object."""
        self._covered = Covered()
        self._registered = list(registered)
        for value in self._registered:
            self._covered.add(value)
        self._candidates = list(self._all_candidates())

    def marks(self) -> dict[int, Mark]:
        """What everything that is not covered is like now."""
        return {id(one.value): mark(one.value, one.sample()) for one in self._candidates}

    def found(self, before: Marks | None) -> list[Candidate]:
        """What is not covered and is training state.

        before  what an earlier look saw; None if there was none
        """
        used = [one for one in self._candidates if not _is_idle(one, _before(one, before))]
        idle = {id(one.value) for one in self._candidates} - {id(one.value) for one in used}
        optimizers = [optimizer for optimizer in self._alive.of(OPTIMIZER) if id(optimizer) not in idle]
        optimized = {id(tensor) for optimizer in optimizers for tensor in _parameters_of(optimizer)}
        return [
            one
            for one in used
            if (one.kind != GENERATOR or _is_drawn_from(one, before))
            and (one.kind != MODULE or _is_trained(one, before, optimized))
            and (one.kind != TENSORS or _has_moved(one, before))
        ]

    def _all_candidates(self) -> Iterator[Candidate]:
        for kind, base in ((OPTIMIZER, Optimizer), (SCHEDULER, LRScheduler)):
            inner = {id(part) for value in self._alive.of(kind) for part in parts_of(value, base)}
            yield from (Candidate(kind, value) for value in self._uncovered(kind) if id(value) not in inner)
        yield from (Candidate(SCALER, value) for value in self._uncovered(SCALER) if attributes(value).get("_enabled"))
        yield from self._modules()
        yield from self._shadows()
        loaders = loaders_in_use(self._alive, self._covered)
        yield from (Candidate(LOADER, value) for value in loaders)
        yield from (Candidate(OBJECT, value) for value in self._uncovered(OBJECT))
        for loader in loaders:
            self._covered.add(loader)  # it stands for the generators that it draws from, too
        yield from (Candidate(GENERATOR, value) for value in self._uncovered(GENERATOR))

    def _uncovered(self, kind: str) -> list[object]:
        return [value for value in self._alive.of(kind) if not self._covers(value, kind)]

    def _covers(self, value: object, kind: str) -> bool:
        if value in self._covered:
            return True
        # What a framework puts around an optimizer has no state of its own; a chain of schedulers has.
        return kind == OPTIMIZER and any(part in self._covered for part in parts_of(value, Optimizer))

    def _modules(self) -> Iterator[Candidate]:
        """Outermost modules with parameters or buffers, of which something is not covered."""
        inside = {id(child) for module in self._alive.of(MODULE) for child in children(module)}
        for root in self._uncovered(MODULE):
            if id(root) in inside:
                continue
            parts = list(with_submodules(root))
            if any(attributes(part).get("_parameters") or attributes(part).get("_buffers") for part in parts):
                tensors = tuple(tensor for part in parts for tensor in own_tensors(part) if tensor not in self._covered)
                if tensors:
                    yield Candidate(MODULE, root, tensors)

    def _shadows(self) -> Iterator[Candidate]:
        """Tensors in a plain dict or list that are what a registered module has, one for one: an average of it, say."""
        uncovered = [(value, held) for value, held in self._lists() if not any(one in self._covered for one in held)]
        if not uncovered:  # what follows looks at each tensor of the model
            return
        ours = [list(with_submodules(module)) for module in self._registered if is_a(module, nn.Module)]
        gradients = {
            id(tensor.grad) for parts in ours for part in parts for tensor in own_tensors(part) if tensor.is_leaf
        }
        shapes = {_shapes(tensors) for parts in ours for tensors in (_parameters_in(parts), _tensors_in(parts))}
        for value, held in uncovered:
            if not any(id(tensor) in gradients for tensor in held) and _shapes(held) in shapes:
                yield Candidate(TENSORS, value, tuple(held))

    def _lists(self) -> Iterator[tuple[object, list[Tensor]]]:
        """Plain dicts and lists of several tensors, and what they hold."""
        for value in self._alive.of(TENSORS):
            held: list[Tensor] = list(value.values()) if is_a(value, dict) else list(value)
            if len(held) > 1:
                yield value, held


def _parameters_in(parts: list[nn.Module]) -> list[Tensor]:
    own = [tensor for part in parts for tensor in (attributes(part).get("_parameters") or {}).values()]
    return [tensor for tensor in own if is_a(tensor, Tensor)]


def _tensors_in(parts: list[nn.Module]) -> list[Tensor]:
    return [tensor for part in parts for tensor in own_tensors(part)]


def _shapes(tensors: list[Tensor]) -> tuple[tuple[int, ...], ...]:
    """What tells two lists of tensors apart, in whatever order."""
    return tuple(sorted(tuple(tensor.shape) for tensor in tensors))


def _before(one: Candidate, before: Marks | None) -> Mark | None:
    """What the earlier look saw of it, if it was there."""
    found = (before or {}).get(id(one.value))
    return found if found is not None and found.is_of(one.value) else None


def _is_idle(one: Candidate, before: Mark | None) -> bool:
    """It was used before training began, and not since: what an earlier phase of the script left behind."""
    if one.kind not in (OPTIMIZER, SCHEDULER, SCALER) or before is None:
        return False
    return before.sample != "" and before.sample == one.sample()


def _is_drawn_from(one: Candidate, before: Marks | None) -> bool:
    """Without an earlier look every generator counts. One that was made since counts for nothing: a script that makes
    one for each step from a seed needs no memory of it."""
    if before is None:
        return True
    seen = _before(one, before)
    return seen is not None and seen.sample != one.sample()


def _is_trained(one: Candidate, before: Marks | None, optimized: set[int]) -> bool:
    """A teacher is not, whatever its `requires_grad`; an average of the weights is, though it has no gradients."""
    if is_a(one.value, AveragedModel) or any(id(tensor) in optimized for tensor in one.tensors):
        return True
    seen = _before(one, before)
    if seen is not None:
        return seen.sample != one.sample()
    return any(tensor.is_leaf and tensor.grad is not None for tensor in one.tensors)


def _has_moved(one: Candidate, before: Marks | None) -> bool:
    seen = _before(one, before)
    return seen is not None and seen.sample != one.sample()


def _parameters_of(optimizer: object) -> Iterator[object]:
    for group in attributes(optimizer).get("param_groups") or ():
        yield from group["params"]
