"""A place where thousands of small directories can be made."""

import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def base(tmp_path):
    """A directory in memory if there is one."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as directory:
        yield Path(directory)
