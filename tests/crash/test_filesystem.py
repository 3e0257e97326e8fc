"""The model of a crash, on examples that can be counted by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crash.explore import every_cut, few_cuts
from crash.filesystem import BLOCK, File, FileSystem, survivors
from crash.orders import Moment, in_any_order
from crash.recorder import Call, Event, Message, Promise, Quiet


def after(*calls: Call) -> FileSystem:
    system = FileSystem()
    for number, call in enumerate(calls, 1):
        system.apply(call, number)
    return system


def crashes(*calls: Call, cuts=every_cut) -> set[frozenset]:
    return {frozenset(tree.items()) for tree in after(*calls).crashes(cuts)}


def trees(*found: dict) -> set[frozenset]:
    return {frozenset(tree.items()) for tree in found}


CREATE, WRITE = Call("create", "a"), Call("write", "a", data=b"xy")
SYNC, SYNC_NAMES = Call("sync", "a"), Call("sync", ".")


def test_a_new_file_may_be_lost_empty_torn_or_filled_with_foreign_bytes():
    contents = [b"", b"x", b"xy", b"\0\0", b"\xa5\xa5"]
    assert crashes(CREATE, WRITE) == trees({}, *({"a": content} for content in contents))


def test_a_synced_file_may_still_lose_its_name():
    assert crashes(CREATE, WRITE, SYNC) == trees({}, {"a": b"xy"})


def test_a_synced_name_may_still_lead_to_nothing():
    assert crashes(CREATE, SYNC_NAMES, WRITE) == trees(*({"a": c} for c in [b"", b"x", b"xy", b"\0\0", b"\xa5\xa5"]))


def test_what_is_synced_both_ways_is_there():
    assert crashes(CREATE, WRITE, SYNC, SYNC_NAMES) == trees({"a": b"xy"})


def test_names_survive_in_any_subset():
    two = crashes(CREATE, SYNC, Call("create", "b"), Call("sync", "b"))
    assert two == trees({}, {"a": b""}, {"b": b""}, {"a": b"", "b": b""})


def test_a_removal_may_be_lost_and_so_may_what_came_before_it():
    assert crashes(CREATE, SYNC_NAMES, Call("unlink", "a")) == trees({}, {"a": b""})
    assert crashes(CREATE, Call("unlink", "a")) == trees({}, {"a": b""})


def test_a_rename_is_one_change_but_a_link_and_a_removal_are_two():
    before = (CREATE, WRITE, SYNC, SYNC_NAMES)
    assert crashes(*before, Call("rename", "a", "b")) == trees({"a": b"xy"}, {"b": b"xy"})
    linked = crashes(*before, Call("link", "a", "b"), Call("unlink", "a"))
    assert linked == trees({}, {"a": b"xy"}, {"b": b"xy"}, {"a": b"xy", "b": b"xy"})


def test_a_rename_may_survive_without_the_bytes():
    assert frozenset({"b": b""}.items()) in crashes(CREATE, WRITE, Call("rename", "a", "b"))


def test_a_lost_directory_loses_what_was_synced_in_it():
    inside = (Call("mkdir", "d"), Call("create", "d/a"), Call("sync", "d/a"), Call("sync", "d"))
    assert crashes(*inside) == trees({}, {"d": None, "d/a": b""})
    assert crashes(*inside, SYNC_NAMES) == trees({"d": None, "d/a": b""})


@pytest.mark.parametrize(
    "calls",
    [
        [CREATE, CREATE],
        [Call("write", "a", data=b"x")],
        [Call("create", "d/a")],
        [Call("mkdir", "d"), Call("create", "d/a"), Call("rmdir", "d")],
        [CREATE, Call("create", "b"), Call("link", "a", "b")],
    ],
)
def test_a_call_that_would_fail_is_not_applied(calls):
    with pytest.raises(LookupError):
        after(*calls)


@given(st.binary(max_size=3 * BLOCK), st.binary(max_size=3 * BLOCK))
def test_what_is_durable_survives_and_so_does_every_prefix(durable, data):
    system = FileSystem({5: File(durable)}, {0: {}})
    assert list(survivors(system.files[5], every_cut)) == [durable]
    later = after(CREATE, Call("write", "a", data=durable), SYNC, Call("write", "a", offset=len(durable), data=data))
    found = set(survivors(later.files[1], every_cut))
    assert {durable + data[:cut] for cut in few_cuts(len(data))} <= found
    assert all(content.startswith(durable) for content in found)


def test_independent_calls_are_tried_in_every_order_and_dependent_ones_are_not():
    trace = [
        Event("training", Call("mkdir", "d")),
        Event("training", Quiet()),
        Event("one", Call("create", "d/a")),
        Event("two", Call("create", "d/b")),
        Event("two", Message("vote", sent=True)),
        Event("one", Message("vote", sent=False)),
        Event("one", Call("unlink", "d/b")),
        Event("one", Promise(1)),
    ]
    found = {tuple(sorted(moment.system.now())) for moment in in_any_order(trace, 2, Moment(FileSystem(), None))}
    assert found == {("d",), ("d", "d/a"), ("d", "d/b"), ("d", "d/a", "d/b")}
    promised = [m.system.now() for m in in_any_order(trace, 2, Moment(FileSystem(), None)) if m.promised == 1]
    assert promised == [{"d": None, "d/a": b""}]
