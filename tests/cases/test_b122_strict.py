"""B122: keys that only the file had passed unnoticed, keys that only the model had failed, and neither could be chosen.

Right: by default both are an error that names them all, before anything changes. `restore(strict=False)` takes what
both have, leaves the rest as it is, and tells of both.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import unbroken

MISSING = r"missing in the checkpoint: 2 \(model/2\.weight, model/2\.bias\)"
EXTRA = r"only in the checkpoint: 2 \(model/1\.bias, model/1\.weight\)"


def layers(seed: int, *places: int) -> nn.Sequential:
    """Linear layers at some places of three."""
    torch.manual_seed(seed)
    model = nn.Sequential()
    for place in places:
        model.add_module(str(place), nn.Linear(3, 3))
    return model


@pytest.fixture
def saved(tmp_path):
    model = layers(1, 0, 1)
    with unbroken.Checkpointer(tmp_path, {"model": model}) as ckpt:
        ckpt.save()
    return model


@pytest.mark.parametrize(
    ("places", "texts"), [((0, 1, 2), [MISSING]), ((0,), [EXTRA]), ((0, 2), [MISSING, EXTRA])], ids=str
)
def test_what_is_missing_and_what_is_unexpected_is_told(tmp_path, saved, caplog, places, texts):
    model = layers(2, *places)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with unbroken.Checkpointer(tmp_path, {"model": model}) as ckpt, pytest.raises(unbroken.StateMismatch) as raised:
        ckpt.restore()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), "nothing was changed"
    with unbroken.Checkpointer(tmp_path, {"model": model}) as ckpt:
        ckpt.restore(strict=False)
    for text in texts:
        assert re.search(text, str(raised.value)), raised.value
        assert re.search("not restored: " + text, caplog.text), caplog.text
    for name, value in model.state_dict().items():
        assert torch.equal(value, saved.state_dict().get(name, before[name])), name
