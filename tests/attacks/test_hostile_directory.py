"""Hostile run directories: every one must be refused or fallen back from, run no code, and touch nothing outside.

Whoever can write the directory can compute our digests, so each attack carries valid ones.
"""

import os
import pickle
import shutil
import sys
from pathlib import Path

import msgspec
import pytest
import torch

import unbroken
from unbroken.errors import NoUsableCheckpoint, UnbrokenError
from unbroken.manifest import seal, unseal

PROOF = Path("/tmp/unbroken-was-exploited")


class Exploit:
    def __reduce__(self):
        return os.system, (f"touch {PROOF}",)


@pytest.fixture
def run(tmp_path):
    """A run with one good checkpoint."""
    path = tmp_path / "run"
    ckpt = unbroken.Checkpointer(path, {"w": torch.arange(4.0), "box": Box()})
    ckpt.restore()
    ckpt.save()
    ckpt.close()
    return path


class Box:
    """Keeps whatever it is given, as a careless object would."""

    def __init__(self):
        self.state = {"value": 1}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def restore(path):
    objects = {"w": torch.zeros(4), "box": Box()}
    unbroken.Checkpointer(path, objects).restore()
    return objects


def edit(path, change):
    """Change the manifest's body and seal it again with a valid digest."""
    manifest = path / "step-0/manifest.json"
    body = msgspec.json.decode(unseal(manifest.read_bytes(), "x"))
    change(body)
    manifest.write_bytes(seal(msgspec.json.encode(body)))


def set_file(name):
    return lambda body: body["files"][0].update(name=name)


def set_tensor(**fields):
    return lambda body: body["tensors"]["w"].update(**fields)


EDITS = {
    "a file by its absolute path": set_file("/etc/passwd"),
    "a file above the directory": set_file("../../secret"),
    "a file in another checkpoint": set_file("../step-1/g0001-rank-00000.safetensors"),
    "a shape that would take all memory": set_tensor(shape=[1 << 50]),
    "a shape whose product overflows": set_tensor(shape=[1 << 40, 1 << 40]),
    "a dtype that is a function": set_tensor(dtype="load"),
    "no pieces": set_tensor(pieces=[]),
    "a piece twice": lambda body: body["tensors"]["w"]["pieces"].extend(body["tensors"]["w"]["pieces"]),
    "a piece beyond the file": lambda body: body["tensors"]["w"]["pieces"][0].update(begin=1 << 40, end=(1 << 40) + 16),
    "a world of a billion ranks": lambda body: body.update(world_size=10**9),
    "numbers as text": lambda body: body.update(step="0"),
}


@pytest.mark.parametrize("attack", EDITS)
def test_an_edited_manifest_is_refused_and_nothing_outside_is_touched(run, tmp_path, attack):
    (tmp_path / "secret").write_bytes(b"s" * 5000)
    edit(run, EDITS[attack])
    with pytest.raises(NoUsableCheckpoint, match="step-0"):
        restore(run)
    assert (tmp_path / "secret").read_bytes() == b"s" * 5000


def test_a_link_in_place_of_a_data_file_is_not_followed(run, tmp_path):
    (file,) = run.glob("step-0/*.safetensors")
    shutil.move(file, tmp_path / "outside")
    file.symlink_to(tmp_path / "outside")
    with pytest.raises(NoUsableCheckpoint, match="is missing"):
        restore(run)


def test_a_link_in_place_of_a_step_directory_is_not_followed(run, tmp_path):
    shutil.move(run / "step-0", tmp_path / "elsewhere")
    (run / "step-0").symlink_to(tmp_path / "elsewhere")
    assert unbroken.Checkpointer(run, {"w": torch.zeros(4), "box": Box()}).restore() is None


def test_a_pickle_in_place_of_a_data_file_is_never_unpickled(run):
    (file,) = run.glob("step-0/*.safetensors")
    file.write_bytes(pickle.dumps(Exploit()).ljust(file.stat().st_size, b"\0"))
    with pytest.raises(NoUsableCheckpoint, match="do not match their digest"):
        restore(run)
    assert not PROOF.exists()


VALUES = {
    "a class that was never imported": {"$": "dataclass", "class": "antigravity:Exploit", "fields": {}},
    "a function": {"$": "dataclass", "class": "os:system", "fields": {"command": f"touch {PROOF}"}},
    "an unknown tag": {"$": "reduce", "class": "os:system", "items": [f"touch {PROOF}"]},
    "a tensor that is not there": {"$": "tensor", "name": "nowhere", "device": "cpu"},
    "deep nesting": b"[" * 5000 + b"]" * 5000,
}


@pytest.mark.parametrize("attack", VALUES)
def test_a_crafted_value_runs_no_code(run, attack):
    def change(body):
        saved = body["values"]["box"][0]["value"]
        (key,) = (key for key, value in saved.items() if value == {"value": 1})
        saved[key] = "@"

    edit(run, change)
    manifest = run / "step-0/manifest.json"
    crafted = VALUES[attack] if isinstance(VALUES[attack], bytes) else msgspec.json.encode(VALUES[attack])
    manifest.write_bytes(seal(unseal(manifest.read_bytes(), "x").replace(b'"@"', crafted)))
    with pytest.raises(UnbrokenError):
        restore(run)
    assert not PROOF.exists()
    assert "antigravity" not in sys.modules


def test_a_generation_record_from_nowhere_is_told(run):
    (run / "generations/0099.json").write_text("{}")
    objects = {"w": torch.zeros(4), "box": Box()}
    restored = unbroken.Checkpointer(run, objects).restore()
    assert restored.step == 0
    assert "generations/0099.json" in str(restored)
