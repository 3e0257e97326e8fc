"""Random number generators: the global ones of Python, NumPy, torch and every CUDA device, and the user's own.

Their states are stored as tensors and numbers, so that nothing has to be unpickled to read them. Reading a state draws
nothing; they are written back after everything else, because whatever runs before may draw.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unbroken.errors import UsageError
from unbroken.state.captured import Captured, Json, LiveTensor
from unbroken.state.codec import encode
from unbroken.state.draft import Draft, Phase

ROOT = "rng"
KIND = "generator"

Generator = random.Random | np.random.Generator | np.random.RandomState | torch.Generator
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)


def read_global() -> dict[str, Any]:
    """The states of all global generators, as plain values and tensors."""
    states: dict[str, Any] = {
        "python": _read_python(random.getstate()),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = {str(index): torch.cuda.get_rng_state(index) for index in range(torch.cuda.device_count())}
    return states


def write_global(states: Mapping[str, Any]) -> None:
    """Put the global generators into these states; those that are not mentioned stay as they are."""
    if "python" in states:
        random.setstate(_as_python(states["python"]))
    if "numpy" in states:
        np.random.set_state(states["numpy"])
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    for index, state in states.get("cuda", {}).items():
        if torch.cuda.is_available() and int(index) < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, int(index))


def read_generator(generator: object) -> Any:
    """The state of a generator of the user's. Raises UsageError for one that has none (`random.SystemRandom`)."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return dict(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    assert isinstance(generator, random.Random)
    try:
        return _read_python(generator.getstate())
    except NotImplementedError as error:
        raise UsageError(f"{type(generator).__name__} draws from the system and has no state to save") from error


def write_generator(generator: object, state: Any) -> None:
    """Put a generator of the user's into a state."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(_as_python(state))


@contextmanager
def undisturbed(generators: Mapping[str, object]) -> Iterator[None]:
    """Leave the global generators and these as they were, whatever is drawn meanwhile (invariant 13).

    A user's `state_dict()` may draw, and a saved run must equal one that never saves.
    """
    before = read_global()
    own_before = {name: read_generator(generator) for name, generator in generators.items()}
    try:
        yield
    finally:
        write_global(before)
        for name, generator in generators.items():
            write_generator(generator, own_before[name])


def capture_global(captured: Captured) -> None:
    """The global generators, under `rng`."""
    _capture(captured, ROOT, read_global(), "global")


def capture_generator(captured: Captured, name: str, generator: object) -> None:
    """A generator of the user's."""
    _capture(captured, name, read_generator(generator), _sort_of(generator))


def _capture(captured: Captured, name: str, state: Any, sort: str) -> None:
    tensors: dict[str, Tensor] = {}
    encoded = encode(state, name, tensors, text=f"the state of {name}")
    captured.tensors.update({key: LiveTensor(tensor) for key, tensor in tensors.items()})
    captured.values[name] = {"kind": KIND, "sort": sort, "state": encoded}


def prepare_global(draft: Draft, seed: int | None = None) -> None:
    """Restore the global generators last of all; a rank that the checkpoint does not know begins streams at `seed`."""
    value = draft.values.get(ROOT)
    if value is None:
        draft.ignore(ROOT)
        if seed is None:
            draft.warnings.append("random number generators are not restored: the checkpoint has none for this rank")
            return
        draft.warnings.append("the checkpoint has no random number generators for this rank: it begins new streams")
        draft.then(Phase.GENERATORS, lambda: seed_global(seed))
        return
    devices = len(value["state"].get("cuda", {}))
    if devices > torch.cuda.device_count():
        draft.warnings.append(
            f"random number generators of CUDA devices are not all restored: there were {devices}, "
            f"and here are {torch.cuda.device_count()}"
        )
    decoded = draft.decoder(value["state"])

    def restore() -> None:
        states: Any = decoded()
        write_global(states)

    draft.then(Phase.GENERATORS, restore)


def seed_global(seed: int) -> None:
    """Begin new streams: the same for the same 64-bit seed."""
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])  # the global one is what is meant
    torch.manual_seed(seed)  # CUDA's as well


def prepare_generator(draft: Draft, name: str, generator: object) -> None:
    """Restore a generator of the user's, which must be of the same sort."""
    value = draft.value_of(name, KIND)
    if value is None:
        return
    if value["sort"] != _sort_of(generator):
        draft.differing.append(f"{name} is a {_sort_of(generator)}, and was a {value['sort']}")
        draft.ignore(name)
        return
    decoded = draft.decoder(value["state"])
    draft.then(Phase.GENERATORS, lambda: write_generator(generator, decoded()))


def _sort_of(generator: object) -> str:
    """Generators of one sort can take each other's states."""
    if isinstance(generator, torch.Generator):
        return f"torch.Generator on {generator.device.type}"
    if isinstance(generator, np.random.Generator):
        return f"numpy.random.Generator of {type(generator.bit_generator).__name__}"
    return "numpy.random.RandomState" if isinstance(generator, np.random.RandomState) else "random.Random"


def _read_python(state: tuple[Any, ...]) -> Json:
    version, internal, gauss_next = state
    return {"version": version, "internal": np.array(internal, np.uint32), "gauss_next": gauss_next}


def _as_python(state: Mapping[str, Any]) -> tuple[Any, ...]:
    return state["version"], tuple(int(word) for word in state["internal"]), state["gauss_next"]
