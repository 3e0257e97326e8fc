"""The examples of Lightning's Trainer and of Fabric, struck at random and started again."""

import importlib.util

import pytest

from soak.test_soak import EXAMPLES, assert_clean, tell
from unbroken.prove.launch import OUT, Command
from unbroken.prove.run import Settings, prove

pytestmark = [
    pytest.mark.slow,  # their short twins, in tests/integrations, run in processes that live on
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed"),
]
EVERY = 5


@pytest.mark.parametrize("nproc", [2, 4])
@pytest.mark.parametrize("example", ["lightning_trainer", "lightning_trainer --strategy fsdp2", "fabric_loop"])
def test_kills_change_nothing(tmp_path, example, nproc):
    name, *options = example.split()
    script = (str(EXAMPLES / f"{name}.py"), "--out", OUT, "--steps", "24", "--every", str(EVERY), *options)
    settings = Settings(Command(script, nproc), 1, ("rank", "save", "all"), 3, 0, tmp_path, deadline_s=300.0)
    report = prove(settings)
    tell(f"{example} on {nproc}", report)
    assert_clean(report, EVERY)
