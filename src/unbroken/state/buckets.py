"""What DistributedDataParallel keeps to itself: the order in which it lays gradients out for reduction, and more.

On its first synchronised backward DDP notes in which order gradients become ready, and packs its buckets anew in that
order. A resumed process would do one step with the initial layout, where the undisturbed run was on the new one: with
more than two ranks the reduction then adds the same numbers in another order, and the weights differ in their last bit.
So the order is observed, saved, and after a restore played to DDP with gradients of zero, before the first real step.

After a forward without gradients (a validation), or inside `no_sync()`, the next forward does not send rank 0's buffers
to the other ranks. That is a flag of DDP's, and saved too: what `BatchNorm` counts depends on it.

All names of DDP that are not public stand in this file, in `DdpInternals`.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from unbroken.state.captured import Captured, Json
from unbroken.state.draft import Draft, Phase
from unbroken.state.names import Slot, walk

log = logging.getLogger(__name__)


class DdpInternals:
    """What is used of DDP beyond its public surface. `tests/state/test_buckets.py` fails if torch changes it."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp: Any = ddp

    @property
    def has_rebuilt(self) -> bool:
        """True once the buckets were packed anew; this happens only once."""
        return bool(self._ddp._has_rebuilt_buckets)

    @property
    def rebuilds(self) -> bool:
        """True if this module packs its buckets anew at all."""
        if getattr(self._ddp, "_use_python_reducer", False):
            return False
        return bool(self._ddp.static_graph or not self._ddp.find_unused_parameters)

    @property
    def is_synchronising(self) -> bool:
        """True outside `no_sync()`."""
        return bool(self._ddp.require_backward_grad_sync)

    @property
    def sends_buffers(self) -> bool:
        """Whether the next forward sends rank 0's buffers to all ranks."""
        return bool(self._ddp.require_forward_param_sync)

    @sends_buffers.setter
    def sends_buffers(self, sends: bool) -> None:
        self._ddp.require_forward_param_sync = sends

    def expect_backward(self) -> None:
        """Make the reducer ready for one backward in which every parameter takes part."""
        self._ddp.reducer.prepare_for_backward([])

    def layout(self) -> list[Tensor]:
        """The parameters as the buckets hold them now, first bucket first. Allocates as much memory as gradients."""
        buckets = self._ddp.reducer._get_zeros_like_grad_buckets()
        return [parameter for bucket in buckets for parameter in bucket.parameters()]

    def reason_not_replayable(self) -> str | None:
        """Why a backward of zeros would do more than show an order, or None."""
        if self._ddp.static_graph:
            return "static_graph=True"
        if self._ddp.mixed_precision is not None:
            return "its mixed precision"
        if any(state is not None and not isinstance(state, dist.ProcessGroup) for _, state in self._ddp._comm_hooks):
            return "a communication hook with state of its own"
        return None


class BucketOrder:
    """Observes one DDP module. Belongs to the training thread; its hooks run in the backward of that module."""

    def __init__(self, fqn: str, ddp: DistributedDataParallel, parameters: Mapping[str, nn.Parameter]) -> None:
        """An observer that does nothing yet.

        fqn         of the module in its tree
        parameters  what the module reduces, by name in the tree
        """
        self.fqn = fqn
        self._ddp = ddp
        self._internals = DdpInternals(ddp)
        self._parameters = dict(parameters)
        self._order: list[str] = []
        self._handles: dict[str, RemovableHandle] = {}
        # Hooks hold their observer weakly (`_noting`), and go with it: they would run in every backward to come.
        weakref.finalize(self, _take_down, self._handles).atexit = False

    @property
    def order(self) -> list[str] | None:
        """Names in the order in which gradients became ready; None before all have been seen once."""
        complete = self._order and len(self._order) == len(self._parameters)
        return list(self._order) if complete else None

    @property
    def sends_buffers(self) -> bool:
        """Whether the next forward sends rank 0's buffers to all ranks."""
        return self._internals.sends_buffers

    def prepare_sending(self, draft: Draft, sends: bool) -> None:
        """Let a restore say whether the next forward sends buffers."""

        def say() -> None:
            self._internals.sends_buffers = sends

        draft.then(Phase.BUCKETS, say)

    def watch(self) -> None:
        """Observe the next synchronised backward, unless that was done or the buckets stay as they are. Idempotent."""
        if self._handles or self._order or not self._internals.rebuilds:
            return
        if self._internals.has_rebuilt:  # too late to observe it: read what came of it
            names = {id(parameter): name for name, parameter in self._parameters.items()}
            self._order = [names[id(parameter)] for parameter in self._internals.layout()]
            return
        for name, parameter in self._parameters.items():
            register: Any = parameter.register_post_accumulate_grad_hook
            self._handles[name] = register(self._noting(name))

    def _noting(self, name: str) -> Any:
        # Weakly: the collector does not see what a parameter's hooks hold, and a model whose backward never comes
        # would stay for ever.
        observer = weakref.ref(self)

        def note(_: Tensor) -> None:
            order = observer()
            if order is not None:
                order._note(name)

        return note

    def _note(self, name: str) -> None:
        if self._internals.is_synchronising and name in self._handles:
            self._order.append(name)
            self._handles.pop(name).remove()

    def prepare(self, draft: Draft, root: str, saved: Sequence[str]) -> None:
        """Let a restore lay out the buckets as they were. The replay is a collective: all ranks restore together."""
        if set(saved) != set(self._parameters):
            self._warn(draft, root, "the set of trained parameters changed")
            draft.then(Phase.BUCKETS, self.watch)
            return
        reason = self._internals.reason_not_replayable()
        if reason is not None and self._internals.rebuilds:
            self._warn(draft, root, f"of {reason}")
        replays = reason is None and self._internals.rebuilds and self._ddp.process_group.size() > 1

        def replay() -> None:
            _take_down(self._handles)
            if replays and not self._internals.has_rebuilt:
                self._replay(saved)
            self._order = list(saved)

        draft.then(Phase.BUCKETS, replay)

    def _warn(self, draft: Draft, root: str, reason: str) -> None:
        if self._ddp.process_group.size() > 2:  # two numbers have one sum, in whatever order
            draft.warnings.append(
                f"{root}: DDP reduces gradients in another order at first, because {reason}; last bits may differ"
            )

    def _replay(self, order: Sequence[str]) -> None:
        """A backward of zeros through each parameter in this order; the next forward packs the buckets accordingly."""
        parameters = [self._parameters[name] for name in order]
        gradients = [parameter.grad for parameter in parameters]
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for parameter in parameters:
                stack.enter_context(_without_hooks(parameter))
                parameter.grad = None
            self._internals.expect_backward()
            for parameter in parameters:
                torch.autograd.backward(parameter * 0, torch.zeros_like(parameter))
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def _take_down(handles: dict[str, RemovableHandle]) -> None:
    """Observe no more."""
    for handle in handles.values():
        handle.remove()
    handles.clear()


@contextmanager
def _without_hooks(parameter: nn.Parameter) -> Iterator[None]:
    """Keep the user's hooks still: one that steps an optimizer in the backward would step with the zeros."""
    tables = [parameter._post_accumulate_grad_hooks, parameter._backward_hooks]
    kept = [None if table is None else dict(table) for table in tables]
    for table in tables:
        if table is not None:
            table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, kept, strict=True):
            if table is not None and hooks is not None:
                table.update(hooks)


def is_composed(module: nn.Module) -> bool:
    """True for a module under DDP's composable form, which keeps its DistributedDataParallel out of the tree.

    The function of that name that is made of FSDP2 has no buckets (`torch/distributed/_composable`, torch 2.6 to 2.13).
    """
    composable = sys.modules.get("torch.distributed._composable.replicate")
    contract = sys.modules.get("torch.distributed._composable.contract")
    if composable is None or contract is None or "replicate" not in (contract._get_registry(module) or {}):
        return False
    return isinstance(composable.replicate.state(module), composable._ReplicateState)


def may_exist() -> bool:
    """False where nothing can be DDP, which saves a walk through thousands of modules."""
    return dist.is_available() and dist.is_initialized()


def bucket_orders(root: nn.Module, slots: Sequence[Slot]) -> list[BucketOrder]:
    """One observer for each DDP module of a tree that reduces anything.

    slots  those of the tree
    """
    if not may_exist():
        return []
    names = {}
    for slot in reversed(slots):  # so that of several names the first one stays
        names[id(slot.tensor)] = slot.fqn
    orders = []
    for place in walk(root):
        if is_composed(place.module):
            log.warning(
                "a module is replicated by torch.distributed._composable.replicate, whose bucket order cannot be "
                "restored: a resumed run may add gradients up in another order; use DistributedDataParallel instead"
            )
        if isinstance(place.module, DistributedDataParallel):
            ignored: set[str] = getattr(place.module, "parameters_to_ignore", set())
            parameters = {
                names[id(parameter)]: parameter
                for name, parameter in place.module.module.named_parameters()
                if parameter.requires_grad and name not in ignored
            }
            if parameters:
                orders.append(BucketOrder(place.fqn, place.module, parameters))
    return orders


def capture_orders(captured: Captured, name: str, orders: Sequence[BucketOrder]) -> None:
    """Add the orders that are known to the values of a module, and which DDP modules do not send buffers next."""
    known = {order.fqn: order.order for order in orders if order.order is not None}
    if known:
        captured.values[name]["buckets"] = known
    keeping = [order.fqn for order in orders if not order.sends_buffers]
    if keeping:
        captured.values[name]["keeps_buffers"] = keeping


def prepare_orders(draft: Draft, name: str, orders: Sequence[BucketOrder]) -> None:
    """Replay each order that the checkpoint has, and observe the others; say whether buffers are sent next."""
    value: Json = draft.values.get(name) or {}
    saved: Mapping[str, list[str]] = value.get("buckets", {})
    keeping: list[str] = value.get("keeps_buffers", [])
    for order in orders:
        order.prepare_sending(draft, order.fqn not in keeping)
        if order.fqn in saved:
            order.prepare(draft, name, saved[order.fqn])
        else:
            draft.then(Phase.BUCKETS, order.watch)
