"""Settings for all tests."""

import os

from hypothesis import settings

# Before torch starts its threads: two cores, several ranks.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("default", deadline=None, print_blob=True)
settings.load_profile("default")
