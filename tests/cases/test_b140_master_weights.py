"""B140: fp32 master weights were made anew from the bf16 weights at each resume, a small drift every time.
B141: the option that keeps master weights was off after a resume, without a word, and norms froze at 1.0.

Right: masters of a wrapper, which are no parameters of the model, are equal bit for bit after resumes at every fifth
step. A job that keeps them otherwise than it did is told, or keeps them as it did; nothing is cast in silence.
(Masters in an optimizer's state: `test_around_restoring.py`.)
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import unbroken
from sharded.models import raw

STEPS, RESUME_EVERY = 15, 5


class Job:
    """A bf16 model whose optimizer trains fp32 copies, or the bf16 weights themselves."""

    def __init__(self, seed: int, masters: bool) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).bfloat16()
        self.masters = nn.ParameterList(p.detach().float() for p in self.model.parameters()) if masters else None
        trained = self.masters if self.masters is not None else self.model.parameters()
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4)

    @property
    def state(self) -> dict[str, object]:
        found = {"model": self.model, "optimizer": self.optimizer}
        return found if self.masters is None else {**found, "masters": self.masters}

    def step(self, step: int) -> None:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).bfloat16()
        self.model(x).square().sum().backward()
        for parameter, master in zip(self.model.parameters(), self.masters, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        self.optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(self.model.parameters(), self.masters, strict=True):
                parameter.copy_(master)

    def content(self) -> list[bytes]:
        state = [item for p in self.masters for item in self.optimizer.state[p].values()]
        return [raw(item) for item in (*self.model.parameters(), *self.masters, *state)]


def train(path, until, seed=1):
    job = Job(seed, masters=True)
    with unbroken.Checkpointer(path, job.state) as ckpt:
        ckpt.restore()
        while ckpt.global_step < until:
            job.step(ckpt.global_step)
            ckpt.step()
        ckpt.save()
    return job


def test_masters_are_bit_equal_after_a_resume_at_every_fifth_step(tmp_path):
    straight = train(tmp_path / "straight", STEPS)
    rounded = [p.float() for p in straight.model.parameters()]
    assert any(not torch.equal(master, p) for master, p in zip(straight.masters, rounded, strict=True)), (
        "no drift to see"
    )
    for until in range(RESUME_EVERY, STEPS + 1, RESUME_EVERY):
        resumed = train(tmp_path / "run", until, seed=until // RESUME_EVERY)
    assert resumed.content() == straight.content()


@pytest.mark.parametrize("saved_with", [True, False])
def test_b141_masters_that_are_switched_on_or_off_are_refused(tmp_path, saved_with):
    saved, live = Job(1, masters=saved_with), Job(2, masters=not saved_with)
    with unbroken.Checkpointer(tmp_path, saved.state) as ckpt:
        ckpt.save()
    before = [raw(p) for p in live.model.parameters()]
    with (
        unbroken.Checkpointer(tmp_path, live.state) as ckpt,
        pytest.raises(unbroken.StateMismatch, match=r"masters"),
    ):
        ckpt.restore()
    assert [raw(p) for p in live.model.parameters()] == before, "nothing was changed"


class WithMasters(torch.optim.Optimizer):
    """Its option `master` is in the groups, and the masters in the state."""

    def __init__(self, parameters, master):
        super().__init__(parameters, {"lr": 1e-3, "master": master})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                trained = self.state[p].setdefault("master", p.float()) if group["master"] else p
                trained -= group["lr"]
                p.copy_(trained)


def test_b141_an_option_of_the_optimizer_comes_back_with_its_masters(tmp_path):
    for start, master in enumerate((True, False)):
        weights = nn.Parameter(torch.ones(4).bfloat16())
        optimizer = WithMasters([weights], master)
        with unbroken.Checkpointer(tmp_path, {"weights": weights, "optimizer": optimizer}) as ckpt:
            assert (ckpt.restore() is None) == (start == 0)
            for _ in range(4):
                optimizer.step()
            ckpt.step()
            ckpt.save()
        assert optimizer.param_groups[0]["master"] is True
        assert optimizer.state[weights]["master"].dtype is torch.float32
    expected = torch.ones(4)
    for _ in range(8):
        expected -= 1e-3
    assert torch.equal(optimizer.state[weights]["master"], expected)
    assert torch.equal(weights, expected.bfloat16()) and not torch.equal(weights, torch.ones(4).bfloat16())
