"""docs/format.md is precise enough to write a reader from: one was, and it must get every bit out."""

import ast
import enum
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

import independent_reader
from independent_reader import newest, place, read
from ranks import on_all, replica
from two_rank_run import Box, make_run, objects, start_ranks
from unbroken.commit import SaveId
from unbroken.state.registry import State


class Colour(enum.Enum):
    RED = 1


@dataclass
class Point:
    x: float
    y: int


VALUES = {
    "tuple": (1, (2.5, "three")),
    "bytes": b"\x00\xff",
    "large": -(1 << 80),
    "keys": {1: "one", (2, 3): None},
    "nan": float("nan"),
    "infinity": float("-inf"),
    "tenth": 0.1,
    "complex": 1 - 2j,
    "set": {3, 1, 2},
    "scalar": np.float32(0.1),
    "array": np.arange(6, dtype=np.float64).reshape(2, 3, order="F"),
    "words": np.array(["ab", "c"]),
    "size": torch.Size([2, 3]),
    "path": Path("a/b"),
}
TENSORS = {
    "split": torch.randn(600, 500, generator=torch.Generator().manual_seed(0)),
    "half": torch.randn(5, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16),
    "single": torch.tensor(7.25),
    "empty": torch.empty(0, 3),
    "flags": torch.tensor([True, False, True]),
    "complex": torch.tensor([1 + 2j, 3 - 4j]),
}


def bits(tensor):
    """As the reader gives it."""
    return (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A checkpoint of two ranks with every sort of tensor and value."""
    root = tmp_path_factory.mktemp("format") / "run"
    root.mkdir()
    ranks = start_ranks(root, None)

    def save(session):
        rank = session.cluster.rank
        held = {**VALUES, "colour": Colour.RED, "point": Point(0.5, rank)}
        captured = State({**TENSORS, "own": torch.full((3,), rank), "box": Box(held)}).capture(accumulating=False)
        for name in TENSORS:
            captured.tensors[name] = replica(captured.tensors[name].tensor, 2)
        session.save(SaveId(12, 0, 0), captured)
        assert session.wait() and session.outcomes.popleft().committed

    for result in on_all(ranks, save):
        assert not isinstance(result, Exception), result
    on_all(ranks, lambda session: session.close(abandon=False))
    return root


def test_the_reader_knows_nothing_but_json_and_numpy():
    tree = ast.parse(Path(independent_reader.__file__).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {"json", "numpy", "base64", "re", "struct", "pathlib"}, (
        "besides Python's own, json and numpy only"
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_every_tensor_is_read_bit_for_bit(run, rank):
    tensors, _ = read(newest(run), rank)
    for name, expected in TENSORS.items():
        assert tensors[name].shape == tuple(expected.shape), name
        assert tensors[name].tobytes() == bits(expected).tobytes(), name
    assert tensors["own"].tolist() == [rank] * 3
    pieces = independent_reader.record(newest(run))["tensors"]["split"]["pieces"]
    assert {piece["file"] for piece in pieces} == {0, 1}, "both ranks wrote a part of it"


@pytest.mark.parametrize("rank", [0, 1])
def test_every_value_is_read_exactly(run, rank):
    _, values = read(newest(run), rank)
    found = values["box"]["state"]
    for name, expected in VALUES.items():
        if isinstance(expected, np.ndarray):
            assert found[name].dtype == expected.dtype and (found[name] == expected).all(), name
        elif name == "nan":
            assert np.isnan(found[name])
        else:
            assert found[name] == (str(expected) if isinstance(expected, Path) else expected), name
    assert found["colour"] == (f"{__name__}:Colour", "RED")
    assert found["point"] == (f"{__name__}:Point", {"x": 0.5, "y": rank})


def test_the_newest_of_the_lineage_is_found_and_a_manifest_that_was_moved_aside_can_be_read(tmp_path):
    make_run(tmp_path / "run")
    assert place(newest(tmp_path / "run")) == (5, 0, 3)
    aside = tmp_path / "run/step-3/manifest.g0001.json"
    assert place(aside) == (3, 0, 1)
    tensors, _ = read(aside, 1)
    assert tensors["weights"].tobytes() == objects(1, 3, 1)["weights"].numpy().tobytes()
