"""B071: the resumed run goes on from the averaged weights instead of the raw ones.

The bug: the checkpoint was written in validation, while the average was swapped into the model, and held only what the
model held then. Right: raw weights and average are both in the state and come back exactly as they were live, in
whichever of the two places each lay; the swap back then gives the raw weights.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from rebuild import keep, put, weights


class Swap:
    """Exchanges a model's weights with its average, as evaluation code does; knows whether they are exchanged."""

    def __init__(self, model: nn.Module, average: AveragedModel) -> None:
        self.model, self.average, self.swapped = model, average, False

    @torch.no_grad()
    def exchange(self) -> None:
        for raw, averaged in zip(self.model.parameters(), self.average.module.parameters(), strict=True):
            kept = raw.clone()
            raw.copy_(averaged)
            averaged.copy_(kept)
        self.swapped = not self.swapped

    def state_dict(self):
        return {"swapped": self.swapped}

    def load_state_dict(self, state_dict):
        self.swapped = state_dict["swapped"]


def start(seed: int):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    return {"model": model, "ema": average, "optimizer": optimizer, "swap": Swap(model, average)}


def train(objects, begin: int, end: int) -> None:
    for step in range(begin, end):
        inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        objects["optimizer"].zero_grad()
        objects["model"](inputs).square().mean().backward()
        objects["optimizer"].step()
        objects["ema"].update_parameters(objects["model"])


def test_raw_weights_and_average_both_go_on_after_a_save_inside_the_swap():
    straight, before, after = start(0), start(0), start(99)
    train(straight, 0, 8)

    train(before, 0, 4)
    before["swap"].exchange()
    kept = keep(before)

    put(kept, after)
    assert after["swap"].swapped
    assert weights(after["model"]) == weights(before["model"])
    assert weights(after["ema"]) == weights(before["ema"])
    after["swap"].exchange()
    train(after, 4, 8)
    assert weights(after["model"]) == weights(straight["model"])
    assert weights(after["ema"]) == weights(straight["ema"])
    assert after["ema"].n_averaged.item() == 8


def test_a_save_outside_the_swap_goes_on_too():
    straight, before, after = start(0), start(0), start(99)
    train(straight, 0, 8)
    train(before, 0, 4)
    put(keep(before), after)
    train(after, 4, 8)
    assert weights(after["model"]) == weights(straight["model"])
    assert weights(after["ema"]) == weights(straight["ema"])
