"""Gradients that an engine has summed in a window that is not over. Each kind of optimizer keeps them elsewhere.

They are this rank's own, in a form that only the same kind on the same number of ranks can go on with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from unbroken.errors import StateMismatch, UnsupportedValue
from unbroken.integrations.deepspeed.masters import Masters
from unbroken.integrations.deepspeed.private import GRADIENT_PARTITIONS


class Window:
    """What a rank has of the window under way. Registered with the Checkpointer."""

    def __init__(self, masters: Masters) -> None:
        self._masters = masters
        self._layout = {"kind": type(masters.wrapper).__name__, "ranks": len(masters.ranks)}
        self._loaded: Mapping[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Nothing between two steps."""
        engine = self._masters.engine
        if engine.micro_steps % engine.gradient_accumulation_steps() == 0:
            return {}
        return {"layout": self._layout, "sums": _sums(self._masters)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a state; `go_on` puts it back when masters are in place. Raises StateMismatch for another layout's."""
        if state and state["layout"] != self._layout:
            was = state["layout"]
            raise StateMismatch(
                f"the checkpoint lies inside an accumulation window of {was['kind']} on {was['ranks']} ranks, and this "
                f"is {self._layout['kind']} on {self._layout['ranks']}: resume it as it was until the window is over"
            )
        self._loaded = state

    def go_on(self) -> None:
        """Put the sums back."""
        if self._loaded:
            _put(self._masters, self._loaded["sums"])
        self._loaded = {}


def _sums(masters: Masters) -> dict[str, Any]:
    wrapper, kind = masters.wrapper, type(masters.wrapper).__name__
    if kind == "FP16_UnfusedOptimizer":
        return {"gradients": _gradients(wrapper.fp16_groups, "grad")}
    if kind == "BF16_Optimizer":
        return {"flat": list(wrapper.fp32_groups_gradients_flat), "has": wrapper.fp32_groups_has_gradients}
    if kind == "DeepSpeedZeroOptimizer":
        return _sums_of_lines(wrapper)
    if kind == "DeepSpeedZeroOptimizer_Stage3":
        _refuse_offload(wrapper.offload_optimizer)
        partitions = getattr(wrapper, GRADIENT_PARTITIONS)
        return {
            "partitions": [partitions[parameter.ds_id] for group in wrapper.fp16_groups for parameter in group],
            "micro_step_id": wrapper.micro_step_id,
            "epilogue": wrapper._epilogue_ran_this_backward,
        }
    return {}  # in the gradients of parameters, where every Checkpointer looks


def _sums_of_lines(wrapper: Any) -> dict[str, Any]:
    _refuse_offload(wrapper.cpu_offload)
    sums: dict[str, Any] = {"micro_step_id": wrapper.micro_step_id}
    if not wrapper.partition_gradients:
        attribute = "grad_accum" if wrapper.use_grad_accum_attribute else "grad"
        return {**sums, "gradients": _gradients(wrapper.round_robin_bit16_groups, attribute)}
    groups = range(len(wrapper.round_robin_bit16_groups))
    sums["flat"] = [
        wrapper._get_compact_grad_partition_buffer(at).flat_partition
        if wrapper._use_compact_grad_partition_buffer(at)
        else None
        for at in groups
    ]
    sums["lists"] = [wrapper.all_grad_tensors.get(at) for at in groups]
    return sums


def _put(masters: Masters, sums: Mapping[str, Any]) -> None:
    wrapper, kind = masters.wrapper, type(masters.wrapper).__name__
    if kind == "FP16_UnfusedOptimizer":
        _put_gradients(wrapper.fp16_groups, "grad", sums["gradients"])
    elif kind == "BF16_Optimizer":
        _copy(wrapper.fp32_groups_gradients_flat, sums["flat"])
        wrapper.fp32_groups_has_gradients = [list(group) for group in sums["has"]]
    elif kind == "DeepSpeedZeroOptimizer":
        wrapper.micro_step_id = sums["micro_step_id"]
        if not wrapper.partition_gradients:
            attribute = "grad_accum" if wrapper.use_grad_accum_attribute else "grad"
            _put_gradients(wrapper.round_robin_bit16_groups, attribute, sums["gradients"])
            return
        for at, (flat, tensors) in enumerate(zip(sums["flat"], sums["lists"], strict=True)):
            if flat is not None:
                _copy([wrapper._get_compact_grad_partition_buffer(at).flat_partition], [flat])
            wrapper.all_grad_tensors[at] = tensors
    elif kind == "DeepSpeedZeroOptimizer_Stage3":
        partitions = getattr(wrapper, GRADIENT_PARTITIONS)
        live = [partitions[parameter.ds_id] for group in wrapper.fp16_groups for parameter in group]
        _copy(live, sums["partitions"])
        wrapper.micro_step_id = sums["micro_step_id"]
        wrapper._epilogue_ran_this_backward = sums["epilogue"]


def _gradients(groups: list[list[Tensor]], attribute: str) -> list[list[Tensor | None]]:
    return [[getattr(parameter, attribute) for parameter in group] for group in groups]


def _put_gradients(groups: list[list[Tensor]], attribute: str, saved: list[list[Tensor | None]]) -> None:
    for group, gradients in zip(groups, saved, strict=True):
        for parameter, gradient in zip(group, gradients, strict=True):
            setattr(parameter, attribute, gradient)


@torch.no_grad()
def _copy(live: list[Tensor], saved: list[Tensor]) -> None:
    for target, source in zip(live, saved, strict=True):
        target.copy_(source)


def _refuse_offload(offloaded: bool) -> None:
    if offloaded:
        raise UnsupportedValue(
            "with ZeRO-Offload, gradients of a window that is not over cannot be saved: save between two steps"
        )
