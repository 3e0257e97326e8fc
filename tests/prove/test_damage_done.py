"""The damage a proof does must be damage: to the newest checkpoint, and really a change."""

import random

import pytest

from toy import run_to
from unbroken.prove.damage import committed, damage


def contents(root):
    return {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", ["bit-flip", "truncate"])
def test_one_file_of_the_newest_checkpoint_changes(tmp_path, kind, seed):
    run_to(tmp_path, 10)
    before = contents(tmp_path)
    how = damage(tmp_path, kind, random.Random(seed))
    changed = {path for path, data in contents(tmp_path).items() if data != before[path]}
    assert len(changed) == 1
    (path,) = changed
    assert path.parts[0] == "step-10", "9 comes after 10 in the order of names"
    assert str(path) in how
    length = len(contents(tmp_path)[path])
    assert length == len(before[path]) if kind == "bit-flip" else length < len(before[path])


def test_checkpoints_are_counted_once_committed(tmp_path):
    assert committed(tmp_path) is None
    run_to(tmp_path, 3)
    assert committed(tmp_path) == 3
    (tmp_path / "step-2/manifest.json").unlink()
    assert committed(tmp_path) == 2


def test_where_nothing_lies_there_is_nothing_to_damage(tmp_path):
    (tmp_path / "final.txt").write_text("final f00d")
    assert damage(tmp_path, "bit-flip", random.Random(0)) is None


def test_another_tools_newest_file_is_damaged(tmp_path):
    (tmp_path / "old.pt").write_bytes(b"old")
    (tmp_path / "new").mkdir()
    (tmp_path / "new/model.pt").write_bytes(bytes(1000))
    assert "new/model.pt" in damage(tmp_path, "truncate", random.Random(0))
