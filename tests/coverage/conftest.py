"""A training whose forgotten objects the search shall name."""

import sys

import pytest
import torch
from torch import nn

from unbroken.coverage.coverage import Coverage, find_uncovered


class Training:
    """A model with its optimizer, and what a Checkpointer of them does."""

    def __init__(self):
        self.others = find_uncovered({})  # left by other tests
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.registered = {"model": self.model, "optimizer": self.optimizer}
        self.coverage = None

    def begin(self, **more):
        """Training begins: the Checkpointer takes its look."""
        self.coverage = Coverage(self.registered | more)
        self.coverage.look()

    def forgotten(self, **more):
        """What is named at the first save, seen from the caller's frame."""
        known = {id(entry.value) for entry in self.others}
        registered = self.registered | more
        if self.coverage is not None:
            self.coverage.registered = registered  # as if the Checkpointer had been given all of it from the beginning
        found = find_uncovered(registered, sys._getframe(1))
        return [str(entry) for entry in found if id(entry.value) not in known]


@pytest.fixture
def run():
    return Training()
