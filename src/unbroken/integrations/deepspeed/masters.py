"""The masters of an engine: the tensors that its optimizer steps, and which parts of them its parameters are.

A parameter of the module is a copy of its master, in fewer bits and gathered. ZeRO flattens masters: of stages 1 and 2
each param group is a line that is cut into equal pieces, one a rank; of stage 3 each parameter is a line of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from unbroken.errors import UsageError
from unbroken.integrations.deepspeed.private import MASTERS, OF_A_PARTITIONED_PARAMETER, check
from unbroken.layout.spread import Mesh, Spread, Stretch, line, replicated
from unbroken.state.parts import Elsewhere, Part, Placed, part_of


class Masters(ABC):
    """Of one kind of optimizer that DeepSpeed puts around torch's."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.wrapper = engine.optimizer
        self.ranks = tuple(dist.get_process_group_ranks(engine.seq_data_parallel_group))

    @property
    def base(self) -> Optimizer:
        """The optimizer that steps the masters."""
        inner: Optimizer = self.wrapper.optimizer
        return inner

    def groups(self) -> list[list[Tensor]]:
        """The masters of each param group."""
        return [list(group["params"]) for group in self.base.param_groups]

    @abstractmethod
    def placed(self) -> Iterator[tuple[nn.Parameter, Placed]]:
        """Where the value of each trained parameter lies."""

    def place_of_frozen(self, parameter: nn.Parameter) -> Placed:
        """Where that of a parameter lies which has no master."""
        return Placed(parameter, None, self.replicated(tuple(parameter.shape)))

    def replicated(self, shape: tuple[int, ...]) -> Spread | None:
        """Each rank holds it whole."""
        return replicated(shape, self.ranks) if len(self.ranks) > 1 else None

    @abstractmethod
    def publish(self) -> None:
        """Make the module's parameters copies of the masters. On all ranks."""


class Plain(Masters):
    """No masters: float32 without ZeRO."""

    @property
    def base(self) -> Optimizer:
        """The engine's own."""
        inner: Optimizer = self.wrapper
        return inner

    def placed(self) -> Iterator[tuple[nn.Parameter, Placed]]:
        """In themselves, the same on all ranks."""
        yield from ()

    def publish(self) -> None:
        """They are the parameters."""


class Whole(Masters):
    """A whole master for each parameter, on each rank."""

    def placed(self) -> Iterator[tuple[nn.Parameter, Placed]]:
        """In their masters."""
        for parameters, masters in zip(self.wrapper.fp16_groups, self.wrapper.fp32_groups, strict=True):
            for parameter, master in zip(parameters, masters, strict=True):
                yield parameter, Placed(master, None, self.replicated(tuple(master.shape)))

    @torch.no_grad()
    def publish(self) -> None:
        """As after a step."""
        for parameters, masters in zip(self.wrapper.fp16_groups, self.wrapper.fp32_groups, strict=True):
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.data.copy_(master.data)


class Lines(Masters):
    """A line for each param group: ZeRO 1 and 2."""

    def placed(self) -> Iterator[tuple[nn.Parameter, Placed]]:
        """In this rank's piece of the line, or in no piece of its own."""
        for at, ((flat,), lengths) in enumerate(zip(self.groups(), self._lines(), strict=True)):
            mesh = _line_of(self.wrapper.real_dp_process_group[at])
            for number, (parameter, begin) in enumerate(lengths):
                stretch = Stretch(tuple(parameter.shape), mesh, 0, begin, flat.numel())
                yield parameter, Placed(flat, part_of(number, stretch), stretch)

    def _lines(self) -> Iterator[list[tuple[nn.Parameter, int]]]:
        """Of each group: its parameters, and where each begins on the line."""
        wrapper = self.wrapper
        if type(wrapper).__name__ == "BF16_Optimizer":
            for parameters in wrapper.bf16_groups:
                begins = [0]
                for parameter in parameters:
                    begins.append(begins[-1] + parameter.numel())
                yield list(zip(parameters, begins, strict=False))
        else:
            for parameters, begins in zip(
                wrapper.round_robin_bit16_groups, wrapper.round_robin_bit16_offsets, strict=True
            ):
                yield list(zip(parameters, begins, strict=True))

    def publish(self) -> None:
        """Copy this rank's piece, and gather those of others."""
        self.wrapper.update_lp_params()


class Partitions(Masters):
    """A line for each parameter: ZeRO 3."""

    def groups(self) -> list[list[Tensor]]:
        """The flat masters of the sub-groups; the optimizer has them only while it steps."""
        found: list[list[Tensor]] = [[] for _ in self.base.param_groups]
        for at, flat in enumerate(self.wrapper.fp32_partitioned_groups_flat):
            found[self.wrapper.sub_group_to_group_id[at]].append(flat)
        return found

    def placed(self) -> Iterator[tuple[nn.Parameter, Placed]]:
        """One after another in the flat master of their sub-group, each a piece of its own line."""
        for at, parameters in enumerate(self.wrapper.fp16_groups):
            flat = self.wrapper.fp32_partitioned_groups_flat[at]
            mesh, begin = _line_of(self.wrapper.sub_group_process_groups[at]), 0
            for number, parameter in enumerate(parameters):
                length = parameter.ds_tensor.numel()
                stretch = Stretch(tuple(parameter.ds_shape), mesh, 0, 0, length)
                first, last = stretch.range_of(dist.get_rank())
                yield parameter, Placed(flat, Part(number, begin, begin + last - first), stretch)
                begin += length

    def place_of_frozen(self, parameter: Any) -> Placed:
        """In this rank's partition."""
        if not hasattr(parameter, "ds_tensor"):
            return super().place_of_frozen(parameter)
        check(parameter, OF_A_PARTITIONED_PARAMETER)
        piece = parameter.ds_tensor
        stretch = Stretch(tuple(parameter.ds_shape), line(self.ranks), 0, 0, piece.numel())
        first, last = stretch.range_of(dist.get_rank())
        return Placed(piece, Part(0, 0, last - first), stretch)

    def publish(self) -> None:
        """As after a step: drop what was gathered, copy masters, gather what is to stay gathered."""
        wrapper = self.wrapper
        wrapper._partition_all_parameters()
        for at in range(len(wrapper.fp16_groups)):
            wrapper._reassign_or_swap_out_partitioned_parameters(at)
        if wrapper.persistent_parameters:
            wrapper.persistent_parameters[0].all_gather(wrapper.persistent_parameters)
        wrapper.invalidate_secondary_tensor()


_KINDS: Mapping[str, type[Masters]] = {
    "FP16_UnfusedOptimizer": Whole,
    "BF16_Optimizer": Lines,
    "DeepSpeedZeroOptimizer": Lines,
    "DeepSpeedZeroOptimizer_Stage3": Partitions,
}


def masters_of(engine: Any) -> Masters:
    """Those of an engine. Raises UsageError for an optimizer that is not known, by its name."""
    wrapper = engine.optimizer
    kind = type(wrapper).__name__
    if kind in _KINDS:
        check(wrapper, MASTERS[kind])
        return _KINDS[kind](engine)
    if isinstance(wrapper, Optimizer):
        return Plain(engine)
    raise UsageError(
        f"this engine's optimizer is a {kind}, which unbroken does not know: use ZeRO stage 0 to 3 with float32 or bf16"
    )


class Module(Elsewhere):
    """The module of an engine, whose values are the masters'."""

    def __init__(self, masters: Masters) -> None:
        super().__init__(masters.engine.module)
        self._masters = masters

    def places(self) -> Mapping[int, Mapping[str, Placed]]:
        """Of every parameter."""
        placed = {id(parameter): place for parameter, place in self._masters.placed()}
        return {
            id(module): {
                name: placed.get(id(parameter)) or self._masters.place_of_frozen(parameter)
                for name, parameter in module._parameters.items()
                if parameter is not None
            }
            for module in self.module.modules()
        }


class _Group(dict[str, Any]):
    """A param group with its masters; options that are written to it reach the optimizer's own."""

    def __init__(self, live: dict[str, Any]) -> None:
        super().__init__()
        self._live = live

    def look(self, masters: list[Tensor]) -> None:
        """Take the options as they are now. DeepSpeed's own marks are none."""
        self.clear()
        super().update({key: value for key, value in self._live.items() if not key.startswith("_ds_")}, params=masters)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self._live[key] = value

    def update(self, *others: Any, **more: Any) -> None:
        """Each of them."""
        for key, value in dict(*others, **more).items():
            self[key] = value


class _Stepped(Optimizer):
    """The optimizer of the masters, with all of them in its groups at any time. It takes no step by itself."""

    def __init__(self, masters: Masters) -> None:
        self._masters = masters
        self._base = masters.base  # what is registered by this stands for it
        self._groups = [_Group(live) for live in self._base.param_groups]

    @property
    def state(self) -> Any:  # type: ignore[override]  # torch has an attribute; this is looked up each time
        """By master."""
        return self._base.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # the same
        """Options as they are now."""
        for group, masters in zip(self._groups, self._masters.groups(), strict=True):
            group.look(masters)
        return [*self._groups]

    def step(self, closure: Any = None) -> Any:
        """Raises: the engine steps."""
        raise UsageError("the engine steps its optimizer: call engine.step()")


def stepped(masters: Masters) -> _Stepped:
    """One that goes by the name of the optimizer it stands for, so that plain PyTorch may restore it."""
    kind = type(masters.base)
    made: type[_Stepped] = type(kind.__name__, (_Stepped,), {"__qualname__": kind.__qualname__})
    return made(masters)


def _line_of(group: Any) -> Mesh:
    return line(tuple(dist.get_process_group_ranks(group)))
