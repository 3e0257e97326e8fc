"""The state of a run: the user's objects by name, and what nobody lists (random numbers, gradients, bucket order).

`capture` and `prepare` are inverse to each other: what one rank captured, prepared against freshly built objects,
filled and finished, continues bit for bit. Capturing disturbs nothing (invariant 13); preparing touches nothing.
Belongs to the training thread. Communicates only in `Restoration.finish`, where DDP's buckets are laid out anew.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping
from itertools import chain

import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from unbroken.elements import as_bytes
from unbroken.errors import UnbrokenError, UnsupportedValue, UsageError
from unbroken.garbage import without_collecting
from unbroken.state import buckets, foreign_optimizers, gradients, modules, objects, optimizers, rng
from unbroken.state.captured import Captured, Json, LiveTensor, Restoration, SavedTensor
from unbroken.state.draft import Draft, naming
from unbroken.state.look import Keeper, Look
from unbroken.state.names import ParameterNames, Place, Slot, Ties, check_plain, join, slots_of, walk
from unbroken.state.parts import Elsewhere
from unbroken.state.sharding import holds_unreduced_gradients, reshard, spread_of

log = logging.getLogger(__name__)

TENSOR = "tensor"
"""Kind of a tensor that is registered by itself."""
_SMALL_BYTES = 2 << 20
"""More than random numbers, counters and frozen weights have that are copied at each save."""
_ENTRY_BYTES = 1 << 10
"""More than a file says of a tensor."""
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_RESERVED = ("rng", "rank", "gradients")


class State:
    """What a run consists of.

    Objects may go on changing, and may gain or lose parameters: they are looked at anew at each capture.
    """

    def __init__(self, objects: Mapping[str, object]) -> None:
        """Register live objects by name.

        Raises UsageError for a name or an object that cannot be registered.
        """
        for name, value in objects.items():
            check_name(name)
            _check_object(name, value)
        self._objects = dict(objects)
        self._orders: dict[str, list[buckets.BucketOrder]] = {}
        self._keeper = Keeper()

    def watch(self) -> None:
        """Observe from now on what only shows while training: the order in which DDP gets gradients. Idempotent.

        To be called before the first backward; `prepare(…).finish()` does it too. What cannot be stored is told by
        the first capture or restore, which all ranks come to: an error here would be this rank's alone.
        """
        if not buckets.may_exist():
            return
        try:
            found = self._slots()
        except UnbrokenError:
            return
        for name, slots in found.items():
            for order in self._orders_of(name, slots):
                order.watch()

    def capture(self, *, accumulating: bool) -> Captured:
        """The whole state of this rank now, by reference. Leaves every random number generator as it found it.

        accumulating  True inside a gradient-accumulation window: partial gradients are part of the state

        Raises UnsupportedValue or UsageError, which name what cannot be saved.
        """
        with rng.undisturbed(self._of_type(rng.GENERATORS)):
            return self._capture(accumulating)

    def _capture(self, accumulating: bool) -> Captured:
        look = self._keeper.current(self._look)
        captured = Captured(dict(look.standing), fenced=look.fenced, frozen=look.frozen, standing=look.standing)
        rng.capture_global(captured)
        for name, generator in self._of_type(rng.GENERATORS).items():
            rng.capture_generator(captured, name, generator)
        for name, value in self._objects.items():
            with naming(f"saving {name}"):
                self._capture_one(captured, name, value, look)
        if accumulating:
            self._refuse_unreduced()
        gradients.capture_gradients(captured, look.parameters, accumulating=accumulating)
        return captured

    @without_collecting()
    def _look(self) -> Look:
        """Everything that a capture finds in modules and optimizers."""
        by_name = self._slots()
        slots = list(chain.from_iterable(by_name.values()))
        ties, found = Ties(slots), Captured()
        look = Look(by_name, ParameterNames(slots))
        aliases = modules.aliases_in(ties)
        walked: list[Place] = []
        own: list[Optimizer] = []
        alone: list[Tensor] = []
        for name, value in self._objects.items():
            with naming(f"saving {name}"):
                if isinstance(value, nn.Module):
                    places = list(walk(value))
                    walked += places
                    look.with_extra[name] = modules.places_with_extra(places)
                    look.described[name] = modules.describe_module(by_name[name])
                    if isinstance(value, Elsewhere):
                        alone += [slot.tensor for slot in by_name[name] if slot.is_parameter]
                elif isinstance(value, Tensor):
                    look.described[name] = {"kind": TENSOR}
                    alone.append(value)
                elif isinstance(value, Optimizer) and not foreign_optimizers.is_foreign(value):
                    look.optimizers[name] = optimizers.look_at_optimizer(found, name, value, look.parameters)
                    own.append(value)
            if name in aliases:
                look.described[name]["aliases"] = aliases[name]
        found.tensors.update(modules.tensors_of(ties))
        look.standing, look.fenced, look.frozen = found.tensors, found.fenced, modules.frozen_in(ties)
        look.remember([place.module for place in walked], own, alone)
        return look

    def _refuse_unreduced(self) -> None:
        """Raise for partial gradients that lie where nobody finds them."""
        for name, value in self._objects.items():
            for place in walk(value) if isinstance(value, nn.Module) else ():
                if holds_unreduced_gradients(place.module):
                    raise UnsupportedValue(
                        f"FSDP keeps gradients of {join(name, place.fqn)} that it has not reduced: save between two "
                        "optimizer steps, or let it reduce in every micro-step (set_requires_gradient_sync(True))"
                    )

    def _capture_one(self, captured: Captured, name: str, value: object, look: Look) -> None:
        if isinstance(value, nn.Module):
            extra = modules.capture_extra(captured, name, look.with_extra[name])
            captured.values[name] = {**look.described[name], "extra": extra}
            buckets.capture_orders(captured, name, self._orders_of(name, look.slots[name]))
        elif isinstance(value, Tensor):
            captured.values[name] = look.described[name]
        elif isinstance(value, Optimizer) and name in look.optimizers:
            optimizers.capture_optimizer(captured, name, value, look.optimizers[name])
        elif isinstance(value, Optimizer):
            foreign_optimizers.capture_foreign(captured, name, value, look.parameters)
        elif not isinstance(value, rng.GENERATORS) and objects.is_stateful(value):
            objects.capture_object(captured, name, value)

    def prepare(
        self,
        tensors: Mapping[str, SavedTensor],
        values: Mapping[str, Json],
        *,
        strict: bool = True,
        seed: int | None = None,
    ) -> Restoration:
        """Check a checkpoint against the live objects and say where its bytes go. Touches nothing.

        tensors, values  those of one rank: what is shared, and what is its own
        strict           False: what the checkpoint lacks stays as it is, and is named in a warning
        seed             for the random numbers of a rank that the checkpoint has none of

        What the checkpoint has besides is `Restoration.unexpected`: other ranks may have it.
        Raises StateMismatch, which lists what is missing or different; UsageError as `capture` does.
        """
        draft = Draft(tensors, values)
        by_name = self._slots()
        slots = list(chain.from_iterable(by_name.values()))
        parameters = ParameterNames(slots)
        for name, value in self._objects.items():
            with naming(f"restoring {name}"), draft.steps_of(f"restoring {name}"):
                self._prepare_one(draft, name, value, by_name.get(name, []), parameters)
        ties = Ties(slots)
        modules.prepare_slots(draft, ties)
        modules.prepare_guard(draft, ties)
        gradients.prepare_gradients(draft, parameters)
        rng.prepare_global(draft, seed)
        for name in sorted(set(values) - set(self._objects) - {rng.ROOT, gradients.ROOT}):
            draft.unexpected.append(name)
            draft.ignore(name)
        return draft.finished(strict=strict)

    def _prepare_one(
        self, draft: Draft, name: str, value: object, slots: list[Slot], parameters: ParameterNames
    ) -> None:
        if isinstance(value, nn.Module):
            modules.prepare_module(draft, name, value, slots)
            buckets.prepare_orders(draft, name, self._orders_of(name, slots))
        elif isinstance(value, Tensor):
            draft.value_of(name, TENSOR)
        elif isinstance(value, Optimizer):
            foreign = foreign_optimizers.is_foreign(value)
            prepare = foreign_optimizers.prepare_foreign if foreign else optimizers.prepare_optimizer
            prepare(draft, name, value, parameters)
        elif isinstance(value, rng.GENERATORS):
            rng.prepare_generator(draft, name, value)
        elif objects.is_stateful(value):
            objects.prepare_object(draft, name, value)

    def digests(self, *, accumulating: bool = False) -> dict[str, str]:
        """xxh3-64 of each part of the state as 16 hex digits: one per registered name, `rng`, and `gradients`.

        Equal exactly if names, dtypes, shapes, bytes and values are. `gradients` only while accumulating: what is left
        of them between two steps is no part of the state. What tells the time (`tells_time` is true of it: log lines
        with durations, say) is left out, since it is another in every run. Copies tensors of other devices to the host.
        """
        captured = self.capture(accumulating=accumulating)
        by_root: dict[str, dict[str, LiveTensor]] = {root: {} for root in captured.values}
        for name, live in captured.tensors.items():
            by_root[name.partition("/")[0]][name] = live
        if not accumulating:
            del by_root[gradients.ROOT]
        for name, value in self._objects.items():
            if getattr(value, "tells_time", False) is True:
                del by_root[name]
        return {root: _digest(captured.values[root], tensors) for root, tensors in by_root.items()}

    def nbytes(self) -> int:
        """Bytes of all tensors of the state, as it is now."""
        return sum(
            live.tensor.numel() * live.tensor.element_size()
            for live in self.capture(accumulating=False).tensors.values()
        )

    def bytes_to_write(self) -> int:
        """How many of a save are this rank's to copy, rather more than less; 0 if that cannot be told.

        Never raises, whatever the objects do: what is wrong with them is for the first save, which all ranks come to.
        """
        try:
            look = self._look()  # not to be kept: it may be long until a save
        except Exception as error:
            log.debug("cannot tell how much there is to save: %s", error)
            return 0
        return _SMALL_BYTES + sum(
            math.prod(live.shape) * live.tensor.element_size() // (len(live.spread.mesh.ranks) if live.spread else 1)
            + _ENTRY_BYTES
            for name, live in look.standing.items()
            if name not in look.frozen
        )

    def rng_digest(self) -> str:
        """The digest of the global random number generators alone; cheap enough for every step."""
        captured = Captured()
        rng.capture_global(captured)
        return _digest(captured.values[rng.ROOT], captured.tensors)

    def generator_digests(self) -> dict[str, str]:
        """The same for each global generator by itself: `python`, `numpy`, `torch`, `cuda`."""
        captured = Captured()
        rng.capture_global(captured)
        return {
            name: _digest(value, {key: live for key, live in captured.tensors.items() if _is_below(key, name)})
            for name, value in captured.values[rng.ROOT]["state"].items()
        }

    def _slots(self) -> dict[str, list[Slot]]:
        """Parameters and buffers of everything registered that has any, by registered name."""
        slots: dict[str, list[Slot]] = {}
        for name, value in self._objects.items():
            if isinstance(value, nn.Module):
                for module in value.modules():
                    if not holds_unreduced_gradients(module):
                        reshard(module)
                slots[name] = slots_of(name, value)
            elif isinstance(value, Tensor):
                slots[name] = [
                    Slot(
                        name, "", value, value.requires_grad or isinstance(value, nn.Parameter), True, spread_of(value)
                    )
                ]
                check_plain(slots[name][0])
        return slots

    def _orders_of(self, name: str, slots: list[Slot]) -> list[buckets.BucketOrder]:
        value = self._objects[name]
        if name not in self._orders:
            self._orders[name] = buckets.bucket_orders(value, slots) if isinstance(value, nn.Module) else []
        return self._orders[name]

    def _of_type(self, types: tuple[type, ...]) -> dict[str, object]:
        return {name: value for name, value in self._objects.items() if isinstance(value, types)}


def check_name(name: object) -> None:
    """Raise UsageError for what cannot be a registered name."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise UsageError(f"{name!r} cannot name a part of the state: use letters, digits and any of _ . -")
    if name in _RESERVED:
        raise UsageError(f"{name!r} is what unbroken calls a part of the state of its own: use another name")


def _check_object(name: str, value: object) -> None:
    if isinstance(value, Tensor):
        if not value.is_leaf:
            raise UsageError(f"{name} is the result of a computation; register the tensor that it is computed from")
    elif isinstance(value, rng.GENERATORS):
        rng.read_generator(value)
    elif not (isinstance(value, (nn.Module, Optimizer)) or objects.is_stateful(value)):
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        hint = "give it state_dict() and load_state_dict()"
        if isinstance(value, (list, tuple, dict)):
            hint = "register each of its parts under a name"
        elif isinstance(value, DataLoader):
            hint = "register unbroken.resumable(loader), and iterate that"
        raise UsageError(f"{name} is a {kind}, whose state unbroken cannot know: {hint}")


def _is_below(tensor: str, generator: str) -> bool:
    place = f"{rng.ROOT}/{generator}"
    return tensor == place or tensor.startswith(f"{place}/")


def _digest(value: Json, tensors: Mapping[str, LiveTensor]) -> str:
    digest = xxhash.xxh3_64(json.dumps(value, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].tensor
        digest.update(f"\0{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(as_bytes(tensor.cpu()).numpy().data)
    return digest.hexdigest()
