import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.errors import DamagedCheckpoint, NewerFormat
from unbroken.manifest import (
    CutsRecord,
    FileRecord,
    Manifest,
    MeshRecord,
    Origin,
    PieceRecord,
    TensorRecord,
    ValueRecord,
    decode,
    encode,
    parse_step_directory,
    seal,
    step_directory,
)


def example(**changes) -> Manifest:
    fields = {
        "step": 40,
        "micro_step": 0,
        "generation": 2,
        "lineage": [Origin(1, 30)],
        "world_size": 2,
        "saved_at": "2026-01-01T00:00:00+00:00",
        "files": [FileRecord("g0002-rank-00000.safetensors", 4096 + 24, 1 << 20, "0" * 16)],
        "tensors": {"model/w": TensorRecord("float32", [2, 3], [PieceRecord(0, 4096, 4120)])},
        "rank_tensors": [{}, {}],
        "values": {"scheduler": [ValueRecord([(0, 1)], {"last_epoch": 40, "lr": 0.1})]},
    }
    return Manifest(**{**fields, **changes})


def test_a_manifest_is_one_json_object_and_comes_back():
    data = encode(example())
    assert json.loads(data)["body"]["step"] == 40
    assert decode(data, "manifest") == example()


@given(st.data())
def test_any_flipped_bit_is_found(data):
    raw = bytearray(encode(example()))
    index = data.draw(st.integers(0, len(raw) - 1))
    raw[index] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises((DamagedCheckpoint, NewerFormat)):
        decode(bytes(raw), "manifest")


@given(st.data())
def test_a_cut_manifest_is_never_accepted(data):
    raw = encode(example())
    with pytest.raises(DamagedCheckpoint, match="cut or damaged"):
        decode(raw[: data.draw(st.integers(0, len(raw) - 1))], "manifest")


def test_a_newer_format_is_not_damage():
    raw = encode(example()).replace(b'"version":1', b'"version":4')
    with pytest.raises(NewerFormat, match=r"version 4.*upgrade"):
        decode(raw, "manifest")


W = TensorRecord("float32", [2, 3], [PieceRecord(0, 4096, 4120)])
FILE = example().files[0]
BAD = {
    "absolute path": {"files": [FileRecord("/etc/passwd", 4120, 1 << 20, "0" * 16)]},
    "path outside": {"files": [FileRecord("../g0001-rank-00000.safetensors", 4120, 1 << 20, "0" * 16)]},
    "negative size": {"files": [FileRecord(FILE.name, -1, 1 << 20, "")]},
    "zero block length": {"files": [FileRecord(FILE.name, 4120, 0, "")]},
    "missing digests": {"files": [FileRecord(FILE.name, 4120, 1 << 20, "")]},
    "a file twice": {"files": [FILE, FILE]},
    "piece outside the file": {"tensors": {"w": TensorRecord("float32", [2, 3], [PieceRecord(0, 4100, 4124)])}},
    "piece in no file": {"tensors": {"w": TensorRecord("float32", [2, 3], [PieceRecord(1, 4096, 4120)])}},
    "negative file": {"tensors": {"w": TensorRecord("float32", [2, 3], [PieceRecord(-1, 4096, 4120)])}},
    "too few bytes": {"tensors": {"w": TensorRecord("float32", [2, 3], [PieceRecord(0, 4096, 4116)])}},
    "huge shape": {"tensors": {"w": TensorRecord("float32", [2**62, 2**62], [PieceRecord(0, 4096, 4120)])}},
    "negative shape": {"tensors": {"w": TensorRecord("float32", [-2, -3], [PieceRecord(0, 4096, 4120)])}},
    "no such dtype": {"tensors": {"w": TensorRecord("float33", [2, 3], [PieceRecord(0, 4096, 4120)])}},
    "a dtype that is code": {"tensors": {"w": TensorRecord("load", [2, 3], [PieceRecord(0, 4096, 4120)])}},
    "missing piece": {
        "tensors": {"w": TensorRecord("float32", [2, 3], [PieceRecord(0, 4096, 4108, [(0, 1), (0, 3)])])}
    },
    "overlapping pieces": {
        "tensors": {"w": TensorRecord("float32", [2, 3], [PieceRecord(0, 4096, 4108, [(0, 1), (0, 3)])] * 2)}
    },
    "box outside": {"tensors": {"w": TensorRecord("float32", [2, 3], [PieceRecord(0, 4096, 4120, [(1, 3), (0, 3)])])}},
    "box of other dimensions": {
        "tensors": {"w": TensorRecord("float32", [2, 3], [PieceRecord(0, 4096, 4120, [(0, 6)])])}
    },
    "ranks missing": {"rank_tensors": [{}]},
    "no ranks": {"world_size": 0, "rank_tensors": []},
    "negative step": {"step": -1},
    "bad tensor of a rank": {"rank_tensors": [{}, {"w": TensorRecord("float33", [2, 3], [])}]},
}


def cut(order=((0, 0),), mesh=0, shape=(2, 3), pieces=()):
    """A tensor that is described by its cuts."""
    return {"w": TensorRecord("float32", list(shape), list(pieces), CutsRecord(mesh, list(order)))}


MESH = MeshRecord([2], [(0, 1)])
BAD |= {
    "cut by no mesh": {"meshes": [MESH], "tensors": cut(mesh=1)},
    "cut by a negative mesh": {"meshes": [MESH], "tensors": cut(mesh=-1)},
    "cut and pieces besides": {"meshes": [MESH], "tensors": cut(pieces=[PieceRecord(0, 4096, 4120)])},
    "cut along no dimension": {"meshes": [MESH], "tensors": cut(order=[(0, 2)])},
    "cut by no dimension of the mesh": {"meshes": [MESH], "tensors": cut(order=[(1, 0)])},
    "cut twice by one dimension": {"meshes": [MESH], "tensors": cut(order=[(0, 0), (0, 1)])},
    "replicas among cuts": {"meshes": [MESH], "tensors": cut(order=[])},
    "a cut tensor of one rank": {"meshes": [MESH], "rank_tensors": [cut(), {}]},
    "a rank twice in a mesh": {"meshes": [MeshRecord([2], [(0, 0), (0, 0)])], "tensors": cut()},
    "a mesh of ranks that are none": {"meshes": [MeshRecord([2], [(1, 2)])], "tensors": cut()},
    "a mesh backwards": {"meshes": [MeshRecord([2], [(1, 0)])], "tensors": cut()},
    "a mesh of another size": {"meshes": [MeshRecord([2], [(0, 0)])], "tensors": cut()},
    "a huge mesh": {"meshes": [MeshRecord([2**40, 2**40], [(0, 2**62)])], "tensors": cut()},
    "a mesh with a negative length": {"meshes": [MeshRecord([-1, -2], [(0, 1)])], "tensors": cut()},
}


@pytest.mark.parametrize("what", BAD)
def test_a_manifest_that_no_save_writes_is_refused(what):
    data = encode(example(**BAD[what]))
    with pytest.raises(DamagedCheckpoint, match="cannot be used"):
        decode(data, "manifest")


def test_a_manifest_with_cuts_comes_back_in_version_2_and_no_other_version():
    described = example(meshes=[MESH], tensors=cut())
    data = encode(described)
    assert decode(data, "manifest") == described and b'"version":2' in data
    for body, version in ((encode(example()), b"2"), (data, b"1")):
        other = body.replace(b'"version":1' if version == b"2" else b'"version":2', b'"version":' + version, 1)
        with pytest.raises(DamagedCheckpoint):
            decode(other, "manifest")


def test_wrong_types_and_deep_nesting_are_refused():
    for body in (b'{"step":"forty"}', b"[]", b"1", b"[" * 100_000 + b"]" * 100_000):
        with pytest.raises(DamagedCheckpoint):
            decode(seal(body), "manifest") if len(body) < 1000 else decode(body, "manifest")


def test_fields_of_a_later_minor_version_are_ignored():
    body = msgspec.json.decode(msgspec.json.encode(example()))
    body["added_later"] = 1
    assert decode(seal(msgspec.json.encode(body)), "manifest") == example()


@given(st.integers(0, 10**12), st.integers(0, 99))
def test_step_directories_are_numbers_not_text(step, micro_step):
    assert parse_step_directory(step_directory(step, micro_step)) == (step, micro_step)


@pytest.mark.parametrize("name", ["step-040", "step-", "best", "step-4.0", "step--1", "step-1x", "checkpoint-5"])
def test_other_names_are_not_ours(name):
    assert parse_step_directory(name) is None


def test_values_belong_to_the_ranks_that_saved_them():
    manifest = example(values={"s": [ValueRecord([(0, 0), (2, 3)], "a"), ValueRecord([(1, 1)], "b")]})
    assert [manifest.values_of(rank)["s"] for rank in range(4)] == ["a", "b", "a", "a"]
