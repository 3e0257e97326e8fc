"""Snapshots of what lies on a CUDA device, on a real one: each is of one step, and no step is held up by the host.

The tests mirror `tests/test_cuda.py`, which plays the device. A device's work is held back here by a kernel that spins.
"""

import gc
import random

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import unbroken
from rebuild import raw
from unbroken import cuda
from unbroken.errors import SaveFailed
from unbroken.image.image import Arena, TensorSpec, lay_out
from unbroken.probes import RowProbes

pytestmark = pytest.mark.gpu

WIDTH = 1024
WAIT_S = 60
LONG = 400_000_000
"""Cycles: some tenths of a second."""


class Job:
    """Linear layers and AdamW on the device; more than what a step waits for (session.SMALL_BYTES)."""

    def __init__(self, path, seed=0, layers=6, dtype=torch.float32, **options):
        torch.manual_seed(seed)
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))).to("cuda", dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        self.ckpt = unbroken.Checkpointer(path, {"m": self.model, "o": self.optimizer}, keep=None, **options)
        self.batch = torch.randn(64, WIDTH, device="cuda", dtype=dtype)
        self.contents = {}

    def forward_backward(self):
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()

    def step(self, save=True, keep=True):
        self.forward_backward()
        self.optimizer.step()
        self.ckpt.step()
        if save:
            if keep:  # on the device, in stream order, without waiting
                self.contents[self.ckpt.global_step] = {key: item.clone() for key, item in self.tensors().items()}
            self.ckpt.save()

    def tensors(self):
        found = {}
        for name, parameter in self.model.named_parameters():
            found[f"m/{name}"] = parameter.detach()
            for key, item in self.optimizer.state[parameter].items():
                found[f"o/state/m/{name}/{key}"] = item
        return found

    def content(self):
        return {name: raw(tensor.cpu()) for name, tensor in self.tensors().items()}

    def kept(self, step):
        return {name: raw(tensor.cpu()) for name, tensor in self.contents[step].items()}

    def rehearse(self):
        self.step()
        self.step(save=False)
        self.ckpt.wait()

    @property
    def copy(self):
        return self.ckpt._session._copier._current


def stored(path, step):
    tensors = load_file(next((path / f"step-{step}").glob("*.safetensors")))
    return {name: raw(tensor) for name, tensor in tensors.items() if name.startswith(("m/", "o/"))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_checkpoint_of_many_steps_is_of_one_step(tmp_path, dtype):
    choice = random.Random(0)
    job = Job(tmp_path, dtype=dtype, on_error="raise")
    job.rehearse()
    for _ in range(40):
        job.step()
        if choice.random() < 0.2:
            torch.cuda.synchronize()
        if choice.random() < 0.2:
            torch.cuda._sleep(LONG // 10)
        if choice.random() < 0.2:
            job.ckpt.wait()
    job.ckpt.close()
    for step in job.contents:
        assert stored(tmp_path, step) == job.kept(step), f"step {step}"


def test_a_blocking_snapshot_has_the_same_bytes(tmp_path):
    files = []
    for snapshot in ("overlap", "block"):
        job = Job(tmp_path / snapshot, snapshot=snapshot, on_error="raise")
        job.rehearse()
        job.step()
        job.ckpt.close()
        files.append(next((tmp_path / snapshot / "step-3").glob("*.safetensors")).read_bytes())
    assert files[0] == files[1]


def test_a_step_that_has_not_run_yet_when_it_is_saved_is_what_is_copied(tmp_path):
    job = Job(tmp_path, on_error="raise")
    job.rehearse()
    job.forward_backward()
    torch.cuda._sleep(LONG)
    job.step()
    assert job.copy is not None and not job.copy.done.is_set(), "save() returned before the device came to the step"
    job.ckpt.close()
    assert stored(tmp_path, 3) == job.kept(3)


def test_the_next_step_waits_for_the_copies_on_the_device_and_the_loop_does_not(tmp_path):
    job = Job(tmp_path, on_error="raise")
    job.rehearse()
    side = cuda.side_stream(job.batch.device)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)  # the copies come late
    job.step()
    copy = job.copy
    job.step(save=False)
    assert not copy.done.is_set(), "the optimizer's step returned before the copies were done"
    after = torch.cuda.Event()
    after.record()
    after.synchronize()
    assert copy.from_devices[0].crossing._copied.query(), "the step's kernels ran after the copies"
    job.ckpt.close()
    assert stored(tmp_path, 3) == job.kept(3)


@pytest.mark.parametrize("counted", [True, False])
def test_a_write_between_save_and_copy_costs_that_save(tmp_path, counted):
    job = Job(tmp_path)
    job.rehearse()
    with torch.cuda.stream(cuda.side_stream(job.batch.device)):
        torch.cuda._sleep(LONG)
    job.step()
    weight = job.model[1].weight.detach()
    (weight if counted else weight.data).add_(1)
    with pytest.raises(SaveFailed, match=r"m/1.weight.* changed while being copied"):
        job.ckpt.wait()
    job.step(save=False)
    job.step()
    job.ckpt.close()
    assert stored(tmp_path, 5) == job.kept(5)


def test_steps_on_a_stream_of_their_own_are_saved_as_they_were(tmp_path):
    job = Job(tmp_path, on_error="raise")
    own = torch.cuda.Stream()
    own.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(own):
        job.rehearse()
        for _ in range(5):
            torch.cuda._sleep(LONG // 10)
            job.step()
        own.synchronize()
    job.ckpt.close()
    for step in job.contents:
        assert stored(tmp_path, step) == job.kept(step)


def test_several_saves_are_in_flight_and_each_is_whole(tmp_path):
    job = Job(tmp_path, on_error="raise")
    job.rehearse()
    in_flight = 0
    for _ in range(8):
        job.step()
        in_flight = max(in_flight, job.ckpt._session._in_flight)
    job.ckpt.close()
    assert in_flight > 1
    for step in job.contents:
        assert stored(tmp_path, step) == job.kept(step)


def test_what_is_restored_is_what_was_saved_also_over_kernels_that_still_run(tmp_path):
    job = Job(tmp_path, on_error="raise")
    job.rehearse()
    job.step()
    job.ckpt.close()
    again = Job(tmp_path, seed=1)
    again.forward_backward()
    torch.cuda._sleep(LONG)
    again.optimizer.step()  # would overwrite what is read, if that did not wait
    assert again.ckpt.restore().step == 3
    assert again.content() == job.kept(3)
    again.ckpt.close()


def test_a_captured_optimizer_is_copied_at_once(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, capturable=True)
    batch = torch.randn(8, WIDTH, device="cuda")

    def step():
        optimizer.zero_grad(set_to_none=False)
        model(batch).square().mean().backward()
        optimizer.step()

    with unbroken.Checkpointer(tmp_path, {"m": model, "o": optimizer}, on_error="raise", keep=None) as ckpt:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
                ckpt.step()
                ckpt.save()
        torch.cuda.current_stream().wait_stream(side)
        ckpt.wait()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        expected = {}
        for _ in range(5):
            graph.replay()
            ckpt.step()
            expected[ckpt.global_step] = model.weight.detach().clone()
            ckpt.save()
    for number, weight in expected.items():
        assert stored(tmp_path, number)["m/weight"] == raw(weight.cpu())


def is_pinned(arena):
    return arena._bytes.is_pinned()


def test_arenas_are_pinned_until_they_grow_or_go():
    small, large = (lay_out([TensorSpec("a", torch.float32, (length,))]) for length in (10, 1 << 22))
    arena = Arena()
    arena.take_shape(small)
    arena.pin()
    assert arena.is_pinned and is_pinned(arena)
    arena.take_shape(large)
    assert not is_pinned(arena)
    arena.pin()
    assert is_pinned(arena)
    kept = arena._bytes
    del arena
    gc.collect()
    assert not kept.is_pinned()


def test_memory_that_cannot_be_pinned_leaves_no_error_behind():
    arena = Arena()
    arena.take_shape(lay_out([TensorSpec("a", torch.float32, (10,))]))
    held = cuda.Pin(arena._memory)
    arena.pin()  # the runtime refuses what is registered already
    assert held.is_held and not arena.is_pinned
    assert torch.ones(3, device="cuda").sum().item() == 3  # would raise that error
    held.release()


def test_probes_are_the_same_on_the_device_and_of_a_copy():
    dtypes = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex128)
    tensors = [torch.randn(1000, device="cuda").to(dtype) for dtype in dtypes] + [torch.empty(0, device="cuda")]
    there, here = RowProbes(tensors), RowProbes([tensor.cpu() for tensor in tensors])
    assert list(there.where_different(there.read().cpu(), here.read())) == []
    tensors[1].zero_()
    assert list(there.where_different(there.read().cpu(), here.read())) == [1]
