import threading

import pytest

from test_manifest import example
from unbroken.errors import DamagedCheckpoint
from unbroken.generations import begin, newest_number, read, read_newest
from unbroken.manifest import Origin
from unbroken.store.local import LocalStore


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path)


def test_numbers_count_up_and_the_lineage_grows(store):
    first = begin(store, None, world_size=4)
    second = begin(store, example(generation=1, step=40, lineage=[]), world_size=4)
    third = begin(store, example(generation=2, step=50, lineage=second.lineage), world_size=2)
    assert [first.number, second.number, third.number] == [1, 2, 3]
    assert third.lineage == [Origin(2, 50), Origin(1, 40)]
    assert read(store, 3) == third
    assert read_newest(store) == (third, [])


def test_starts_that_race_get_numbers_of_their_own(store):
    numbers = []
    go = threading.Barrier(6)

    def start():
        go.wait()
        numbers.append(begin(store, None, 1).number)

    threads = [threading.Thread(target=start) for _ in range(6)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert sorted(numbers) == [1, 2, 3, 4, 5, 6]


def test_only_what_came_before_the_branch_is_on_the_lineage(store):
    begin(store, None, 1)
    second = begin(store, example(generation=1, step=40, lineage=[]), 1)
    assert second.reaches(Origin(1, 40))
    assert second.reaches(Origin(1, 10))
    assert second.reaches(Origin(2, 999))
    assert not second.reaches(Origin(1, 41)), "the old process went on after we had left its history"
    assert not second.reaches(Origin(1, 40, 1))
    assert not second.reaches(Origin(3, 1))


def test_a_damaged_record_is_told_and_the_one_before_counts(store):
    first = begin(store, None, 1)
    begin(store, None, 1)
    path = store.root / "generations/0002.json"
    path.write_bytes(path.read_bytes()[:-20])
    tip, damaged = read_newest(store)
    assert tip == first
    assert len(damaged) == 1
    assert "generations/0002.json" in damaged[0]
    assert newest_number(store) == 2, "a damaged number is still taken"
    assert begin(store, None, 1).number == 3


def test_a_record_under_another_number_is_refused(store):
    begin(store, None, 1)
    (store.root / "generations/0001.json").rename(store.root / "generations/0007.json")
    with pytest.raises(DamagedCheckpoint, match="says it is generation 1"):
        read(store, 7)
