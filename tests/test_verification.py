"""What `verify_run` finds, and what it says a start would do. `test_fuzz.py` tries it at random."""

from __future__ import annotations

import json
import shutil

import msgspec
import pytest

from two_rank_run import make_run, restore
from unbroken import generations, verification
from unbroken.manifest import decode, encode, seal, unseal
from unbroken.store.local import LocalStore
from unbroken.verification import Fault, Report, bytes_to_read, verify_run


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("made") / "run"
    make_run(path)
    return path


@pytest.fixture
def run(made, tmp_path):
    return shutil.copytree(made, tmp_path / "run")


def verify(run, step=None) -> Report:
    return verify_run(LocalStore(run), lambda count: None, step)


def flip(path, index):
    data = bytearray(path.read_bytes())
    data[index] ^= 0x40
    path.write_bytes(data)


def manifest_of(run, step, name="manifest.json"):
    return decode((run / f"step-{step}" / name).read_bytes(), "")


def reseal(path, change):
    body = msgspec.json.decode(unseal(path.read_bytes(), ""))
    change(body)
    path.write_bytes(seal(msgspec.json.encode(body)))


def rebuild_header(run, step, change):
    """Change the header of rank 0's file, and the digests with it: whoever can write can compute them."""
    file = run / f"step-{step}/g0003-rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    room = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + room])
    change(header)
    data[8 : 8 + room] = json.dumps(header, separators=(",", ":")).encode().ljust(room)
    file.write_bytes(data)
    blocks = "".join(
        verification.xxhash.xxh3_64_hexdigest(data[at : at + (1 << 20)]) for at in range(0, len(data), 1 << 20)
    )
    reseal(run / f"step-{step}/manifest.json", lambda body: body["files"][0].update(blocks=blocks))


def test_a_flipped_bit_is_told_by_file_bytes_and_the_tensors_that_lie_there(run):
    piece = manifest_of(run, 5).tensors["moment"].pieces[0]
    file = manifest_of(run, 5).files[piece.file]
    flip(run / "step-5" / file.name, piece.begin + 1)
    report = verify(run)
    (fault,) = report.faults
    assert (fault.file, fault.begin, fault.end) == (f"step-5/{file.name}", 0, file.size)
    assert "moment" in fault.tensors
    assert str(fault) == f"step-5/{file.name}, bytes 0-{file.size}, do not match their digest"


def test_every_fault_is_listed_not_the_first_only(run):
    for name in ("step-5/g0003-rank-00000.safetensors", "step-5/g0003-rank-00001.safetensors"):
        flip(run / name, -1)
    (run / "step-4/g0002-rank-00001.safetensors").unlink()
    (run / "step-3/manifest.g0001.json").write_bytes(b"{}")
    file = run / "step-2/g0001-rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    flip(run / "generations/0002.json", 70)
    report = verify(run)
    assert {fault.file for fault in report.faults} == {
        "step-5/g0003-rank-00000.safetensors",
        "step-5/g0003-rank-00001.safetensors",
        "step-4/g0002-rank-00001.safetensors",
        "step-3/manifest.g0001.json",
        "step-2/g0001-rank-00000.safetensors",
        "generations/0002.json",
    }
    problems = {fault.file: fault.problem for fault in report.faults}
    assert problems["step-4/g0002-rank-00001.safetensors"] == "is missing"
    assert "bytes instead of" in problems["step-2/g0001-rank-00000.safetensors"]
    assert report.restores is not None and report.restores.place.path == "step-3/manifest.json"


def test_only_the_bad_blocks_of_a_file_are_named_neighbours_together(run):
    """Smaller blocks than a save uses, so that a small file has many of them."""
    file = run / "step-5/g0003-rank-00000.safetensors"
    data = file.read_bytes()
    blocks = "".join(verification.xxhash.xxh3_64_hexdigest(data[at : at + 4096]) for at in range(0, len(data), 4096))
    reseal(run / "step-5/manifest.json", lambda body: body["files"][0].update(blocks=blocks, block_bytes=4096))
    assert not verify(run).faults
    for index in (5000, 9000, 30000):
        flip(file, index)
    assert [(fault.begin, fault.end) for fault in verify(run).faults] == [(4096, 12288), (28672, 32768)]


def test_blocks_larger_than_what_is_read_at_once_are_digested_as_they_come(run, monkeypatch):
    monkeypatch.setattr(verification, "CHUNK_BYTES", 1000)
    assert not verify(run).faults
    flip(run / "step-5/g0003-rank-00000.safetensors", 123_456)
    assert len(verify(run).faults) == 1


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda header: header["moment"].update(dtype="F16"), "another dtype of moment"),
        (lambda header: header["moment"].update(shape=[7, 1]), "another shape of moment"),
        (lambda header: header["moment"].update(data_offsets=[0, 14]), "another data_offsets of moment"),
        (lambda header: header.update(more=header.pop("moment")), "has no tensor moment in its header"),
    ],
)
def test_a_header_that_contradicts_the_manifest_is_a_fault_that_no_restore_minds(run, change, problem):
    rank = manifest_of(run, 5).tensors["moment"].pieces[0].file
    assert rank == 0, "the small tensor lies in the first file"
    rebuild_header(run, 5, change)
    report = verify(run)
    assert any(problem in fault.problem for fault in report.faults), report.faults
    assert report.restores is not None and report.restores.place.step == 5
    recovered, _ = restore(run)
    assert recovered.manifest.step == 5


def test_a_lost_record_is_found_in_the_middle_and_by_what_its_generation_saved(run):
    (run / "generations/0002.json").unlink()
    (run / "generations/0003.json").unlink()
    assert [str(fault) for fault in verify(run).faults] == [
        "generations/0002.json is missing",
        "generations/0003.json is missing",
    ]


def test_exchanged_manifests_of_one_step_are_found(run):
    one, other = run / "step-3/manifest.json", run / "step-3/manifest.g0001.json"
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)
    (fault,) = verify(run).faults
    assert str(fault) == "step-3/manifest.g0001.json is the manifest of generation 2; were files exchanged?"


def test_another_world_size_than_the_generation_recorded_is_a_fault(run):
    reseal(run / "generations/0003.json", lambda body: body.update(world_size=3))
    (fault,) = verify(run).faults
    assert "says 2 ranks, and the record of its generation 3" in str(fault)


def test_a_save_that_never_committed_is_mentioned_and_is_no_fault(run):
    (run / "step-5/manifest.json").unlink()
    (run / "step-3/g0001-rank-00000-1.safetensors").write_bytes(b"a failed try")
    report = verify(run)
    assert not report.faults
    assert report.unfinished == ["step-5"]
    assert report.leftovers == ["step-3/g0001-rank-00000-1.safetensors"]
    assert report.restores is not None and report.restores.place.step == 4


def test_a_checkpoint_that_retention_deletes_meanwhile_is_no_fault(run):
    store = LocalStore(run)

    def progress(count):
        shutil.rmtree(run / "step-5", ignore_errors=True)

    report = verify_run(store, progress)
    assert not report.faults
    assert [checkpoint.place.step for checkpoint in report.checkpoints] == [4, 3, 3, 2, 1]


def test_an_abandoned_checkpoint_is_read_too_and_never_foretold(run):
    for step in (5, 4, 3):
        for file in (run / f"step-{step}").glob("g000[23]*"):
            file.unlink()
    report = verify(run)
    assert {c.place.path: c.usable for c in report.checkpoints}["step-3/manifest.g0001.json"]
    assert report.restores is not None and report.restores.place.step == 2
    assert restore(run)[0].manifest.step == 2


def test_when_nothing_is_whole_a_start_would_refuse(run):
    for file in run.glob("step-*/*.safetensors"):
        file.unlink()
    report = verify(run)
    assert report.restores is None
    assert report.refusal == "no checkpoint of the current history is whole"


def test_a_newer_format_is_told_among_the_faults_and_stops_a_start(run):
    path = run / "step-5/manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"version":1', b'"version":4', 1))
    report = verify(run)
    assert [fault.file for fault in report.faults] == ["step-5/manifest.json"]
    assert "written by a newer unbroken" in report.refusal


def test_one_step_alone_can_be_verified(run):
    flip(run / "step-5/g0003-rank-00000.safetensors", -1)
    assert not verify(run, "4").faults
    assert len(verify(run, "5").faults) == 1


def test_progress_comes_to_the_bytes_that_were_announced_but_for_manifests(run):
    seen = []
    verify_run(LocalStore(run), seen.append)
    data = sum(file.stat().st_size for file in run.glob("step-*/*.safetensors"))
    assert sum(seen) == data < bytes_to_read(LocalStore(run)) < 1.1 * data


def test_a_fault_of_a_whole_file_names_no_bytes():
    assert str(Fault("step-1/x", "is missing")) == "step-1/x is missing"


def test_a_rolled_back_run_foretells_the_older_checkpoint(run):
    manifest = manifest_of(run, 2)
    generations.begin(LocalStore(run), manifest, 2)
    report = verify(run)
    assert not report.faults
    assert report.generation == 4
    assert report.restores is not None and report.restores.place.step == 2
    assert encode(manifest)  # the manifest itself is untouched
