"""B090: the newest checkpoint was deleted at once, because rotation went by modification times.

Right: order by the recorded step. Also B093 (a limit of one deleted everything), B094 and B167 (text order puts 10
before 2, and 500 after 2500).
"""

from __future__ import annotations

import os
from contextlib import suppress

import pytest
import torch

import unbroken


@pytest.mark.parametrize("times", ["equal", "reversed"])
def test_the_newest_by_step_stay_whatever_the_times_say(tmp_path, times):
    ckpt = unbroken.Checkpointer(
        tmp_path, {"w": torch.zeros(1)}, every=unbroken.Every(steps=1), keep=unbroken.Keep(last=3)
    )
    ckpt.restore()
    for step in range(1, 13):
        for path in tmp_path.glob("step-*"):
            age = 0 if times == "equal" else int(path.name.removeprefix("step-"))
            with suppress(FileNotFoundError):  # the last step's sweep is under way
                os.utime(path, (1_000_000 - age, 1_000_000 - age))
        ckpt.step()
        ckpt.wait()
        assert (tmp_path / f"step-{step}/manifest.json").exists()
    ckpt.close()
    assert {path.name for path in tmp_path.glob("step-*")} == {"step-10", "step-11", "step-12"}
    assert unbroken.Checkpointer(tmp_path, {"w": torch.zeros(1)}).restore().step == 12


def test_a_limit_of_one_always_leaves_one(tmp_path):
    ckpt = unbroken.Checkpointer(
        tmp_path, {"w": torch.zeros(1)}, every=unbroken.Every(steps=1), keep=unbroken.Keep(last=1)
    )
    ckpt.restore()
    for _ in range(3):
        ckpt.step()
        ckpt.wait()
        assert len(list(tmp_path.glob("step-*/manifest.json"))) >= 1
    ckpt.close()


def test_hand_made_and_padded_names_do_not_win(tmp_path):
    """B168: padding grew with the budget, and text order preferred the older name."""
    ckpt = unbroken.Checkpointer(tmp_path, {"w": torch.zeros(1)}, every=unbroken.Every(steps=100), keep=None)
    ckpt.restore()
    for _ in range(200):
        ckpt.step()
    ckpt.close()
    (tmp_path / "step-100").rename(tmp_path / "step-0900000")
    for name in ("step-best", "handpicked"):
        (tmp_path / name).mkdir()
    assert unbroken.Checkpointer(tmp_path, {"w": torch.zeros(1)}).restore().step == 200
