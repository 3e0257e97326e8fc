"""What comes from CUDA devices while training goes on, on a device that is not there: see `fake_cuda`.

It shows that the order which streams and events are asked for is enough, and necessary. What a real device does is
tested in `tests/gpu`.
"""

import gc
import random
import threading

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fake_cuda
import unbroken
from rebuild import raw
from unbroken import cuda
from unbroken.cuda import Crossing
from unbroken.errors import NoUsableCheckpoint, SaveFailed
from unbroken.image.image import Arena, TensorSpec, lay_out
from unbroken.overlap import Copier, Copy, FromDevice

WAIT_S = 30


@pytest.fixture
def device(monkeypatch):
    found = fake_cuda.install(monkeypatch)
    yield found
    for stream in list(found.held):
        found.release(stream)
    found.stop()
    cuda.side_stream.cache_clear()


class Sgd(torch.optim.Optimizer):
    """Enqueues its kernels and returns; counters move at once, as torch's do."""

    def __init__(self, parameters, device):
        super().__init__(parameters, {})
        self.device = device

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = self.device.adopt(torch.zeros_like(parameter))
                for tensor, rate in ((parameter, 1.0), (state["momentum_buffer"], 0.5)):
                    write(self.device, tensor, rate)


def write(device, tensor, amount, counted=True):
    """Enqueue an addition."""
    memory = tensor.data
    if counted:
        torch.autograd.graph.increment_version(tensor)
    device.put(device.current(), lambda: memory.add_(amount))


class Job:
    def __init__(self, path, device, seed=0, **options):
        torch.manual_seed(seed)
        self.device = device
        self.model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        for parameter in self.model.parameters():
            device.adopt(parameter.data)
        self.optimizer = Sgd(self.model.parameters(), device)
        self.ckpt = unbroken.Checkpointer(path, {"m": self.model, "o": self.optimizer}, keep=None, **options)
        self.contents = {}

    def tensors(self):
        """By their names in a checkpoint."""
        found = {}
        for name, parameter in self.model.named_parameters():
            found[f"m/{name}"] = parameter.data
            found[f"o/state/m/{name}/momentum_buffer"] = self.optimizer.state[parameter]["momentum_buffer"].data
        return found

    def content(self):
        return {name: raw(tensor) for name, tensor in self.tensors().items()}

    def step(self, save=True):
        self.optimizer.step()
        self.ckpt.step()
        if save:
            step = self.ckpt.global_step
            self.device.put(self.device.default, lambda: self.contents.update({step: self.content()}))
            self.ckpt.save()

    def rehearse(self):
        """The first save, which copies all at once, and the fence after it."""
        self.step()
        self.step(save=False)
        self.ckpt.wait()

    def close(self):
        self.device.default.synchronize()
        self.ckpt.close()


def restored(path, device, step):
    job = Job(path, device, seed=1)
    job.optimizer.step()
    assert job.ckpt.restore().step == step
    job.ckpt.close()
    return job.content()


def stored(path, step):
    tensors = load_file(path / f"step-{step}" / "g0001-rank-00000.safetensors")
    return {name: raw(tensor) for name, tensor in tensors.items() if name.startswith(("m/", "o/"))}


@pytest.fixture
def job(tmp_path, device):
    job = Job(tmp_path, device)
    job.rehearse()
    job.side = cuda.side_stream(torch.device("cpu"))
    return job


def test_a_step_that_has_not_run_yet_when_it_is_saved_is_what_is_copied(tmp_path, device, job):
    device.hold(device.default)
    job.step()  # returns, though the device does nothing
    assert job.ckpt._session._copier._current.passable.wait(WAIT_S)
    assert 3 not in job.contents
    device.release(device.default)
    job.ckpt.wait()
    job.close()
    assert restored(tmp_path, device, 3) == job.contents[3]


def test_the_device_waits_for_the_copies_before_the_next_step_and_the_loop_does_not(tmp_path, device, job):
    device.hold(job.side)
    job.step()
    job.step(save=False)  # returns, though nothing is copied yet
    later = fake_cuda.Event()
    later.record(device.default)
    assert not job.ckpt._session._copier._current.done.is_set()
    job.device.put(device.current(), lambda: None)
    assert not later.ticket.wait(0.05), "the step's kernels wait"
    device.release(job.side)
    later.synchronize()
    job.close()
    assert restored(tmp_path, device, 3) == job.contents[3]


def test_each_edge_is_asked_for_before_what_it_orders(device, job):
    device.default.synchronize()
    device.log.clear()
    device.hold(job.side)
    job.step()
    asked = device.log.copy
    copy = job.ckpt._session._copier._current
    assert copy.passable.wait(WAIT_S)
    assert asked() == [("record", device.default), ("wait_event", job.side), ("record", job.side)]
    enqueued = len(device.default.todo)
    job.optimizer.step()
    assert asked()[3:] == [("wait_event", device.default)]
    assert len(device.default.todo) > enqueued
    device.release(job.side)
    job.close()


@pytest.mark.parametrize("counted", [True, False])
def test_what_is_written_before_it_is_copied_costs_that_save_and_is_copied_at_once_later(
    tmp_path, device, job, counted
):
    device.hold(job.side)
    job.step()
    write(device, job.model[1].weight, 1.0, counted)
    device.default.synchronize()
    device.release(job.side)
    with pytest.raises(SaveFailed, match=r"1 .m/1.weight. changed while being copied"):
        job.ckpt.wait()
    job.optimizer.step()
    job.ckpt.step()
    job.step()
    assert "m/1.weight" not in job.ckpt._session._copier._current.names
    job.ckpt.wait()
    job.close()
    assert restored(tmp_path, device, 5) == job.contents[5]


def test_a_step_of_the_optimizer_that_is_enqueued_before_the_copies_are_done_costs_nothing(device, job):
    device.hold(job.side)
    job.step()
    job.step(save=False)
    device.release(job.side)
    job.ckpt.wait()  # raises if the save failed
    job.close()


def test_once_an_optimizer_is_captured_in_a_graph_all_is_copied_at_once(tmp_path, device, job):
    job.step()
    device.log.clear()
    device.capturing = True
    job.optimizer.step()
    assert ("wait_event", device.default) not in device.log
    device.capturing = False
    job.ckpt.step()
    for _ in range(3):
        job.step()
        assert job.ckpt._session._copier._current is None
    job.close()
    assert restored(tmp_path, device, 7) == job.contents[7]


def test_small_results_of_kernels_come_along_with_the_copies(device, job, monkeypatch):
    found, submit, place = [], Copier.submit, torch.device("cpu")

    def bring_more(copier, copy):
        total = device.adopt(torch.zeros(1))
        write(device, total, 7.0)
        assert copy.bring({torch.device("meta"): total}) is None
        brought = copy.bring({place: total})
        copy.at_the_end = lambda: found.append(brought()[place].item())
        submit(copier, copy)

    monkeypatch.setattr(Copier, "submit", bring_more)
    device.hold(device.default)
    job.step()
    device.release(device.default)
    job.ckpt.wait()
    job.close()
    assert found == [7.0]


def test_snapshot_block_copies_at_once(tmp_path, device):
    job = Job(tmp_path, device, snapshot="block", on_error="raise")
    job.rehearse()
    job.step()
    job.close()
    assert restored(tmp_path, device, 3) == job.contents[3]


@pytest.mark.parametrize("call", ["leave", "enqueue", "wait"])
def test_an_error_on_the_device_costs_the_save(device, job, monkeypatch, call):
    def fail(crossing):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(Crossing, call, fail)
        job.step()
        with pytest.raises(SaveFailed, match="RuntimeError: out of memory"):
            job.ckpt.wait()
    job.step()
    job.ckpt.wait()
    job.close()


def stress(tmp_path, device, choice):
    """Steps that are saved, with writes at any moment; how many checkpoints are not what the device had then."""
    job = Job(tmp_path, device)
    job.rehearse()
    for late in (device.default, cuda.side_stream(torch.device("cpu"))) * 2:  # either as far behind as it may be
        device.hold(late)
        job.step()
        job.ckpt._session._copier._current.passable.wait(WAIT_S)
        job.step(save=False)
        device.come_to_rest()
        device.release(late)
        job.ckpt._session.wait()
    for _ in range(20):
        job.step()
        if choice.random() < 0.1:
            write(device, choice.choice(list(job.model.parameters())), 1.0, counted=choice.random() < 0.5)
        if choice.random() < 0.3:
            job.device.default.synchronize()
        if choice.random() < 0.3:
            job.ckpt._session.wait()
    job.ckpt._session.wait()
    committed = sorted(int(path.parent.name.partition("-")[2]) for path in tmp_path.glob("step-*/manifest.json"))
    job.close()
    assert len(committed) > 10, "of 20; those that were written into while being copied fail"
    return sum(stored(tmp_path, step) != job.contents[step] for step in committed)


@pytest.mark.parametrize("seed", range(3))
def test_every_checkpoint_is_of_one_step_in_whatever_order_streams_run(tmp_path, device, seed):
    assert stress(tmp_path, device, random.Random(seed)) == 0


@pytest.mark.parametrize("edge", ["ready", "copied", "enqueued"])
def test_without_one_of_the_edges_some_are_not(tmp_path, device, monkeypatch, edge):
    """Otherwise the test above would show nothing. Counters and probes, which would tell, look away."""
    if edge == "ready":
        monkeypatch.setattr(Crossing, "leave", lambda self: self.brought.extend(map(torch.empty_like, self.along)))
    elif edge == "copied":
        monkeypatch.setattr(Crossing, "hold_back", lambda self: None)
    else:
        passed, enqueue = threading.Event(), Crossing.enqueue
        monkeypatch.setattr(Copier, "_pass", lambda self: (self._current and self._current.hold_back(), passed.set()))
        monkeypatch.setattr(Crossing, "enqueue", lambda self: (passed.wait(0.2), enqueue(self)))
    monkeypatch.setattr(Copy, "_look_at_devices", lambda self: None)
    monkeypatch.setattr(FromDevice, "different", lambda self: [])
    assert stress(tmp_path, device, random.Random(0)) > 0


def big_model(device, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(1500, 2000), nn.Linear(2000, 3), nn.BatchNorm1d(3))  # the first in two runs
    for parameter in model.parameters():
        device.adopt(parameter.data)
    return model


def test_tensors_that_are_read_in_several_runs_reach_the_device_whole(tmp_path, device):
    model, again = big_model(device, 0), big_model(device, 1)
    with unbroken.Checkpointer(tmp_path, {"m": model}, on_error="raise") as ckpt:
        ckpt.save()
    with unbroken.Checkpointer(tmp_path, {"m": again}) as ckpt:
        write(device, again[0].weight, 1.0)  # still to run, and before what is read
        assert ckpt.restore().step == 0
    assert [raw(item) for item in again.state_dict().values()] == [raw(item) for item in model.state_dict().values()]


def test_a_damaged_block_never_reaches_the_device(tmp_path, device):
    model, again = big_model(device, 0), big_model(device, 1)
    with unbroken.Checkpointer(tmp_path, {"m": model}, on_error="raise") as ckpt:
        ckpt.save()
    for path in (tmp_path / "step-0").glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        for place in range(5000, len(data), 1 << 20):  # in every block
            data[place] ^= 1
        path.write_bytes(data)
    before = raw(again[0].weight)
    with pytest.raises(NoUsableCheckpoint, match="do not match their digest"):
        unbroken.Checkpointer(tmp_path, {"m": again}).restore()
    assert raw(again[0].weight) == before


SMALL, LARGE = (lay_out([TensorSpec("a", torch.float32, (length,))]) for length in (10, 1 << 20))


def test_memory_is_pinned_once_and_given_back_before_it_goes(device):
    arena = Arena()
    arena.take_shape(SMALL)
    arena.pin()
    arena.pin()
    assert arena.is_pinned and list(device.pinned.values()) == [len(arena._memory)]
    arena.take_shape(LARGE)
    assert not arena.is_pinned and not device.pinned
    arena.pin()
    assert list(device.pinned.values()) == [len(arena._memory)]
    del arena
    gc.collect()
    assert not device.pinned


def test_what_cannot_be_pinned_is_used_as_it_is_and_no_kernel_is_blamed_for_it(device, monkeypatch):
    forgotten = []
    monkeypatch.setattr(cuda, "_forget_error", lambda: forgotten.append(True))
    device.refuses_to_pin = True
    arena = Arena()
    arena.take_shape(SMALL)
    arena.pin()
    arena.pin()
    assert not arena.is_pinned and forgotten == [True]
    arena.take_shape(LARGE)


def test_arenas_are_pinned_only_if_something_lies_on_a_device_and_until_the_job_is_gone(tmp_path, device):
    model = nn.Linear(2, 2)
    with unbroken.Checkpointer(tmp_path / "host", {"m": model}, on_error="raise") as ckpt:
        ckpt.save()
        ckpt.wait()
    assert not device.pinned
    job = Job(tmp_path / "device", device)
    job.rehearse()
    job.step()
    job.ckpt.wait()
    assert device.pinned
    job.close()
    del job, ckpt
    gc.collect()
    assert not device.pinned


def test_nothing_of_torchs_cuda_is_touched_without_a_device(tmp_path, monkeypatch):
    for name in ("cudart", "current_stream", "synchronize", "Event", "Stream"):
        monkeypatch.setattr(torch.cuda, name, None)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with unbroken.Checkpointer(tmp_path, {"m": model, "o": optimizer}, on_error="raise") as ckpt:
        for _ in range(4):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            ckpt.step()
            ckpt.save()
    assert unbroken.Checkpointer(tmp_path, {"m": model, "o": optimizer}).restore().step == 4
