"""Random number generators: the next draws after a restore are those of the undisturbed process."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from rebuild import keep, put
from unbroken.errors import StateMismatch, UsageError
from unbroken.state.registry import State


def draw() -> list[object]:
    """From every global generator, so that cached second halves of pairs (gauss, normal) matter."""
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.normal(),
        torch.rand(3).tolist(),
        torch.randn(17).tolist(),
    ]


def test_the_global_generators_go_on_where_they_were():
    draw()
    kept = keep({})
    expected = [draw(), draw()]
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    put(kept, {})
    assert [draw(), draw()] == expected


def test_a_save_leaves_the_global_generators_bit_for_bit():
    random.seed(1)
    random.gauss(0, 1)
    np.random.normal()
    before = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
    assert before[0][2] is not None, "the cached half of a pair is part of the state"
    State({}).capture(accumulating=False)
    assert (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()) == before


def test_the_states_are_tensors_of_numbers():
    kept = keep({})
    forms = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in kept.tensors.items()}
    assert forms["rng/python/internal"] == (torch.uint32, (625,))
    assert forms["rng/numpy/state/key"] == (torch.uint32, (624,))
    assert forms["rng/torch"][0] is torch.uint8


GENERATORS = {
    "torch": (lambda seed: torch.Generator().manual_seed(seed), lambda g: torch.rand(2, generator=g).tolist()),
    "python": (random.Random, lambda g: [g.random(), g.gauss(0, 1)]),
    "pcg64": (np.random.default_rng, lambda g: [g.random(), g.integers(0, 9, dtype=np.uint32)]),
    "philox": (lambda seed: np.random.Generator(np.random.Philox(seed)), lambda g: g.normal()),
    "mt19937": (lambda seed: np.random.Generator(np.random.MT19937(seed)), lambda g: g.normal()),
    "random_state": (np.random.RandomState, lambda g: g.normal()),
}


@pytest.mark.parametrize("sort", GENERATORS)
def test_a_generator_of_the_users_goes_on_where_it_was(sort):
    make, use = GENERATORS[sort]
    before, after = make(1), make(2)
    use(before)
    put(keep({"mine": before}), {"mine": after})
    assert [use(after), use(after)] == [use(before), use(before)]


def test_a_generator_of_another_sort_is_refused():
    kept = keep({"mine": np.random.default_rng(1)})
    with pytest.raises(StateMismatch, match=r"of Philox, and was a numpy\.random\.Generator of PCG64"):
        put(kept, {"mine": np.random.Generator(np.random.Philox(1))})


def test_a_generator_without_a_state_is_refused_at_once():
    with pytest.raises(UsageError, match="SystemRandom draws from the system"):
        State({"mine": random.SystemRandom()})


class Drawing:
    """A user's object whose methods draw from everything."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def state_dict(self) -> dict[str, object]:
        draw()
        return {"noise": torch.rand(1, generator=self.generator)}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        draw()
        torch.rand(1, generator=self.generator)


def test_saving_leaves_every_generator_as_it_was_whatever_is_drawn_meanwhile():
    generator = torch.Generator().manual_seed(3)
    state = State({"drawing": Drawing(generator), "mine": generator})
    kept = keep({"mine": generator})
    expected = [draw(), torch.rand(1, generator=generator).item()]
    put(kept, {"mine": generator})
    state.capture(accumulating=False)
    state.digests()
    assert [draw(), torch.rand(1, generator=generator).item()] == expected


def test_a_failing_state_dict_leaves_every_generator_as_it_was():
    class Failing(Drawing):
        def state_dict(self):
            super().state_dict()
            raise OSError("no loader")

    kept = keep({})
    expected = draw()
    put(kept, {})
    with pytest.raises(UsageError, match="saving broken failed in its own code: OSError: no loader"):
        State({"broken": Failing(torch.Generator())}).capture(accumulating=False)
    assert draw() == expected


def test_generators_are_restored_after_everything_that_may_draw():
    generator = torch.Generator().manual_seed(3)
    objects = {"mine": generator, "drawing": Drawing(generator)}
    kept = keep(objects)
    expected = [draw(), torch.rand(1, generator=generator).item()]
    put(kept, objects)
    assert [draw(), torch.rand(1, generator=generator).item()] == expected


def test_a_rank_the_checkpoint_does_not_know_keeps_its_generators_and_says_so():
    kept = keep({})
    del kept.values["rng"]
    kept.tensors.clear()
    before = State({}).rng_digest()
    (warning,) = put(kept, {}).warnings
    assert "random number generators are not restored" in warning and State({}).rng_digest() == before


@pytest.mark.parametrize("use", [random.random, lambda: random.gauss(0, 1), np.random.rand, lambda: torch.rand(1)])
def test_the_digest_notices_every_draw(use):
    state = State({})
    before = state.rng_digest()
    assert state.rng_digest() == before
    use()
    assert state.rng_digest() != before
