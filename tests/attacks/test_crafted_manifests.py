"""Manifests that no save writes, sealed with valid digests: each is refused by a restore, named by `verify`, and no
command of ours meets it with a traceback. Nothing live changes before it is refused.
"""

from __future__ import annotations

import json
import shutil

import msgspec
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import unbroken
from unbroken.cli.main import app
from unbroken.errors import NoUsableCheckpoint, UnbrokenError
from unbroken.manifest import seal, unseal
from unbroken.store.local import LocalStore
from unbroken.verification import verify_run

HUGE = 10**30


def objects():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "own": torch.Generator()}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("made") / "run"
    live = objects()
    with unbroken.Checkpointer(path, live) as ckpt:
        ckpt.restore()
        live["model"](torch.ones(1, 3)).sum().backward()
        live["optimizer"].step()
        ckpt.step()
        ckpt.save()
    return path


@pytest.fixture
def run(made, tmp_path):
    (tmp_path / "outside").write_bytes(b"s" * 20000)
    return shutil.copytree(made, tmp_path / "run")


def edit(path, change):
    body = msgspec.json.decode(unseal(path.read_bytes(), ""))
    change(body)
    path.write_bytes(seal(json.dumps(body, separators=(",", ":")).encode()))  # numbers beyond 64 bits too


def nested(levels):
    """A list in a list in a list."""
    value = []
    for _ in range(levels - 1):
        value = [value]
    return value


def put(*path, to):
    """Set what lies at a path of keys in a manifest's body."""

    def change(body):
        for key in path[:-1]:
            body = body[key]
        body[path[-1]] = to

    return change


def drop(*path):
    def change(body):
        for key in path[:-1]:
            body = body[key]
        del body[path[-1]]

    return change


W = ("tensors", "model/weight")
PIECE = (*W, "pieces", 0)
OPTIONS = ("values", "optimizer", 0, "value", "groups", 0, "options")
STATE = ("values", "optimizer", 0, "value", "state", "model/weight")
RNG = ("values", "rng", 0, "value", "state")
HALF = [[0, 1], [0, 3]]


def two_pieces(one, other):
    """Two halves of the weight, which has 2 rows of 12 bytes; `one` and `other` are the boxes they claim."""

    def change(body):
        piece = body["tensors"]["model/weight"]["pieces"][0]
        begin = piece["begin"]
        body["tensors"]["model/weight"]["pieces"] = [
            {"file": 0, "begin": begin, "end": begin + 12, "box": one},
            {"file": 0, "begin": begin + 12, "end": begin + 24, "box": other},
        ]

    return change


MANIFESTS = {
    "a file by an absolute path": put("files", 0, "name", to="/etc/passwd"),
    "a file above the directory": put("files", 0, "name", to="../outside"),
    "a file of another generation": put("files", 0, "name", to="g0002-rank-00000.safetensors"),
    "a file of a rank that was not there": put("files", 0, "name", to="g0001-rank-00001.safetensors"),
    "a file that is a directory": put("files", 0, "name", to=".."),
    "an escape sequence in a file's name": put("files", 0, "name", to="\x1b[2J.safetensors"),
    "a file size beyond 64 bits": put("files", 0, "size", to=HUGE),
    "blocks that fill the memory": put("files", 0, "block_bytes", to=1 << 40),
    "blocks of no bytes": put("files", 0, "block_bytes", to=0),
    "a step beyond 64 bits": put("step", to=HUGE),
    "a step that is text": put("step", to="1"),
    "a step that is a fraction": put("step", to=1.5),
    "the step of another directory": put("step", to=2),
    "a generation that would leave no next one": put("generation", to=(1 << 63) - 1),
    "a world of no ranks": put("world_size", to=0),
    "a world of three ranks": put("world_size", to=3),
    "a world of a billion ranks": put("world_size", to=10**9),
    "a lineage from itself": put("lineage", to=[{"generation": 1, "step": 1, "micro_step": 0}]),
    "a lineage from the future": put("lineage", to=[{"generation": 7, "step": 1, "micro_step": 0}]),
    "a lineage of text": put("lineage", to=["generation 1"]),
    "another dtype": put(*W, "dtype", to="float64"),
    "a dtype that is a function": put(*W, "dtype", to="load"),
    "a dtype that is a path": put(*W, "dtype", to="os.system"),
    "another shape": put(*W, "shape", to=[3, 3]),
    "a shape that takes all memory": put(*W, "shape", to=[1 << 50]),
    "a shape that is empty and huge": put(*W, "shape", to=[0, HUGE]),
    "a thousand dimensions": put(*W, "shape", to=[1] * 1000),
    "a negative length": put(*W, "shape", to=[-2, -3]),
    "no pieces": put(*W, "pieces", to=[]),
    "a piece beyond the file": lambda body: body["tensors"]["model/weight"]["pieces"][0].update(
        begin=1 << 40, end=(1 << 40) + 24
    ),
    "a piece in a file that is not there": put(*PIECE, "file", to=1),
    "a piece in a negative file": put(*PIECE, "file", to=-1),
    "pieces that overlap": two_pieces(HALF, HALF),
    "pieces that leave a gap": two_pieces([[0, 1], [0, 3]], [[1, 2], [0, 2]]),
    "a piece outside the tensor": two_pieces(HALF, [[2, 3], [0, 3]]),
    "a box of three dimensions": put(*PIECE, "box", to=[[0, 2], [0, 3], [0, 1]]),
    "tensors that are a list": put("tensors", to=[]),
    "no values at all": drop("values"),
    "values that are a list": put("values", to=[]),
    "an environment nested too deep": put("environment", to={"a": nested(300)}),
}

VALUES = {
    "a learning rate that is text": put(*OPTIONS, "lr", to="0.1"),
    "a learning rate that is a list of text": put(*OPTIONS, "lr", to=["0.1"]),
    "a momentum that is a dict": put(*OPTIONS, "momentum", to={"a": 1}),
    "options that are a list": put(*OPTIONS, to=[]),
    "options that name parameters": put(*OPTIONS, "params", to=[]),
    "groups that are a number": put(*OPTIONS[:4], "groups", to=5),
    "parameters that are numbers": put(*OPTIONS[:-1], "params", to=[1, 2]),
    "a shared option that is no tensor": put(*OPTIONS[:-1], "shared", to={"lr": "nowhere"}),
    "state of a tensor that is not there": put(*STATE, "tensors", to={"nowhere": "parameter"}),
    "state that lists other keys": put(*STATE, "keys", to=["exp_avg"]),
    "state that is text": put(*STATE[:-1], to="none"),
    "no kind": drop("values", "optimizer", 0, "value", "kind"),
    "a value that is a number": put("values", "scheduler", 0, "value", to=5),
    "a value without its state": drop("values", "scheduler", 0, "value", "state"),
    "a tag that is a number": put("values", "scheduler", 0, "value", "state", to={"$": 1}),
    "an unknown tag": put("values", "scheduler", 0, "value", "state", to={"$": "reduce"}),
    "a tag without its fields": put("values", "scheduler", 0, "value", "state", to={"$": "tuple"}),
    "a float of three bytes": put("values", "scheduler", 0, "value", "state", to={"$": "float", "bits": "7ff800"}),
    "pairs of three": put("values", "scheduler", 0, "value", "state", to={"$": "dict", "pairs": [[1, 2, 3]]}),
    "an integer that is no hex": put("values", "scheduler", 0, "value", "state", to={"$": "int", "hex": "zz"}),
    "a reference to a tensor that is not there": put(*RNG, "torch", "name", to="nowhere"),
    "strides that fill the memory": put(*RNG, "torch", "stride", to=[1 << 40]),
    "an array that fills the memory": put(*RNG, "python", "internal", "shape", to=[1 << 62, 1 << 62]),
    "a generator without a state of Python's": drop(*RNG, "python"),
    "a generator's version that is text": put(*RNG, "python", "version", to="3"),
    "a generator's state of NumPy's that is text": put(*RNG, "numpy", to="MT19937"),
    "a generator of another kind": put("values", "rng", 0, "value", "kind", to="object"),
    "gradients that are text": put("values", "gradients", 0, "value", "present", to="all"),
    "a module's parameters that are a number": put("values", "model", 0, "value", "parameters", to=1),
    "values of a rank that was not there": put("values", "model", 0, "ranks", to=[[0, 1]]),
    "values of no rank": put("values", "model", 0, "ranks", to=[]),
    "values of a rank twice": put("values", "model", 0, "ranks", to=[[0, 0], [0, 0]]),
    "values nested too deep": put("values", "scheduler", 0, "value", "state", to=nested(900)),
}
ALL = {**MANIFESTS, **VALUES}


@pytest.mark.parametrize("attack", ALL)
def test_a_crafted_manifest_is_refused_by_a_restore_and_named_by_verify(run, attack):
    edit(run / "step-1/manifest.json", ALL[attack])
    live = objects()
    before = {name: value.clone() for name, value in live["model"].state_dict().items()}
    with pytest.raises(NoUsableCheckpoint, match=r"step-1 cannot be used: step-1/manifest\.json"):
        unbroken.Checkpointer(run, live).restore()
    assert all(torch.equal(before[name], value) for name, value in live["model"].state_dict().items())
    report = verify_run(LocalStore(run), lambda count: None)
    assert [fault.file for fault in report.faults] == ["step-1/manifest.json"]
    assert report.refusal


@pytest.mark.parametrize("attack", [*MANIFESTS, "a learning rate that is text", "values nested too deep"])
def test_no_command_meets_it_with_a_traceback_or_touches_anything_outside(run, attack):
    edit(run / "step-1/manifest.json", ALL[attack])
    commands = [
        ["ls", run],
        ["ls", run, "--json"],
        ["show", run],
        ["show", run, "--step", "1"],
        ["verify", run],
        ["verify", run, "--json"],
        ["diff", run, run],
        ["prune", run, "--keep", "1", "--abandoned"],
        ["rollback", run, "--step", "1"],
    ]
    for command in commands:
        result = CliRunner().invoke(app, list(map(str, command)))
        assert isinstance(result.exception, (SystemExit, UnbrokenError)), (command, result.exception)
        code = result.exception.exit_code if isinstance(result.exception, UnbrokenError) else result.exit_code
        assert code in (1, 2)
        assert "\x1b" not in result.output + str(result.exception), "an escape sequence reaches the terminal"
    assert (run.parent / "outside").read_bytes() == b"s" * 20000
    assert (run / "step-1/manifest.json").exists()
    assert {path.name for path in run.iterdir()} == {"generations", "step-1"}


RECORDS = {
    "a number beyond 64 bits": put("number", to=HUGE),
    "a lineage from the future": put("lineage", to=[{"generation": 5, "step": 1, "micro_step": 0}]),
    "a lineage of text": put("lineage", to="1"),
    "a world that is text": put("world_size", to="one"),
}


@pytest.mark.parametrize("attack", RECORDS)
def test_a_crafted_record_costs_nothing_and_is_named(run, attack):
    """The checkpoint's own manifest tells the lineage instead."""
    edit(run / "generations/0001.json", RECORDS[attack])
    report = verify_run(LocalStore(run), lambda count: None)
    assert [fault.file for fault in report.faults] == ["generations/0001.json"]
    restored = unbroken.Checkpointer(run, objects()).restore()
    assert restored.step == 1
    assert "generations/0001.json" in str(restored)


@pytest.mark.parametrize("name", ["9" * 30, "\u0661\u0661\u0661\u0661", "-001", "0" * 200])
def test_names_that_are_no_generation_or_step_of_ours_are_passed_over(run, name):
    shutil.copy(run / "generations/0001.json", run / f"generations/{name}.json")
    (run / f"step-{name}").mkdir()
    shutil.copy(run / "step-1/manifest.json", run / f"step-{name}/manifest.json")
    assert unbroken.Checkpointer(run, objects()).restore().step == 1
    for command in ("ls", "verify"):
        assert CliRunner().invoke(app, [command, str(run), "--json"]).exit_code == 0


def test_the_highest_number_leaves_none_for_the_next_start_and_that_is_said(run):
    shutil.copy(run / "generations/0001.json", run / "generations/999999999.json")
    with pytest.raises(UnbrokenError, match="generation 999999999, which no job has begun: remove it"):
        unbroken.Checkpointer(run, objects()).restore()
