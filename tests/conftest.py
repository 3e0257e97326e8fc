"""Settings for all tests."""

import gc
import os

import pytest
from hypothesis import settings

from processes import Ranks

# Before torch starts its threads: two cores, several ranks.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("default", deadline=None, print_blob=True)
settings.load_profile("default")


@pytest.fixture(scope="session", autouse=True)
def _small_heap():
    """Each Checkpointer walks all objects in search of forgotten state: half a million with torch's compiler.

    A first optimizer imports that; what is there after it is left out of the walks. Nothing of a test's own is.
    """
    import torch._dynamo  # noqa: F401

    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def ranks():
    """Four processes that run multi-rank cases; started once."""
    group = Ranks(4)
    yield group
    group.stop()
