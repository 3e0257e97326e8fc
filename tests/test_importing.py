"""What others saved is restored bit for bit, and nothing that a source says is run."""

from __future__ import annotations

import io
import os
import pickle
import struct
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import unbroken
from sharded.models import Net, make_job, raw
from test_export import Tied, nothing, opened, save
from unbroken.errors import DamagedCheckpoint, HistoryExists, UsageError
from unbroken.exchange.dcp_files import export_dcp
from unbroken.exchange.importing import import_checkpoint, read_dcp, read_torch
from unbroken.exchange.inert import Inert, read_inert
from unbroken.exchange.registering import Wishes
from unbroken.exchange.state_dicts import chosen_names
from unbroken.exchange.torch_files import export_torch
from unbroken.store.local import LocalStore
from unbroken.verification import verify_run

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def import_torch(source, run, **wishes):
    """Import, verify, and give back what was registered."""
    return _import(read_torch(Path(source), Wishes(**wishes)), run)


def import_dcp(source, run, **wishes):
    """The same of a directory."""
    return _import(read_dcp(Path(source), Wishes(**wishes)), run)


def _import(registered, run):
    import_checkpoint(Path(run), 7, registered, nothing)
    report = verify_run(LocalStore(Path(run)), nothing)
    assert report.faults == [] and report.restores is not None
    return registered


def restored(run, state, strict=True):
    """The step that a restore finds."""
    with unbroken.Checkpointer(run, state) as ckpt:
        return ckpt.restore(strict=strict).step


def trained(layout="single", seed=1):
    """A job with optimizer state."""
    job = make_job(layout, seed)
    job.step(0)
    job.step(1)
    return job


def restore_layout(rank, world_size, directory, layout):
    """What a job in a layout has after a restore."""
    job = make_job(layout, seed=2)
    with unbroken.Checkpointer(directory, job.state) as ckpt:
        assert ckpt.restore().step == 7
        content = job.content()
        job.step(2)
    return content


def save_dcp(rank, world_size, directory, layout, flat):
    """What torch's own API writes."""
    job = trained(layout)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = get_state_dict(job.model, job.optimizer, options=options)
    dcp.save({"model": model, "optimizer": optimizer, "epoch": 3}, checkpoint_id=directory)
    return job.content()


@pytest.mark.parametrize(
    ("layout", "flat"), [("fsdp2", False), ("fsdp2", True), ("two_dimensional", False), ("ddp", False)]
)
def test_what_dcp_saved_of_any_layout_is_restored_in_any_other(ranks, tmp_path, layout, flat):
    content, *_ = ranks.run_all_well("test_importing:save_dcp", 4, str(tmp_path / "dcp"), layout, flat)
    made = import_dcp(tmp_path / "dcp", tmp_path / "run")
    assert "left out: epoch is no state dict" in made.notes
    job = make_job("single", seed=2)
    assert restored(tmp_path / "run", job.state) == 7
    assert job.content() == content
    import_dcp(tmp_path / "dcp", tmp_path / "other")
    for result in ranks.run_all_well("test_importing:restore_layout", 2, str(tmp_path / "other"), "fsdp2"):
        assert result == content


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_out_and_in_again_changes_nothing(ranks, tmp_path, to):
    content, *_ = ranks.run_all_well("test_export:save_layout", 2, str(tmp_path / "run"), "fsdp2")
    contents = opened(tmp_path / "run")
    if to == "torch":
        export_torch(contents, chosen_names(contents, None), tmp_path / "out", nothing)
        import_torch(tmp_path / "out", tmp_path / "new")
    else:
        export_dcp(contents, chosen_names(contents, None), tmp_path / "out", nothing)
        import_dcp(tmp_path / "out", tmp_path / "new")
    job = make_job("single", seed=2)
    assert restored(tmp_path / "new", job.state) == 7
    assert job.content() == content


def test_a_checkpoint_as_the_tutorial_saves_it(tmp_path):
    job = trained()
    scheduler = torch.optim.lr_scheduler.StepLR(job.optimizer, 3)
    parts = {"model_state_dict": job.model.state_dict(), "scheduler_state_dict": scheduler.state_dict(), "epoch": 3}
    named = {"state": {}, "param_groups": []}
    # Frozen parameters are in no group, so positions alone would not tell.
    optimizer = torch.optim.AdamW([(n, p) for n, p in job.model.named_parameters() if p.requires_grad], lr=0.1)
    optimizer.load_state_dict({**named, **job.optimizer.state_dict()})
    torch.save({**parts, "optimizer_state_dict": optimizer.state_dict()}, tmp_path / "all.pt")
    made = import_torch(tmp_path / "all.pt", tmp_path / "run")
    assert made.notes == ["left out: epoch is no state dict"]
    other = make_job("single", seed=2)
    later = torch.optim.lr_scheduler.StepLR(other.optimizer, 9)
    assert restored(tmp_path / "run", {**other.state, "scheduler": later}) == 7
    assert other.content() == job.content()
    assert later.state_dict() == scheduler.state_dict()


def test_positions_are_taken_for_the_models_order_if_that_is_all_there_can_be(tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "all.pt")
    made = import_torch(tmp_path / "all.pt", tmp_path / "run")
    assert made.notes == [
        "optimizer: it had no names of parameters: they are taken in the order of the model's tensors"
    ]
    other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    later = torch.optim.SGD(other.parameters(), lr=0.5, momentum=0.1)
    restored(tmp_path / "run", {"model": other, "optimizer": later})
    assert later.param_groups[0]["momentum"] == 0.9
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert raw(optimizer.state[one]["momentum_buffer"]) == raw(later.state[two]["momentum_buffer"])


def test_positions_that_do_not_tell_are_refused_and_can_be_left_out(tmp_path):
    model = Net(0)
    pairs = {
        "groups cannot be told": [{"params": [model.up.weight]}, {"params": [model.up.bias]}],
        "it has 5 parameters and the model 7 tensors": [p for p in model.parameters() if p.requires_grad],
    }
    for says, parameters in pairs.items():
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "all.pt")
        with pytest.raises(UsageError, match=f"optimizer: .*{says}.*leave it out with --skip optimizer"):
            read_torch(tmp_path / "all.pt", Wishes())
        assert list(read_torch(tmp_path / "all.pt", Wishes(skip=frozenset({"optimizer"}))).values) == ["model"]


def test_moments_of_another_shape_than_the_parameter_are_refused(tmp_path):
    model = nn.Linear(3, 2)
    state = {0: {"exp_avg": torch.zeros(2)}, 1: {"exp_avg": torch.zeros(2)}}
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    torch.save({"model": model.state_dict(), "optimizer": optimizer}, tmp_path / "all.pt")
    with pytest.raises(UsageError, match=r"exp_avg of model/weight has shape \[2\], and the parameter \[2, 3\]"):
        read_torch(tmp_path / "all.pt", Wishes())


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.module.", ""])
def test_a_bare_state_dict_is_one_module_without_the_names_of_wrappers(tmp_path, wrapper):
    module = Tied()
    torch.save({wrapper + name: tensor for name, tensor in module.state_dict().items()}, tmp_path / "w.pt")
    import_torch(tmp_path / "w.pt", tmp_path / "run", name="net")
    other = Tied(1)
    other.cache.fill_(3)
    restored(tmp_path / "run", {"net": other})
    for one, two in zip(module.state_dict().values(), other.state_dict().values(), strict=True):
        assert (raw(one), one.dtype) == (raw(two), two.dtype)
    made = read_torch(tmp_path / "w.pt", Wishes(prefix=""))
    assert f"model/{wrapper}embed.weight" in made.tensors


def test_the_old_format_of_torch_and_other_strides_are_read(tmp_path):
    module = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    torch.save(module.state_dict(), tmp_path / "w.pt", _use_new_zipfile_serialization=False)
    import_torch(tmp_path / "w.pt", tmp_path / "run")
    other = nn.Conv2d(3, 4, 2)
    restored(tmp_path / "run", {"model": other})
    assert torch.equal(module.weight, other.weight)


def test_extra_state_comes_along(tmp_path):
    class Extra(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.seen = 0

        def get_extra_state(self):
            return {"seen": self.seen}

        def set_extra_state(self, state):
            self.seen = state["seen"]

    module = nn.Sequential(Extra())
    module[0].seen = 5
    torch.save(module.state_dict(), tmp_path / "w.pt")
    import_torch(tmp_path / "w.pt", tmp_path / "run")
    other = nn.Sequential(Extra())
    restored(tmp_path / "run", {"model": other})
    assert other[0].seen == 5


def test_ties_are_seen_where_the_source_has_them_and_asked_for_where_not(tmp_path):
    module = Tied()
    torch.save(module.state_dict(), tmp_path / "w.pt")
    assert import_torch(tmp_path / "w.pt", tmp_path / "a").values["model"]["aliases"] == {
        "head.weight": "model/embed.weight"
    }
    dcp.save({"model": module.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    made = import_dcp(tmp_path / "dcp", tmp_path / "b")
    assert made.notes == [
        "model/head.weight and model/embed.weight are equal; if the model ties them, import with "
        "--tie head.weight=embed.weight"
    ]
    with pytest.raises(unbroken.StateMismatch, match="are one tensor, and were stored as separate ones"):
        restored(tmp_path / "b", {"model": Tied(1)})
    import_dcp(tmp_path / "dcp", tmp_path / "c", ties={"head.weight": "embed.weight"})
    other = Tied(1)
    restored(tmp_path / "c", {"model": other})
    assert torch.equal(other.head.weight, module.embed.weight)
    with pytest.raises(UsageError, match=r"head\.weight cannot be one tensor with low\.weight"):
        read_dcp(tmp_path / "dcp", Wishes(ties={"head.weight": "low.weight"}))


def test_a_run_that_holds_checkpoints_is_not_imported_into(tmp_path):
    save(tmp_path / "run", {"model": nn.Linear(2, 2)})
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "w.pt")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(HistoryExists, match="holds checkpoints up to step 1: give a new directory"):
        import_torch(tmp_path / "w.pt", tmp_path / "run")
    assert sorted(tmp_path.rglob("*")) == before


# --- sources that were written to do harm, or are damaged ---


class Harm:
    """Runs a command when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def refuses(tmp_path, error, match, read):
    """An import that must leave nothing."""
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(error, match=match):
        _import(read(), tmp_path / "run")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_pickle_in_a_file_of_torch_is_never_run(tmp_path):
    for old in (True, False):
        path = tmp_path / f"{old}.pt"
        torch.save(
            {"model": {"w": torch.ones(2)}, "x": Harm(tmp_path / "mark")}, path, _use_new_zipfile_serialization=old
        )
        refuses(
            tmp_path,
            UsageError,
            "holds more than tensors and plain values",
            lambda path=path: read_torch(path, Wishes()),
        )


def test_a_pickle_in_the_metadata_of_dcp_is_never_run(tmp_path):
    dcp.save({"model": {"w": torch.ones(2)}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    metadata = tmp_path / "dcp/.metadata"
    for harm in (pickle.dumps(Harm(tmp_path / "mark")), pickle.dumps([Harm(tmp_path / "mark")], protocol=0)):
        metadata.write_bytes(harm)
        refuses(tmp_path, DamagedCheckpoint, "metadata", lambda: read_dcp(tmp_path / "dcp", Wishes()))


def test_a_pickle_in_a_value_of_dcp_is_left_out(tmp_path):
    state = {"model": {"w": torch.ones(2)}, "extra": {"x": Harm(tmp_path / "mark"), "lr": 0.5}}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    made = import_dcp(tmp_path / "dcp", tmp_path / "run")
    assert made.values.keys() == {"model", "extra"} and made.values["extra"]["state"] == {"lr": 0.5}
    assert any("left out: extra.x" in note and "runs no pickle" in note for note in made.notes)
    assert not (tmp_path / "mark").exists()


def with_metadata(directory, change):
    """Rewrite the metadata of a directory."""
    path = directory / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


@pytest.fixture
def directory(tmp_path):
    """Something that dcp saved, and a file beside it."""
    (tmp_path / "outside").mkdir()
    torch.save(torch.ones(2), tmp_path / "outside/secret")
    dcp.save({"model": {"w": torch.ones(2), "v": torch.ones(3, 2)}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path / "dcp"


@pytest.mark.parametrize("name", ["../outside/secret", "/etc/passwd", "link", ".", ""])
def test_a_file_outside_of_the_directory_is_never_opened(tmp_path, directory, name):
    (directory / "link").symlink_to(tmp_path / "outside/secret")

    def lead_away(metadata):
        for info in metadata.storage_data.values():
            info.relative_path, info.offset = name, 0

    with_metadata(directory, lead_away)
    refuses(tmp_path, DamagedCheckpoint, "cannot be read", lambda: read_dcp(directory, Wishes()))


def larger(metadata):
    for entry in metadata.state_dict_metadata.values():
        entry.size = torch.Size([1 << 20] * len(entry.size))
        entry.chunks[0].sizes = entry.size


def twice(metadata):
    for entry in metadata.state_dict_metadata.values():
        entry.chunks.append(entry.chunks[0])


def longer(metadata):
    for info in metadata.storage_data.values():
        info.length = 1 << 50


def other_dtype(metadata):
    for entry in metadata.state_dict_metadata.values():
        entry.properties.dtype = torch.int32


def without_chunks(metadata):
    for entry in metadata.state_dict_metadata.values():
        entry.chunks.clear()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (larger, "a part that should be"),
        (twice, "two parts of one"),
        (longer, "it ends before byte"),
        (other_dtype, "a part that should be torch.int32"),
        (without_chunks, "do not cover it exactly once"),
        (lambda metadata: setattr(metadata, "storage_data", None), "no metadata of torch.distributed.checkpoint"),
        (lambda metadata: metadata.planner_data.update({"model.w": ()}), "no metadata of torch.distributed"),
    ],
)
def test_metadata_that_cannot_be_is_refused_and_leaves_nothing(tmp_path, directory, change, match):
    with_metadata(directory, change)
    error = UsageError if change is twice else DamagedCheckpoint
    refuses(tmp_path, error, match, lambda: read_dcp(directory, Wishes()))


def test_a_cut_source_is_damaged_and_leaves_nothing(tmp_path, directory):
    path = directory / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-500])
    refuses(tmp_path, DamagedCheckpoint, "cannot be read", lambda: read_dcp(directory, Wishes()))
    torch.save({"w": torch.ones(100)}, tmp_path / "w.pt")
    (tmp_path / "w.pt").write_bytes((tmp_path / "w.pt").read_bytes()[:500])
    refuses(tmp_path, DamagedCheckpoint, "cannot be read", lambda: read_torch(tmp_path / "w.pt", Wishes()))


def test_a_small_file_cannot_ask_for_a_large_checkpoint(tmp_path):
    torch.save({"w": torch.ones(1).expand(1 << 40)}, tmp_path / "w.pt")
    refuses(
        tmp_path,
        UsageError,
        "w is a tensor whose elements share memory",
        lambda: read_torch(tmp_path / "w.pt", Wishes()),
    )


@pytest.mark.parametrize(
    "optimizer",
    [
        {"state": {}, "param_groups": [{"params": 5}]},
        {"state": {}, "param_groups": [{"params": [{}]}]},
        {"state": {9: {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": [0]}]},
        {"state": {0: 5}, "param_groups": [{"params": [0]}]},
        {"state": {}, "param_groups": [{"params": ["no.such"]}]},
        {"param_groups.w.lr": 1, "other": 2},
    ],
)
def test_an_optimizer_of_no_known_form_is_refused(tmp_path, optimizer):
    torch.save({"model": {"w": torch.ones(2)}, "optimizer": optimizer}, tmp_path / "w.pt")
    refuses(tmp_path, UsageError, "optimizer|known form", lambda: read_torch(tmp_path / "w.pt", Wishes()))


def test_a_source_without_end_is_refused(tmp_path):
    tree = {"w": torch.ones(2)}
    tree["inner"] = tree
    torch.save({"model": tree}, tmp_path / "w.pt")
    refuses(tmp_path, UsageError, "no known form", lambda: read_torch(tmp_path / "w.pt", Wishes()))


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "w.pt")

    def full(self, name, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LocalStore, "publish", full)
    refuses(tmp_path, OSError, "No space left", lambda: read_torch(tmp_path / "w.pt", Wishes()))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_read_as_data(protocol):
    value = {"a": [1, 2.5, None, True, "ü", (1, 2), ()], 3: {"nested": [{}]}, "big": 1 << 70, "b": "x" * 300}
    assert read_inert(pickle.dumps(value, protocol=protocol), "it") == value if protocol > 1 else True
    named = read_inert(pickle.dumps([torch.float32, os.getcwd], protocol=max(protocol, 2)), "it")
    assert [item.name for item in named] == ["torch.float32", "posix.getcwd"]
    assert all(isinstance(item, Inert) for item in named)


@pytest.mark.parametrize(
    "data", [b"", b"\x80\x04", b"\x80\x04.", b"(", b"0.", b"\x80\x04]\x94(h\x00e", struct.pack("<cQ", b"\x8d", 1 << 60)]
)
def test_a_pickle_that_is_none_is_damaged(data):
    with pytest.raises(DamagedCheckpoint, match="it "):
        read_inert(data, "it")


def test_a_pickle_of_zlib_and_friends_is_not_looked_up():
    stream = io.BytesIO()
    pickle.Pickler(stream, protocol=4).dump(Harm("never"))
    found = read_inert(stream.getvalue(), "it")
    assert (found.name, found.arguments) == ("posix.mkdir", ("never",))
    assert not Path("never").exists()
