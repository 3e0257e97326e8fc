"""What `compare` tells of two checkpoints, whatever pieces their tensors lie in."""

from __future__ import annotations

import math
import struct
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ranks import clusters, on_all, replica
from unbroken import comparison
from unbroken.candidates import candidates
from unbroken.commit import SaveId
from unbroken.comparison import Comparison, Side, bytes_to_compare, compare, stretches
from unbroken.errors import DamagedCheckpoint
from unbroken.image.digest import digest_blocks
from unbroken.layout.boxes import whole
from unbroken.manifest import FileRecord, PieceRecord, TensorRecord, decode
from unbroken.manifest import encode as encode_manifest
from unbroken.policy import Settings
from unbroken.session import Session
from unbroken.state.captured import Captured, LiveTensor
from unbroken.state.codec import encode
from unbroken.store.local import LocalStore, OpenFile

ROWS = 700
"""Of 1,000 floats: divided among ranks."""


def save(
    root: Path, tensors: dict, values: dict | None = None, world: int = 1, own: dict | None = None, step=1
) -> Side:
    """A checkpoint of shared `tensors`, of `own` (functions of the rank), and of `values` as an object's state."""
    root.mkdir()
    ranks = [
        Session(c, c.channel("t", threading.Event()), LocalStore(root), Settings(None, 20, 20), {}, threading.Event())
        for c in clusters(world)
    ]

    def act(session: Session) -> None:
        session.begin(None, 0)
        captured = Captured({name: replica(tensor, world) for name, tensor in tensors.items()})
        for name, make in (own or {}).items():
            captured.tensors[name] = LiveTensor(make(session.cluster.rank))
        captured.values["object"] = {"kind": "object", "state": encode(values or {}, "object", {})}
        session.save(SaveId(step, 0, 0), captured)
        assert session.wait() and session.outcomes.popleft().committed
        session.close(abandon=False)

    results = on_all(ranks, act)
    assert results == [None] * world, results
    store = LocalStore(root)
    (found,) = candidates(store, None)
    assert found.manifest is not None, found.problem
    return Side(store, found.directory, found.manifest)


def differ(tmp_path, a: dict, b: dict) -> Comparison:
    return compare(save(tmp_path / "a", **a), save(tmp_path / "b", **b), lambda count: None)


def weights(seed=0) -> torch.Tensor:
    return torch.randn(ROWS, 1000, generator=torch.Generator().manual_seed(seed))


def test_equal_states_are_equal_whatever_number_of_ranks_wrote_them(tmp_path):
    tensors = {"w": weights(), "scalar": torch.tensor(3.0), "empty": torch.zeros(0, 4)}
    found = differ(tmp_path, {"tensors": tensors, "world": 1}, {"tensors": tensors, "world": 3})
    assert found.tensors == [] and found.values == []
    assert found.world_sizes == (1, 3)
    assert not found.equal, "another world size is a difference"


@pytest.mark.parametrize("worlds", [(2, 2), (1, 3), (3, 2)])
def test_each_differing_element_is_counted_in_every_layout(tmp_path, worlds, monkeypatch):
    monkeypatch.setattr(comparison, "CHUNK_BYTES", 100_000)
    changed = weights()
    for row in (0, 233, 234, 350, 466, 467, 699):
        changed[row, row] += 0.5
    changed[5, 999] += 2.0
    found = differ(
        tmp_path, {"tensors": {"w": weights()}, "world": worlds[0]}, {"tensors": {"w": changed}, "world": worlds[1]}
    )
    (difference,) = found.tensors
    assert (difference.name, difference.elements, difference.differing) == ("w", ROWS * 1000, 8)
    assert difference.largest == pytest.approx(2.0, abs=1e-6)


def bits(*patterns: int) -> torch.Tensor:
    return torch.from_numpy(np.array(patterns, np.uint32).view(np.float32))


@pytest.mark.parametrize(
    ("a", "b", "differing", "largest"),
    [
        (bits(0x7FC00000, 0), bits(0x7FC00001, 0), 1, None),
        (torch.tensor([0.0]), torch.tensor([-0.0]), 1, 0.0),
        (torch.tensor([1.0, math.nan]), torch.tensor([2.5, 0.0]), 2, 1.5),
        (torch.tensor([math.inf]), torch.tensor([-math.inf]), 1, math.inf),
        (torch.tensor([-(2**63)]), torch.tensor([2**63 - 1]), 1, float(2**64)),
        (torch.tensor([3, 200], dtype=torch.uint8), torch.tensor([5, 100], dtype=torch.uint8), 2, 100.0),
        (torch.tensor([True, False]), torch.tensor([True, True]), 1, 1.0),
        (torch.tensor([1 + 1j]), torch.tensor([4 + 5j]), 1, 5.0),
        (torch.tensor([1.0]).bfloat16(), torch.tensor([1.5]).bfloat16(), 1, 0.5),
        (torch.tensor([1.0]).to(torch.float8_e4m3fn), torch.tensor([2.0]).to(torch.float8_e4m3fn), 1, 1.0),
        (torch.tensor(1.0), torch.tensor(3.0), 1, 2.0),
    ],
)
def test_elements_are_compared_by_their_bits_and_measured_as_numbers(tmp_path, a, b, differing, largest):
    (difference,) = differ(tmp_path, {"tensors": {"x": a}}, {"tensors": {"x": b}}).tensors
    assert (difference.differing, difference.largest) == (differing, largest)


def test_another_shape_dtype_or_a_missing_tensor_is_told(tmp_path):
    found = differ(
        tmp_path,
        {"tensors": {"x": torch.zeros(2, 3), "y": torch.zeros(2), "here": torch.zeros(1)}},
        {"tensors": {"x": torch.zeros(3, 2), "y": torch.zeros(2, dtype=torch.float64), "there": torch.zeros(1)}},
    )
    assert {(d.name, d.a, d.b) for d in found.tensors} == {
        ("x", "float32 [2, 3]", "float32 [3, 2]"),
        ("y", "float32 [2]", "float64 [2]"),
        ("here", "float32 [1]", None),
        ("there", None, "float32 [1]"),
    }


def test_what_each_rank_has_of_its_own_is_compared_rank_by_rank(tmp_path):
    found = differ(
        tmp_path,
        {"tensors": {}, "world": 3, "own": {"rng/torch": lambda rank: torch.tensor([rank])}},
        {"tensors": {}, "world": 3, "own": {"rng/torch": lambda rank: torch.tensor([rank + (rank == 1)])}},
    )
    (difference,) = found.tensors
    assert (difference.name, difference.ranks, difference.largest) == ("rng/torch", (1,), 1.0)


def test_a_buffer_of_a_single_process_is_compared_with_that_of_rank_0(tmp_path):
    """A single process stores as shared what several ranks store once each."""
    found = differ(
        tmp_path,
        {"tensors": {}, "own": {"model/running": lambda rank: torch.ones(2)}},
        {"tensors": {}, "world": 2, "own": {"model/running": lambda rank: torch.ones(2) * (1 + rank)}},
    )
    assert found.tensors == []


def test_values_are_told_by_their_path_and_numbers_that_are_written_otherwise_differ(tmp_path):
    a = {"lr": 0.1, "zero": 0.0, "one": 1, "same": [1, (2, 3)], "nan": math.nan, "list": [1], "gone": None}
    b = {"lr": 0.2, "zero": -0.0, "one": 1.0, "same": [1, (2, 3)], "nan": nan_with_payload(), "list": [1, 2]}
    found = differ(tmp_path, {"tensors": {}, "values": a}, {"tensors": {}, "values": b})
    assert {(d.name, d.a, d.b) for d in found.values} == {
        ("object/state/lr", "0.1", "0.2"),
        ("object/state/zero", "0.0", "-0.0"),
        ("object/state/one", "1", "1.0"),
        ("object/state/nan/bits", '"7ff8000000000000"', '"7ff8000000000001"'),
        ("object/state/list", "[1]", "[1,2]"),
        ("object/state/gone", "null", None),
    }
    assert all(d.ranks is None for d in found.values)


def nan_with_payload() -> float:
    (value,) = struct.unpack(">d", bytes.fromhex("7ff8000000000001"))
    return value


def test_another_step_is_a_difference_and_equal_checkpoints_are_equal(tmp_path):
    state = {"tensors": {"w": weights()}, "world": 2}
    one, other = save(tmp_path / "a", **state), save(tmp_path / "b", **state)
    later = save(tmp_path / "c", **state, step=2)
    assert compare(one, other, lambda count: None).equal
    assert not compare(one, later, lambda count: None).equal


def test_a_damaged_byte_is_never_compared(tmp_path):
    one, other = save(tmp_path / "a", {"w": weights()}), save(tmp_path / "b", {"w": weights()})
    path = tmp_path / "b/step-1/g0001-rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match="do not match their digest"):
        compare(one, other, lambda count: None)


class CountingStore(LocalStore):
    """Counts reads of data files, for each of which comparisons open them."""

    reads = 0

    def open(self, name: str) -> OpenFile:
        self.reads += 1
        return super().open(name)


def test_many_small_tensors_of_one_block_read_it_once(tmp_path):
    side = save(tmp_path / "a", {f"t{index}": torch.full((10,), float(index)) for index in range(200)})
    side.store = CountingStore(side.store.root)
    assert compare(side, save(tmp_path / "b", {}), lambda count: None).tensors
    assert compare(side, side, lambda count: None).equal
    assert side.store.reads == 1


def test_memory_stays_bounded_however_large_a_tensor_is(tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "CACHE_BYTES", 3 << 20)
    side = save(tmp_path / "a", {"w": torch.zeros(3000, 1000)})
    assert compare(side, side, lambda count: None).equal
    assert sum(map(len, side._blocks.values())) == side._held <= 3 << 20


@pytest.mark.parametrize("chunk_bytes", [8, 24, 4096])
def test_pieces_may_be_any_boxes(tmp_path, monkeypatch, chunk_bytes):
    """We cut along the first dimension only; another writer may cut into tiles."""
    monkeypatch.setattr(comparison, "CHUNK_BYTES", chunk_bytes)
    tensor = torch.arange(60, dtype=torch.int32).reshape(3, 4, 5)
    tiles = [[(a, b), (c, d), (0, 5)] for a, b in ((0, 1), (1, 3)) for c, d in ((0, 3), (3, 4))]
    tiles[0:1] = [[(0, 1), (0, 3), (0, 2)], [(0, 1), (0, 3), (2, 5)]]
    data, pieces = b"", []
    for box in tiles:
        part = tensor[tuple(slice(*bounds) for bounds in box)].contiguous().numpy().tobytes()
        pieces.append(PieceRecord(0, len(data), len(data) + len(part), box))
        data += part
    plain = save(tmp_path / "a", {"x": tensor})
    file = FileRecord("g0001-rank-00000.safetensors", len(data), 16, "".join(digest_blocks(memoryview(data), 16)))
    tiled = msgspec.structs.replace(
        plain.manifest, files=[file], tensors={"x": TensorRecord("int32", [3, 4, 5], pieces)}
    )
    (tmp_path / "b/step-1").mkdir(parents=True)
    (tmp_path / "b/step-1" / file.name).write_bytes(data)
    side = Side(LocalStore(tmp_path / "b"), "step-1", decode(encode_manifest(tiled), "tiled"))
    assert compare(plain, side, lambda count: None).equal
    assert compare(side, plain, lambda count: None).equal
    tensor[2, 3, 4] += 1
    (difference,) = compare(save(tmp_path / "c", {"x": tensor}), side, lambda count: None).tensors
    assert difference.differing == 1


def test_progress_comes_to_the_bytes_that_were_announced(tmp_path):
    side, seen = save(tmp_path / "a", {"w": weights()}, world=2, own={"x": lambda rank: torch.ones(3)}), []
    compare(side, side, seen.append)
    assert sum(seen) == bytes_to_compare(side.manifest)


@given(st.lists(st.integers(0, 7), max_size=4), st.integers(1, 50))
def test_stretches_cover_a_tensor_once_in_order_and_are_small(shape, most):
    order = np.arange(math.prod(shape)).reshape(shape)
    covered = []
    for box in stretches(tuple(shape), most):
        assert 0 < box.numel <= most
        covered += order[box.slices(whole(tuple(shape)))].flatten().tolist()
    assert covered == list(range(math.prod(shape)))
