"""Settings for all tests."""

import os

import pytest
from hypothesis import settings

from processes import Ranks

# Before torch starts its threads: two cores, several ranks.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("default", deadline=None, print_blob=True)
settings.load_profile("default")


@pytest.fixture(scope="session")
def ranks():
    """Four processes that run multi-rank cases; started once."""
    group = Ranks(4)
    yield group
    group.stop()
