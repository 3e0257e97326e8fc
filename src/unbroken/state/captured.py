"""What a save takes from the live objects, and what a restore puts back: the border between `state` and the rest.

`State.capture` gives a `Captured`; the snapshot copies its tensors and the manifest keeps its values.
`State.prepare` takes what a checkpoint says it holds, checks it against the live objects without touching them, and
gives a `Restoration`: the tensors to read bytes into, and what to call when they are filled.
No module of this package communicates with other ranks or touches the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec
import torch

from unbroken.layout.spread import Spread

Json: TypeAlias = Any
"""A value that JSON can hold, as `state.codec` encodes it."""


class LiveTensor(msgspec.Struct, frozen=True):
    """One tensor of the state, as it lies in the running job. Not a copy."""

    tensor: torch.Tensor
    """What this rank holds of it. Detached; any device, strides and memory format. Flat for a `Stretch`."""
    spread: Spread | None = None
    """How the whole tensor lies on the ranks by construction: replicas (parameters under DDP and their optimizer
    state) share the writing, shards are written by their holders. None: this rank's own, stored once per rank."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self.spread.shape if self.spread is not None else tuple(self.tensor.shape)


class SavedTensor(msgspec.Struct, frozen=True):
    """What a checkpoint says of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    own: bool = False
    """True if it was stored as one rank's own: whole as it lay there, and no part of anything."""


@dataclass(slots=True)
class Captured:
    """The state of one rank at one moment. Valid until the training loop goes on."""

    tensors: dict[str, LiveTensor] = field(default_factory=dict)
    """By full name: `model/h.0.weight`, `optimizer/state/model/h.0.weight/exp_avg`, `rng/torch`."""
    values: dict[str, Json] = field(default_factory=dict)
    """By registered name (`scheduler`, `optimizer`, …, and `rng`): everything that is not a tensor, encoded."""
    fenced: set[str] = field(default_factory=set)
    """Tensors that only the step of a torch optimizer changes, as far as the state can tell. Not to be changed."""
    frozen: frozenset[str] = frozenset()
    """Parameters that do not want a gradient."""
    standing: Mapping[str, LiveTensor] = field(default_factory=dict)
    """Those of `tensors` that modules and optimizers have: the same mapping as at the capture before, as long as each
    is the same tensor in the same place. Not to be changed."""


@dataclass(slots=True)
class Restoration:
    """A restore that was checked and is ready to be filled."""

    targets: dict[str, torch.Tensor]
    """Where the bytes of each saved tensor go, by full name: live storage where there is one, fresh tensors elsewhere.
    Fill with `target.copy_(value)` under `torch.no_grad()`; dtypes equal the saved ones, and shapes too, where the
    target is not only a part."""
    spreads: dict[str, Spread]
    """Which part of its tensor a target is, for those that are spread over ranks."""
    finish: Callable[[], None]
    """Call once after all targets are filled: hands values to `load_state_dict`s and restores RNG last of all."""
    unexpected: list[str] = field(default_factory=list)
    """What the checkpoint has and this rank's objects do not; no fault if another rank's do."""
    warnings: list[str] = field(default_factory=list)
    """What is not exactly as it was (a parameter frozen since, say); one line each, for one warning."""
    transient: set[str] = field(default_factory=set)
    """Targets that an older checkpoint may lack, and that then stay as they are: if this one turns out to be damaged,
    they must be as they were."""


SavedTensors: TypeAlias = Mapping[str, SavedTensor]
