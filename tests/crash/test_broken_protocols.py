"""The injector can fail: each rule of the save protocol is broken on purpose, and a crash shows it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from crash import stories
from crash.explore import EMPTY, judged
from crash.judge import Judge
from crash.orders import in_order
from unbroken import generations, retention
from unbroken.commit import Coordinator
from unbroken.retention import MANIFEST_NAME
from unbroken.store import local
from unbroken.store.local import LocalStore


def shows(base: Path, story: stories.Story, text: str) -> bool:
    """True if some crash of the story leads to a problem that says `text`. The last moments are tried first."""
    recording = stories.play(story, base / "story", 1)
    moments = list(in_order(recording.trace, recording.since, EMPTY))
    return any(text in problem for problem in judged(reversed(moments), Judge(base / "judge", 1)))


def test_a_protocol_that_is_whole_shows_no_problem(base):
    assert not shows(base, stories.first_save, " ")


def test_without_the_sync_of_a_file_a_committed_checkpoint_is_damaged(base, monkeypatch):
    real = local._write_parts

    def unsynced(fd: int, path: Path, parts: Iterable[memoryview | bytes]) -> None:
        if path.suffix != ".safetensors":
            return real(fd, path, parts)
        for data in parts:
            os.write(fd, data)
        os.close(fd)
        return None

    monkeypatch.setattr(local, "_write_parts", unsynced)
    text = "step-2 is damaged: step-2/g0002-rank-00000.safetensors, bytes 0-4123, do not match their digest"
    assert shows(base, stories.second_save, text)


@pytest.mark.parametrize(
    ("which", "text"),
    [
        ("step-2", "step 2 was committed, but step 1 is the newest"),
        ("small", "step 2 was committed, but step 1 is the newest"),
        ("generations", "a record is damaged: the record of generation 2 is missing"),
    ],
)
def test_without_the_sync_of_a_directory_something_is_lost(base, monkeypatch, which, text):
    """The checkpoint's own, that of the run directory, that of the generations."""
    real = local._sync_directory
    monkeypatch.setattr(local, "_sync_directory", lambda path: None if path.name == which else real(path))
    assert shows(base, stories.second_save, text)


def test_without_the_syncs_above_the_run_directory_all_of_it_is_lost(base, monkeypatch):
    monkeypatch.setattr(LocalStore, "create_root", lambda store: store.root.mkdir(parents=True, exist_ok=True))
    assert shows(base, stories.first_save, "step 1 was committed, but nothing is the newest")


def test_a_manifest_that_is_published_before_the_data_names_files_that_are_not_there(base, monkeypatch):
    monkeypatch.setattr(Coordinator, "_find_files", lambda *_: None)  # which would find that they are not there
    late: list[Callable[[], None]] = []
    create, publish = LocalStore.create_in_parts, LocalStore.publish

    def create_late(store: LocalStore, name: str, parts: Iterable[memoryview | bytes]) -> None:
        kept = [bytes(data) for data in parts]
        late.append(lambda: create(store, name, kept))

    def publish_first(store: LocalStore, name: str, data: bytes) -> None:
        publish(store, name, data)
        while late:
            late.pop()()

    monkeypatch.setattr(LocalStore, "create_in_parts", create_late)
    monkeypatch.setattr(LocalStore, "publish", publish_first)
    assert shows(base, stories.second_save, "step-2 is damaged: step-2/g0002-rank-00000.safetensors is missing")


def test_a_manifest_that_is_written_in_place_is_found_cut(base, monkeypatch):
    monkeypatch.setattr(LocalStore, "publish", LocalStore.create)
    assert shows(base, stories.second_save, "step-2 is damaged: step-2/manifest.json is cut or damaged")


def test_retention_that_deletes_data_before_the_manifest_leaves_a_damaged_checkpoint(base, monkeypatch):
    def data_first(store: LocalStore, kept: retention.Kept) -> list[str]:
        for name in sorted(store.list(kept.directory), key=lambda name: bool(MANIFEST_NAME.fullmatch(name))):
            store.delete(f"{kept.directory}/{name}")
        store.delete_directory(kept.directory)
        return []

    monkeypatch.setattr(retention, "delete_checkpoint", data_first)
    assert shows(base, stories.keeping(1), "step-1 is damaged: step-1/g0001-rank-00000.safetensors is missing")


def test_retention_without_the_sync_between_manifest_and_data_leaves_a_damaged_checkpoint(base, monkeypatch):
    monkeypatch.setattr(LocalStore, "sync", lambda _store, _directory: None)
    assert shows(base, stories.keeping(1), "step-1 is damaged: step-1/g0001-rank-00000.safetensors is missing")


def test_retention_that_deletes_before_the_commit_loses_the_last_good_checkpoint(base, monkeypatch):
    publish = LocalStore.publish

    def delete_first(store: LocalStore, name: str, data: bytes) -> None:
        if name.startswith("step-2/"):
            for kept in retention.look(store, generations.read(store, generations.newest_number(store))).checkpoints:
                retention.delete_checkpoint(store, kept)
        publish(store, name, data)

    monkeypatch.setattr(LocalStore, "publish", delete_first)
    assert shows(base, stories.second_save, "step 1 was committed, but nothing is the newest")


@pytest.mark.parametrize("left", ["generations/.tmp-", "generations/.probe-"])
def test_a_temporary_file_that_nobody_sweeps_is_reported(base, monkeypatch, left):
    """A start of the job that was killed left a probe or a temporary record behind for ever."""
    monkeypatch.setattr(retention, "_leftovers_of_starts", lambda _store, _current: [])
    assert shows(base, stories.first_save, left)
