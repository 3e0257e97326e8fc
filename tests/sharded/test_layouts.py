"""From any parallel layout to any other: every value is equal bit for bit, and each rank reads its part only."""

import json
import shutil
from typing import NamedTuple

import msgspec
import pytest

import independent_reader
import unbroken
from sharded.models import make_job
from unbroken import planning
from unbroken.candidates import candidates
from unbroken.errors import DamagedCheckpoint
from unbroken.image.digest import digest_blocks
from unbroken.layout.boxes import whole
from unbroken.manifest import FileRecord, encode
from unbroken.pieces import Pieces
from unbroken.store.local import LocalStore
from unbroken.verification import verify_run


class Source(NamedTuple):
    """How a checkpoint was saved."""

    layout: str
    world_size: int
    most_pieces: int = planning.MOST_PIECES
    """A tensor in more pieces is described by its cuts."""


SAVED = [
    Source("ddp", 4),
    Source("fsdp2", 4),
    Source("fsdp2", 4, most_pieces=1),
    Source("hsdp", 4),
    Source("hsdp", 4, most_pieces=1),
    Source("two_dimensional", 4),
    Source("two_dimensional", 4, most_pieces=1),
    Source("fsdp1", 4),
    Source("hybrid_fsdp1", 4),
    Source("fsdp1_flat", 4),
    Source("hybrid_fsdp1_flat", 4),
    Source("whole_fsdp1_flat", 2),
    Source("single", 1),
]
RESTORED = [(layout, world_size) for layout, world_size, most in SAVED if most > 1]
RESTORED += [("fsdp2", 3), ("fsdp2", 2), ("fsdp1", 3), ("fsdp1_flat", 3), ("two_dimensional", 2)]


def save(rank, world_size, directory, layout, most_pieces=planning.MOST_PIECES):
    """Two steps, a checkpoint, and what it must hold."""
    job = make_job(layout, seed=1)
    with pytest.MonkeyPatch.context() as patch, unbroken.Checkpointer(directory, job.state, on_error="raise") as ckpt:
        patch.setattr(planning, "MOST_PIECES", most_pieces)
        for seed in (0, 1):
            job.step(seed)
            ckpt.step()
        ckpt.save()
    return job.content()


def restore(rank, world_size, directory, layout):
    """What other objects hold after a restore, and whether they go on training."""
    job = make_job(layout, seed=2)
    with unbroken.Checkpointer(directory, job.state) as ckpt:
        assert ckpt.restore().step == 2
        content = job.content()
        job.step(2)
    return content


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """Checkpoints by layout, with the values that they hold."""
    found = {}
    for source in SAVED:
        directory = tmp_path_factory.mktemp(source.layout) / "run"
        arguments = (str(directory), source.layout, source.most_pieces)
        results = ranks.run_all_well("sharded.test_layouts:save", source.world_size, *arguments)
        assert all(result == results[0] for result in results)
        found[source] = directory, results[0]
    return found


@pytest.mark.parametrize(("layout", "world_size"), RESTORED)
def test_a_checkpoint_of_any_layout_restores_into_this_one(ranks, saved, tmp_path, layout, world_size):
    for source, (directory, content) in saved.items():
        copy = shutil.copytree(directory, tmp_path / f"{source.layout}-{source.most_pieces}")
        results = ranks.run_all_well("sharded.test_layouts:restore", world_size, str(copy), layout)
        for result in results:
            common = content.keys() & result.keys()
            some = any(each.endswith("fsdp1") for each in (layout, source.layout))
            assert common == content.keys() or some, "of FSDP1 with its original parameters only weights are gathered"
            assert [name for name in common if content[name] != result[name]] == [], f"{source} -> {layout}"


def test_both_ways_to_describe_pieces_were_tried(saved):
    versions = {source: json.loads((path / "step-2/manifest.json").read_bytes()) for source, (path, _) in saved.items()}
    assert {source.most_pieces: text["version"] for source, text in versions.items() if source.layout == "fsdp2"} == {
        planning.MOST_PIECES: 1,
        1: 2,
    }


def test_a_reader_that_knows_only_the_page_about_the_format_gets_every_number(saved):
    for source, (directory, content) in saved.items():
        tensors, _ = independent_reader.read(independent_reader.newest(directory), 0)
        stored = {
            name.removeprefix("model/").removeprefix("optimizer/state/"): value for name, value in tensors.items()
        }
        known = content.keys() & stored.keys()
        assert len(known) >= 7, f"{source}: the weights"
        assert {name: stored[name].tobytes() for name in known} == {name: content[name] for name in known}


def test_verify_finds_nothing_wrong_and_a_damaged_byte_of_any_part_of_a_file(saved, tmp_path):
    for source, (directory, _) in saved.items():
        copy = shutil.copytree(directory, tmp_path / f"{source.layout}-{source.most_pieces}")
        report = verify_run(LocalStore(copy), lambda _: None)
        assert report.faults == [] and report.restores is not None, source
        file = sorted(copy.glob("step-2/*.safetensors"))[-1]
        data = bytearray(file.read_bytes())
        data[20] ^= 1  # in the header, which a tensor that is cut is found by
        file.write_bytes(data)
        report = verify_run(LocalStore(copy), lambda _: None)
        assert report.faults and report.restores is None, source


def test_headers_that_lie_are_damage(saved, tmp_path):
    """A tensor that is cut is found by the header of a file: it may lie about place, length and name."""
    directory, _ = saved[Source("fsdp2", 4, most_pieces=1)]
    store = LocalStore(directory)
    manifest = next(candidates(store, None)).manifest
    lies = {
        "not its own": lambda entry, begin, end: {"data_offsets": [begin + (1 << 40), end + (1 << 40)]},
        "which are not its own": lambda entry, begin, end: {"data_offsets": [begin - 4, end - 4]},
        "gives 4 bytes to": lambda entry, begin, end: {"data_offsets": [begin, begin + 4]},
        "no safetensors header": lambda entry, begin, end: {"data_offsets": "none"},
        "says that": lambda entry, begin, end: {"dtype": "I32"},
        "where the manifest has": lambda entry, begin, end: {"shape": entry["shape"][::-1]},
        "gives 0 bytes to": lambda entry, begin, end: {"shape": [-1, 5], "data_offsets": [begin, begin]},
    }
    for text, lie in lies.items():
        copy = shutil.copytree(directory, tmp_path / text.replace(" ", "-"))
        path = copy / "step-2" / manifest.files[1].name
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        name = next(name for name in header if name.startswith("model/up.weight["))
        assert header[name]["data_offsets"][0] > 0 and len(set(header[name]["shape"])) == 2, "or the lies are none"
        header[name] |= lie(header[name], *header[name]["data_offsets"])
        changed = data[:8] + json.dumps(header).encode().ljust(length) + data[8 + length :]
        path.write_bytes(changed)
        block_bytes = manifest.files[1].block_bytes
        blocks = "".join(digest_blocks(memoryview(changed), block_bytes))
        files = list(manifest.files)
        files[1] = FileRecord(files[1].name, len(changed), block_bytes, blocks)
        lying = msgspec.structs.replace(manifest, files=files)
        (copy / "step-2/manifest.json").write_bytes(encode(lying))
        record = manifest.tensors["model/up.weight"]
        with pytest.raises(DamagedCheckpoint, match=text):
            list(
                Pieces(LocalStore(copy), "step-2", lying).overlapping(
                    "model/up.weight", record, whole(tuple(record.shape))
                )
            )
        report = verify_run(LocalStore(copy), lambda _: None)
        assert report.restores is None and any(text in fault.problem for fault in report.faults), report.faults
