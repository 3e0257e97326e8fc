"""B053: a job that added up gradients resumed in an epoch as many times too high, and ended without a step."""

import pytest

pytest.importorskip("transformers")

from integrations.trainer_runs import train

SETTINGS = {"gradient_accumulation_steps": 4, "num_train_epochs": 10, "eval_strategy": "no"}
"""Epochs of 12 batches, so of 3 steps; 30 steps in all."""


def test_the_rest_of_the_steps_is_run(tmp_path):
    whole = train(0, 1, str(tmp_path / "whole"), SETTINGS)
    assert whole["step"] == 30
    train(0, 1, str(tmp_path / "run"), SETTINGS, broken_at=21)
    rest = train(0, 1, str(tmp_path / "run"), SETTINGS)
    assert rest["step"] == 30 and rest["epoch"] == 10
    assert len(rest["seen"]) in (10 * 4, 12 * 4), "from step 20, or from 18 if 20 was not durable yet"
    assert rest["weights"] == whole["weights"]
