"""Bytes into live tensors by several threads: what is read, in which order damage is told, and that no thread stays."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import unbroken
from unbroken import reading
from unbroken.blocks import DataFile
from unbroken.candidates import candidates, find_tip
from unbroken.errors import DamagedCheckpoint
from unbroken.image.image import Arena
from unbroken.manifest import FileRecord, Manifest
from unbroken.reading import READERS, Target, read_tensors
from unbroken.store.local import LocalStore
from unbroken.writer import Writer

MB = 1 << 20


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A run with one checkpoint of 18 MB: one large tensor, one of middling size, and many small ones."""
    root = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    model = torch.nn.Module()
    model.register_buffer("large", torch.randn(3 * MB))
    model.register_buffer("middle", torch.randn(1000, 1000))
    for index in range(300):
        model.register_buffer(f"small{index}", torch.randn(index))
    with unbroken.Checkpointer(root, {"model": model}) as checkpointer:
        checkpointer.step()
        checkpointer.save()
    return root, {f"model/{name}": buffer for name, buffer in model.named_buffers()}


def newest(root: Path) -> tuple[LocalStore, str, Manifest]:
    store = LocalStore(root)
    found = next(iter(candidates(store, find_tip(store)[0])))
    assert found.manifest is not None, found.problem
    return store, found.directory, found.manifest


def read(root: Path, names: list[str]) -> dict[str, torch.Tensor]:
    store, directory, manifest = newest(root)
    records = {name: manifest.tensors_of(0)[name] for name in names}
    live = {name: torch.full(tuple(record.shape), torch.nan) for name, record in records.items()}
    places = {name: reading.targets_of(tensor, None, 0) for name, tensor in live.items()}
    read_tensors(store, directory, manifest, records, places)
    return live


def test_every_byte_comes_to_its_place(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    root, expected = saved
    for names in (list(expected), ["model/large"], ["model/small7", "model/middle"], ["model/small0"]):
        found = read(root, names)
        assert all(torch.equal(found[name], expected[name]) for name in names)


def test_parts_that_lie_otherwise_in_the_tensor(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    root, expected = saved
    store, directory, manifest = newest(root)
    record = manifest.tensors_of(0)["model/middle"]
    turned = torch.full((1000, 1000), torch.nan).t()
    half = torch.full((500, 300), torch.nan)
    targets = [
        Target(turned, reading.whole((1000, 1000))),
        Target(half, reading.Box((250, 700), (750, 1000))),
    ]
    read_tensors(store, directory, manifest, {"model/middle": record}, {"model/middle": targets})
    assert torch.equal(turned, expected["model/middle"])
    assert torch.equal(half, expected["model/middle"][250:750, 700:])


@pytest.fixture
def damaged(saved: tuple[Path, dict[str, torch.Tensor]], request: pytest.FixtureRequest) -> Iterator[Path]:
    """The same run with a bit flipped in each of some blocks."""
    root, _ = saved
    (path,) = root.glob("step-1/*.safetensors")
    whole = path.read_bytes()
    changed = bytearray(whole)
    for block in request.param:
        changed[block * MB + 12345] ^= 1
    path.write_bytes(changed)
    yield root
    path.write_bytes(whole)


@pytest.mark.parametrize("damaged", [(3, 12), (12, 5, 14), (14,), tuple(range(15))], indirect=True, ids=str)
def test_of_several_damaged_blocks_the_first_is_told_whichever_thread_is_first(
    damaged: Path, request: pytest.FixtureRequest
) -> None:
    first = min(request.node.callspec.params["damaged"]) * MB
    for _ in range(5):
        with pytest.raises(DamagedCheckpoint, match=f"bytes {first}-{first + MB}, do not match"):
            read(damaged, ["model/large", "model/middle"])
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("unbroken-reader")]


def test_what_was_stopped_reads_no_more(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    store, directory, manifest = newest(saved[0])
    live = torch.zeros(3 * MB)
    record = manifest.tensors_of(0)["model/large"]
    (piece,) = record.pieces
    target = Target(live, reading.whole((3 * MB,)))
    runs = list(reading._runs(piece.file, list(reading._wanted(record, piece, target)), manifest.files[piece.file]))
    assert len(runs) >= 12 * MB // reading.RUN_BYTES
    stop = threading.Event()
    stop.set()
    reading._read_stretch(store, directory, manifest, runs, stop)
    assert not live.any()
    stop.clear()
    reading._read_stretch(store, directory, manifest, runs, stop)
    assert torch.equal(live, saved[1]["model/large"])


def test_each_thread_reads_one_stretch_by_a_descriptor_of_its_own(
    saved: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux reads ahead by descriptor: two threads that take turns in one look like random access."""
    begins: dict[int, list[int]] = {}
    real = DataFile.read

    def noting(self: DataFile, landings: list) -> None:
        begins.setdefault(id(self), []).append(landings[0].begin)
        kept.append(self)  # or another would come to have its id
        real(self, landings)

    kept: list[DataFile] = []
    monkeypatch.setattr(DataFile, "read", noting)
    read(saved[0], list(saved[1]))
    stretches = [found for found in begins.values() if found]
    assert 2 <= len(stretches) <= READERS
    assert all(found == sorted(found) for found in stretches)
    spans = sorted((found[0], found[-1]) for found in stretches)
    assert all(last < begin for (_, last), (begin, _) in itertools.pairwise(spans))


@given(st.lists(st.integers(1, 50), min_size=0, max_size=60))
def test_runs_are_dealt_in_order_and_evenly(lengths: list[int]) -> None:
    runs, at = [], 0
    for length in lengths:
        runs.append(reading._Run(0, at, at + length))
        at += length
    dealt = reading._dealt(runs)
    assert [run for stretch in dealt for run in stretch] == runs
    assert len(dealt) <= READERS and all(dealt)
    for stretch in dealt:
        assert sum(run.end - run.begin for run in stretch) <= at / READERS + max(lengths)


@given(st.lists(st.tuples(st.integers(0, 30 * MB), st.integers(1, 3 * MB)), max_size=12))
def test_runs_cover_what_is_wanted_once_and_end_where_blocks_do(spans: list[tuple[int, int]]) -> None:
    wanted, end = [], 0
    for gap, length in spans:
        begin = end + gap
        end = begin + length
        memory = memoryview(bytearray(0))
        wanted.append(reading._Wanted(begin, end, memory, torch.empty(0), ()))
    record = FileRecord("rank-00000.safetensors", end, MB, "")
    runs = list(reading._runs(0, wanted[::-1], record))
    parts = [(item.begin, begin, last) for run in runs for item, begin, last in run.parts]
    for item in wanted:
        own = [(begin, last) for of, begin, last in parts if of == item.begin]
        assert own[0][0] == item.begin and own[-1][1] == item.end
        assert all(last == begin for (_, last), (begin, _) in itertools.pairwise(own))
    blocks = [(run.begin // MB, (run.end - 1) // MB) for run in runs]
    for (_, last), (first, _) in itertools.pairwise(blocks):
        assert last < first, "a block is read once"
    assert all(run.end - run.begin <= reading.RUN_BYTES for run in runs)


def test_the_first_save_after_a_restore_finds_its_memory_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages are touched while training goes on, not while the loop waits; and not for who only looks."""
    reserved: list[tuple[str, int]] = []
    ready = threading.Event()
    real = Arena.reserve

    def noting(self: Arena, size: int) -> None:
        before = 0 if self._memory is None else len(self._memory)
        real(self, size)
        if size > before:
            reserved.append((threading.current_thread().name, size))
            ready.set()

    model = torch.nn.Linear(300, 300)
    with unbroken.Checkpointer(tmp_path, {"model": model}) as checkpointer:
        checkpointer.step()
        checkpointer.save()
    (path,) = tmp_path.glob("step-1/*.safetensors")
    monkeypatch.setattr(Arena, "reserve", noting)
    with unbroken.Checkpointer(tmp_path, {"model": model}) as checkpointer:
        assert checkpointer.restore() is not None
        assert not reserved, "it may have been restored to be evaluated"
        checkpointer.step()
        assert ready.wait(20)
        ((thread, size),) = reserved
        assert thread == "unbroken-writer" and path.stat().st_size <= size < path.stat().st_size + 3 * MB
        checkpointer.save()
        checkpointer.wait()
        assert all(thread == "unbroken-writer" for thread, _ in reserved)


def test_what_a_save_has_needed_is_not_estimated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An arena that grows is for a moment there twice."""
    expected: list[int] = []
    monkeypatch.setattr(Writer, "expect", lambda self, size: expected.append(size))
    with unbroken.Checkpointer(tmp_path, {"model": torch.nn.Linear(3, 3)}) as checkpointer:
        for _ in range(2):
            checkpointer.step()
            checkpointer.save()
        assert not expected
    with unbroken.Checkpointer(tmp_path, {"model": torch.nn.Linear(3, 3)}) as checkpointer:
        checkpointer.restore()
        for _ in range(3):
            checkpointer.step()
        assert len(expected) == 1


def test_memory_is_reserved_for_what_will_be_copied_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen weights never are, and replaced tensors are not held until a save comes."""
    expected: list[int] = []
    monkeypatch.setattr(Writer, "expect", lambda self, size: expected.append(size))
    model = torch.nn.Sequential(torch.nn.Linear(2000, 2000), torch.nn.Linear(3, 3))
    model[0].requires_grad_(False)
    model.register_buffer("replaced", torch.zeros(5))
    with unbroken.Checkpointer(tmp_path, {"model": model}) as checkpointer:
        checkpointer.restore()
        replaced = weakref.ref(model.replaced)
        checkpointer.step()
        model.replaced = torch.ones(5)
        assert replaced() is None
    assert expected and expected[0] < 3 * MB


class Raising(torch.nn.Module):
    """A model that cannot be looked at."""

    broken = False

    def modules(self) -> Iterator[torch.nn.Module]:
        if self.broken:
            raise RuntimeError("not today")
        return super().modules()


def test_what_cannot_be_looked_at_is_told_by_the_save_not_by_the_step(tmp_path: Path) -> None:
    model = Raising()
    checkpointer = unbroken.Checkpointer(tmp_path, {"model": model})
    checkpointer.restore()
    model.broken = True
    checkpointer.step()
    assert checkpointer.global_step == 1
    with pytest.raises(RuntimeError, match="not today"):
        checkpointer.save()
    model.broken = False
    checkpointer.close()


def test_a_writer_that_cannot_reserve_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = threading.Event()
    real = Arena.reserve

    def failing(self: Arena, size: int) -> None:
        if not tried.is_set():
            tried.set()
            raise OverflowError("too large")
        real(self, size)

    monkeypatch.setattr(Arena, "reserve", failing)
    with unbroken.Checkpointer(tmp_path, {"model": torch.nn.Linear(3, 3)}, on_error="raise") as checkpointer:
        checkpointer.restore()
        checkpointer.step()
        assert tried.wait(20)
        checkpointer.save()
        checkpointer.wait()
    assert newest(tmp_path)[2].step == 1
