"""Snapshots that are copied while training goes on: whatever happens meanwhile, each checkpoint is of one step."""

import random
import threading

import pytest
import torch
from torch import nn

import unbroken
from rebuild import raw
from unbroken.errors import SaveFailed, UsageError
from unbroken.overlap import Copier, Copy
from unbroken.store.local import LocalStore

WAIT_S = 30


class Net(nn.Module):
    def __init__(self, seed=0):
        torch.manual_seed(seed)
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x):
        return self.frozen(self.norm(self.inner(x)))


class Job:
    """A job whose steps are told apart by every tensor of its state."""

    def __init__(self, path, seed=0, **options):
        self.model = Net(seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.1)
        state = {"model": self.model, "optimizer": self.optimizer}
        self.ckpt = unbroken.Checkpointer(path, state, keep=None, **options)
        self.contents = {}

    def forward_backward(self):
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 6)).square().sum().backward()

    def step(self, save=True):
        self.optimizer.step()
        self.ckpt.step()
        if save:
            self.contents[self.ckpt.global_step] = self.content()
            self.ckpt.save()

    def content(self):
        tensors = {**self.model.state_dict()}
        for name, parameter in self.model.named_parameters():
            tensors |= {f"{name}/{key}": item for key, item in self.optimizer.state[parameter].items()}
        return {name: raw(tensor) for name, tensor in tensors.items()}

    def rehearse(self):
        """The first save, which copies all at once, and the fence after it."""
        self.forward_backward()
        self.step()
        self.forward_backward()
        self.step(save=False)
        self.forward_backward()


@pytest.fixture
def gate(monkeypatch):
    """Copies begin when it is opened."""
    opened = threading.Event()
    run = Copy.run

    def wait_and_run(copy):
        assert opened.wait(WAIT_S)
        run(copy)

    monkeypatch.setattr(Copy, "run", wait_and_run)
    yield opened
    opened.set()


def restored(path, step=None):
    job = Job(path, seed=1)
    found = job.ckpt.restore()
    assert step is None or found.step == step
    content = job.content()
    job.ckpt.close()
    return content


def test_the_optimizer_waits_for_the_copy_and_nothing_else_does(tmp_path, gate, monkeypatch):
    job = Job(tmp_path, on_error="raise")
    job.rehearse()
    reached = threading.Event()
    fence = Copier._fence

    def tell_and_wait(copier):
        reached.set()
        fence(copier)

    monkeypatch.setattr(Copier, "_fence", tell_and_wait)
    job.step()  # returns, though nothing is copied yet
    reached.clear()
    job.forward_backward()  # changes the statistics of the batch norm and the gradients
    before = raw(job.model.inner.weight)
    stepping = threading.Thread(target=job.optimizer.step)
    stepping.start()
    assert reached.wait(WAIT_S)
    assert raw(job.model.inner.weight) == before
    gate.set()
    stepping.join(WAIT_S)
    assert raw(job.model.inner.weight) != before
    job.ckpt.close()
    assert restored(tmp_path, 3) == job.contents[3]


@pytest.mark.parametrize("what", ["weight", "moment", "counter"])
def test_what_changes_without_an_optimizer_step_costs_that_save_and_is_copied_at_once_later(tmp_path, gate, what):
    job = Job(tmp_path)
    job.rehearse()
    job.step()
    state = job.optimizer.state[job.model.inner.weight]
    changing = {"weight": job.model.inner.weight, "moment": state["exp_avg"], "counter": state["step"]}[what].detach()
    changing.add_(1)
    gate.set()
    name = {"weight": "model/inner.weight"}.get(what, "optimizer/state/model/inner.weight/")
    with pytest.raises(SaveFailed, match=f"{name}.* changed while being copied"):
        job.ckpt.wait()
    gate.clear()
    job.forward_backward()
    gate.set()  # the fence of the next step is passed
    job.step()
    changing.add_(1)
    job.forward_backward()
    job.ckpt.close()
    assert restored(tmp_path, 4) == job.contents[4]


def test_a_single_element_that_is_written_at_each_step_is_found_by_the_first_save_and_costs_none(tmp_path, gate):
    """Dead entries of a codebook, a padding row, weights that are clipped: through `.data`, which moves no counter."""
    job = Job(tmp_path, on_error="raise")
    for _ in range(4):
        job.forward_backward()
        job.step()
        job.model.inner.weight.data[2, 3] = job.ckpt.global_step
        gate.set()
        job.ckpt.wait()
        gate.clear()
    gate.set()
    job.ckpt.close()
    assert restored(tmp_path, 4) == job.contents[4]


def test_a_write_that_began_before_the_end_of_the_copy_is_found(tmp_path, monkeypatch):
    """It may have torn a tensor between the elements that are looked at."""
    job = Job(tmp_path)
    job.rehearse()
    copy_then = torch._foreach_copy_

    def copy_and_write(targets, sources, **options):
        copy_then(targets, sources, **options)
        if threading.current_thread().name == "unbroken-copier" and any(t.shape == (6, 6) for t in targets):
            job.model.inner.weight.data[0, 0] += 1  # behind the copy

    monkeypatch.setattr(torch, "_foreach_copy_", copy_and_write)
    job.step()
    with pytest.raises(SaveFailed, match=r"model/inner.weight.* changed while being copied"):
        job.ckpt.wait()


def test_weights_that_are_exchanged_through_data_cost_that_save(tmp_path, gate):
    """As libraries for averages do it around an evaluation; it moves no version counter."""
    job = Job(tmp_path)
    job.rehearse()
    job.step()
    weight = job.model.inner.weight
    kept = weight.detach().clone()
    weight.data.copy_(kept * 0.5)
    gate.set()
    with pytest.raises(SaveFailed, match=r"model/inner.weight.* changed while being copied"):
        job.ckpt.wait()
    weight.data.copy_(kept)
    gate.clear()
    job.forward_backward()
    gate.set()
    job.step()
    weight.data.copy_(kept)
    job.forward_backward()
    job.ckpt.close()
    assert restored(tmp_path, 4) == job.contents[4]


def test_weights_that_are_exchanged_and_back_before_they_are_copied_cost_nothing(tmp_path, gate):
    job = Job(tmp_path, on_error="raise")
    job.rehearse()
    job.step()
    kept = job.model.inner.weight.detach().clone()
    job.model.inner.weight.data.copy_(kept * 0.5)
    job.model.inner.weight.data.copy_(kept)
    gate.set()
    job.ckpt.wait()
    assert restored(tmp_path, 3) == job.contents[3]


def test_a_storage_that_is_replaced_meanwhile_is_saved_as_it_was(tmp_path, gate):
    job = Job(tmp_path, on_error="raise")
    job.rehearse()
    job.step()
    job.model.inner.weight.data = torch.zeros(6, 6)
    gate.set()
    job.ckpt.wait()
    assert restored(tmp_path, 3) == job.contents[3]


def test_weights_that_forward_changes_are_found_by_the_first_save_and_cost_none(tmp_path):
    """`max_norm` renormalises rows of an embedding in place, in forward."""
    embedding = nn.Embedding(10, 4, max_norm=0.5)
    optimizer = torch.optim.SGD(embedding.parameters(), 5.0, momentum=0.9)
    with unbroken.Checkpointer(tmp_path, {"e": embedding, "o": optimizer}, on_error="raise", keep=None) as ckpt:
        for step in range(6):
            embedding(torch.arange(step, step + 4)).sum().backward()
            optimizer.step()
            ckpt.step()
            ckpt.save()
            kept = raw(embedding.weight)
    again = nn.Embedding(10, 4, max_norm=0.5)
    optimizer = torch.optim.SGD(again.parameters(), 5.0, momentum=0.9)
    assert unbroken.Checkpointer(tmp_path, {"e": again, "o": optimizer}).restore().step == 6
    assert raw(again.weight) == kept


def test_without_a_fence_nothing_is_left_to_be_copied(tmp_path, gate):
    """The gate stays closed: any copy that was left would wait for ever."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with unbroken.Checkpointer(tmp_path / "a", {"m": model, "o": optimizer}, on_error="raise") as ckpt:
        for _ in range(3):
            model(torch.ones(1, 3)).sum().backward()
            for parameter in model.parameters():  # by hand
                parameter.data.add_(parameter.grad, alpha=-0.1)
            ckpt.step()
            ckpt.save()
            ckpt.wait()
    job = Job(tmp_path / "b", on_error="raise", snapshot="block")
    job.rehearse()
    job.step()
    job.ckpt.wait()
    assert restored(tmp_path / "b", 3) == job.contents[3]


def test_the_fence_goes_with_the_checkpointer(tmp_path):
    from torch.optim import optimizer as torchs

    before = len(torchs._global_optimizer_pre_hooks)
    job = Job(tmp_path)
    job.rehearse()
    assert len(torchs._global_optimizer_pre_hooks) == before + 2  # the fence, and the writer that gives way
    job.ckpt.close()
    assert len(torchs._global_optimizer_pre_hooks) == before


def test_another_word_than_overlap_or_block_is_refused(tmp_path):
    with pytest.raises(UsageError, match='give "overlap" or "block"'):
        unbroken.Checkpointer(tmp_path, {"m": nn.Linear(1, 1)}, snapshot="fast")


@pytest.mark.parametrize("seed", range(3))
def test_every_checkpoint_is_of_one_step_whatever_is_done_at_the_worst_moment(tmp_path, monkeypatch, seed):
    """Between a save and the end of its copy: weights written (also unseen), storages swapped, buffers changed.

    The disk is slow: the file of a save is begun when the loop has come to the next one.
    """
    choice = random.Random(seed)
    begin = threading.Semaphore(0)
    run = Copy.run

    def wait_and_run(copy):
        assert begin.acquire(timeout=WAIT_S)
        run(copy)

    monkeypatch.setattr(Copy, "run", wait_and_run)
    disk = threading.Semaphore(0)
    create = LocalStore.create_in_parts

    def wait_and_create(store, name, parts):
        assert not name.endswith(".safetensors") or disk.acquire(timeout=WAIT_S)
        create(store, name, parts)

    job = Job(tmp_path)
    monkeypatch.setattr(LocalStore, "create_in_parts", wait_and_create)
    weights = [job.model.inner.weight, job.model.inner.bias, job.model.norm.weight]

    def write():
        with torch.no_grad():
            choice.choice(weights).mul_(1.01)

    def swap():
        weight = choice.choice(weights)
        weight.data = weight.detach() * 1.02

    def exchange():
        choice.choice(weights).data.mul_(1.03)

    def buffers():
        job.model.norm.running_mean.add_(1)

    actions = [write, swap, exchange, buffers, job.forward_backward, lambda: None, lambda: None, lambda: None]
    for _ in range(40):
        job.forward_backward()
        job.step()
        disk.release()
        for _ in range(choice.randrange(3)):
            choice.choice(actions)()
        begin.release()
        if choice.random() < 0.3:
            choice.choice(actions)()
        if choice.random() < 0.5:
            job.ckpt._session.wait()
    job.ckpt._session.wait()
    committed = sorted(int(path.parent.name.partition("-")[2]) for path in tmp_path.glob("step-*/manifest.json"))
    job.ckpt.close()
    assert len(committed) > 20, "of 40; those that were written into while being copied fail"
    for step in reversed(committed):
        assert restored(tmp_path, step) == job.contents[step]
        for path in (tmp_path / f"step-{step}").iterdir():
            path.unlink()
