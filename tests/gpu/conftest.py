"""Tests that need a CUDA device: `pytest -m gpu tests/gpu`."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _device():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
