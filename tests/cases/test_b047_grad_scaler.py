"""B047: after an fp16 resume the scaler is back at 65536.

The bug: the scaler was not saved, so the resumed run overflowed at its first step, skipped the optimizer step, and the
learning rate went out of step. Right: scale, growth tracker and the number of real optimizer steps are equal.
"""

from __future__ import annotations

import torch
from torch import nn

from rebuild import keep, put, weights

SCALE = 256.0


class Counted(torch.optim.SGD):
    """Counts the steps that were really made."""

    made = 0

    def step(self, closure=None):
        self.made += 1
        return super().step(closure)


def start():
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = Counted(model.parameters(), 1e-4, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": torch.amp.GradScaler("cpu")}


def train(objects, begin: int, end: int) -> list[tuple[float, int, float]]:
    """The gradient is 512 at most: its product with 65536 overflows float16, that with 256 does not."""
    scaler = objects["scaler"]
    seen = []
    for step in range(begin, end):
        objects["optimizer"].zero_grad()
        loss = objects["model"](torch.full((1, 2), 100.0 + step)).sum()
        scaler.scale(loss).backward()
        for parameter in objects["model"].parameters():
            parameter.grad = parameter.grad.half().float()
        scaler.step(objects["optimizer"])
        scaler.update()
        objects["scheduler"].step()
        state = scaler.state_dict()
        seen.append((state["scale"], state["_growth_tracker"], objects["optimizer"].made))
    return seen


def settled():
    objects = start()
    objects["scaler"] = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=5)
    return objects


def test_scale_growth_and_real_steps_are_those_of_the_straight_run():
    straight, before, after = settled(), settled(), start()
    expected = train(straight, 0, 8)
    train(before, 0, 3)
    assert before["scaler"].get_scale() == SCALE
    after["optimizer"].made = before["optimizer"].made
    put(keep(before), after)
    assert train(after, 3, 8) == expected[3:]
    assert weights(after["model"]) == weights(straight["model"])


def test_a_scaler_at_its_default_would_have_skipped_a_step():
    """The other side: without the restore this case does go wrong."""
    forgotten = start()
    assert train(forgotten, 3, 4)[0][2] == 0
