"""B161: a random-state file that torch 2.6 and later refuse to load.

The bug: NumPy's state was pickled as NumPy objects, which `torch.load(weights_only=True)` does not allow, so the resume
failed, or the error was caught and other random streams went on. Right: plain tensors and numbers.
"""

from __future__ import annotations

import io
import random

import msgspec
import numpy as np
import torch

from rebuild import Kept, keep, put


def test_all_random_states_are_plain_tensors_and_numbers():
    random.seed(3)
    np.random.seed(4)
    torch.manual_seed(5)
    random.gauss(0, 1)
    np.random.normal()
    generators = {"mine": np.random.default_rng(6), "other": random.Random(7), "third": torch.Generator()}
    kept = keep(generators)

    file = io.BytesIO()
    torch.save({"tensors": kept.tensors, "values": msgspec.json.encode(kept.values).decode()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    expected = [draw(generators), draw(generators)]

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    fresh = {"mine": np.random.default_rng(0), "other": random.Random(0), "third": torch.Generator()}
    put(Kept(loaded["tensors"], msgspec.json.decode(loaded["values"])), fresh)
    assert [draw(fresh), draw(fresh)] == expected


def draw(generators) -> list[object]:
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.rand(2).tolist(),
        np.random.normal(),
        torch.randn(3).tolist(),
        generators["mine"].normal(),
        generators["other"].gauss(0, 1),
        torch.rand(1, generator=generators["third"]).item(),
    ]
