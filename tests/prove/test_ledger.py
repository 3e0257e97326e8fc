"""Reading ledgers: what killed processes leave, and what grows while it is read."""

import json
import os

import pytest

from unbroken.errors import UnbrokenError
from unbroken.prove.ledger import Progress, last_step, read_ledger


def write(directory, name, *steps, rank=0, torn=""):
    path = directory / f"{name}.jsonl"
    with path.open("a") as file:
        file.writelines(json.dumps({"step": step, "rank": rank, "world": 2}) + "\n" for step in steps)
        file.write(torn)
    return path


def test_a_torn_last_line_is_dropped(tmp_path):
    write(tmp_path, "a", 1, 2, torn='{"step": 3, "rank": 0, "wor')
    assert sorted(read_ledger(tmp_path)) == [(1, 0), (2, 0)]


def test_a_whole_last_line_that_is_only_without_its_newline_is_dropped_too(tmp_path):
    """It could be the beginning of `"step": 31`."""
    write(tmp_path, "a", 1, torn='{"step": 3, "rank": 0, "world": 2}')
    assert sorted(read_ledger(tmp_path)) == [(1, 0)]


def test_a_damaged_line_within_a_file_is_named(tmp_path):
    path = write(tmp_path, "a", 1)
    path.write_text(path.read_text() + "nonsense\n" + path.read_text())
    with pytest.raises(UnbrokenError, match=r"a\.jsonl, line 2, is no line of a ledger"):
        read_ledger(tmp_path)


def test_a_step_that_was_done_twice_has_its_lines_in_order_of_time(tmp_path):
    """By the files' times, not their names: another writer may number its starts otherwise."""
    first, second = tmp_path / "z.jsonl", tmp_path / "a.jsonl"
    for path, loss in ((first, "0x1p+0"), (second, "0x1p+1")):
        path.write_text(json.dumps({"step": 7, "rank": 1, "world": 2, "loss": loss}) + "\n")
    os.utime(first, ns=(0, 1_000))
    os.utime(second, ns=(0, 2_000))
    assert [line.loss for line in read_ledger(tmp_path)[7, 1]] == ["0x1p+0", "0x1p+1"]


def test_an_empty_directory_is_an_empty_ledger(tmp_path):
    assert read_ledger(tmp_path) == {}
    assert last_step({}) == 0


def test_progress_counts_the_highest_step_of_any_rank(tmp_path):
    progress = Progress(tmp_path)
    assert progress.look() is None
    write(tmp_path, "a", 4, 5)
    write(tmp_path, "b", 4, rank=1)
    assert progress.look() == 5
    write(tmp_path, "b", 5, 6, rank=1)
    assert progress.look() == 6
    assert progress.first == 4


def test_progress_waits_for_the_end_of_a_line(tmp_path):
    progress = Progress(tmp_path)
    path = write(tmp_path, "a", 1, torn='{"step": 2, "rank": 0,')
    assert progress.look() == 1
    with path.open("a") as file:
        file.write(' "world": 2}\n')
    assert progress.look() == 2


def test_progress_does_not_count_files_of_an_earlier_start(tmp_path):
    write(tmp_path, "a", 1, 2, 3)
    progress = Progress(tmp_path)
    write(tmp_path, "b", 1)
    assert progress.look() == 1
