"""B041: MultiStepLR resumed one epoch late.

The bug: the scheduler's counter or its `milestones` (a Counter with integer keys, which JSON turns into strings) came
back wrong, so the drop at epoch 4 came at epoch 5 or never. Right: the same learning rates as the straight run.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rebuild import keep, put


def start():
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=100)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[4, 6, 6], gamma=0.1)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def epochs(objects, count: int) -> list[float]:
    rates = []
    for _ in range(count):
        rates.append(objects["optimizer"].param_groups[0]["lr"])
        objects["optimizer"].step()
        objects["scheduler"].step()
    return rates


@pytest.mark.parametrize("killed_after", range(9))
def test_the_drop_comes_at_its_epoch_wherever_the_run_was_killed(killed_after):
    expected = epochs(start(), 9)
    before, after = start(), start()
    rates = epochs(before, killed_after)
    put(keep(before), after)
    assert rates + epochs(after, 9 - killed_after) == expected
    assert expected[3] == 100 and expected[4] == 10.0 and after["scheduler"].milestones == {4: 1, 6: 2}
