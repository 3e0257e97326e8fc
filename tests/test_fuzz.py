"""A thousand damaged run directories: each is found by `verify`, and none restores a wrong value.

Faults: bytes that change, files cut, extended, removed, exchanged; in data, manifests, moved-aside manifests and
generation records. What a start then does must also be what `verify` said it would do.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from two_rank_run import WORLD, make_run, restore
from unbroken.errors import UnbrokenError
from unbroken.store.local import LocalStore
from unbroken.verification import Report, verify_run

TRIES = range(250)
ALL_TRIES = range(1000)
FAULTS = (1, 1, 1, 2, 3, 40)
"""Files that are damaged in one try, at most; the largest leaves hardly anything whole."""

Files = dict[Path, bytes]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    place = tmp_path_factory.mktemp("fuzz")
    saved = make_run(place / "run")
    (place / "outside").write_bytes(b"not ours")
    return place / "run", saved


def change(rng: random.Random, data: bytes, _: bytes) -> bytes:
    """A few bytes at random places, or a stretch of them, each different from before."""
    changed = bytearray(data)
    begin, count = rng.randrange(len(data)), rng.choice([1, 1, 2, 100])
    for index in range(begin, min(begin + count, len(data))):
        changed[index] ^= rng.randrange(1, 256)
    return bytes(changed)


def cut(rng: random.Random, data: bytes, _: bytes) -> bytes:
    return data[: rng.choice([0, len(data) - 1, rng.randrange(len(data))])]


def extend(rng: random.Random, data: bytes, _: bytes) -> bytes:
    return data + rng.choice([b" ", b"\n", b"\0" * 4096, rng.randbytes(rng.randrange(1, 5000))])


def exchange(_: random.Random, __: bytes, other: bytes) -> bytes:
    return other


DAMAGE: list[Callable[[random.Random, bytes, bytes], bytes]] = [change, change, cut, extend]


def damage(rng: random.Random, pristine: Files) -> dict[Path, bytes | None]:
    """New contents of a few files; None for a removed one."""
    # Kinds of files weigh the same, however many there are of each and however large they are.
    kinds: dict[str, list[Path]] = {}
    for path in pristine:
        kinds.setdefault(path.parent.name if path.parent.name == "generations" else path.name[:9], []).append(path)
    damaged: dict[Path, bytes | None] = {}
    for _ in range(rng.choice(FAULTS)):
        path = rng.choice(kinds[rng.choice(sorted(kinds))])
        other = rng.choice([candidate for candidate in pristine if pristine[candidate] != pristine[path]])
        if damaged.keys() & {path, other}:
            continue
        act = rng.randrange(len(DAMAGE) + 2)
        if act < len(DAMAGE):
            damaged[path] = DAMAGE[act](rng, pristine[path], pristine[other])
        elif act == len(DAMAGE):
            damaged[path] = None
        else:
            damaged[path], damaged[other] = pristine[other], pristine[path]
    return damaged


def put(path: Path, data: bytes | None) -> None:
    path.unlink(missing_ok=True)
    if data is not None:
        path.write_bytes(data)


def found(report: Report) -> bool:
    """A removed manifest leaves what a save that never finished leaves: that is mentioned, and is no fault."""
    return bool(report.faults or report.unfinished or report.leftovers)


def test_the_undamaged_run_has_no_fault_and_restores_its_newest(run):
    root, saved = run
    report = verify_run(LocalStore(root), lambda count: None)
    assert not found(report)
    assert [c.place.name for c in report.checkpoints].count("manifest.g0001.json") == 1
    assert len(list(root.rglob("*.safetensors"))) == WORLD * len(saved)
    recovered, held = restore(root)
    assert (recovered.manifest.generation, recovered.manifest.step) == (3, 5)
    assert held == saved[3, 5]


@pytest.mark.parametrize("tries", [TRIES, pytest.param(ALL_TRIES, marks=pytest.mark.slow)], ids=len)
def test_damaged_runs_are_found_and_none_restores_a_wrong_value(run, caplog, tries):
    caplog.set_level(logging.CRITICAL)  # each candidate that is passed over is a warning
    root, saved = run
    pristine = {path: path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}
    ends: dict[str, int] = {}
    for number in tries:
        damaged = damage(random.Random(number), pristine)
        assert all(data != pristine[path] for path, data in damaged.items())
        for path, data in damaged.items():
            put(path, data)
        what = f"try {number}: {[(str(path.relative_to(root)), data and len(data)) for path, data in damaged.items()]}"
        report = verify_run(LocalStore(root), lambda count: None)
        assert found(report), what
        end = judge(restore(root), report, saved, what)
        ends[end] = ends.get(end, 0) + 1
        for path in damaged:
            put(path, pristine[path])
    assert all(ends.get(end, 0) > 10 for end in ("newest", "fallback", "refusal")), ends
    assert {path: path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()} == pristine
    assert {path.name for path in root.parent.iterdir()} == {"outside", "run"}
    assert (root.parent / "outside").read_bytes() == b"not ours"


def judge(result, report: Report, saved, what: str) -> str:
    """How a restore ended; fails if it was not what it must be, or not what `verify` foretold."""
    if isinstance(result, Exception):
        assert isinstance(result, UnbrokenError), (what, result)
        assert report.refusal, (what, result)
        return "refusal"
    recovered, held = result
    manifest = recovered.manifest
    assert manifest is not None, f"{what}: checkpoints exist, and the start was a fresh one"
    assert held == saved[manifest.generation, manifest.step], what
    assert report.restores is not None and report.restores.manifest == manifest, (what, report.refusal)
    return "newest" if manifest.step == 5 else "fallback"
