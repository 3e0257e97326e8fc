"""The example of Lightning Fabric: struck and started again, and started on other numbers of ranks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("lightning")

from soak.test_sharded_examples import TOLERANCE, steps_of
from soak.test_soak import EXAMPLES, assert_clean, tell
from unbroken.prove.launch import OUT, Command
from unbroken.prove.run import Settings, prove

SCRIPT = str(EXAMPLES / "fabric_loop.py")
EVERY = 4
pytestmark = pytest.mark.slow  # their short twins are in tests/integrations/test_fabric.py


@pytest.mark.parametrize(
    ("nproc", "options"),
    [
        (1, ()),
        (2, ()),
        (4, ()),
        (2, ("--precision", "bf16-mixed")),
        (2, ("--strategy", "fsdp2")),
        (4, ("--strategy", "fsdp2")),
    ],
)
def test_twenty_kills_change_nothing(tmp_path, nproc, options):
    command = Command((SCRIPT, "--out", OUT, "--steps", "30", "--every", str(EVERY), *options), nproc)
    report = prove(Settings(command, 1, ("rank", "all", "save", "restore"), 20, 0, tmp_path, deadline_s=300.0))
    tell(f"fabric_loop {' '.join(options)} on {nproc}", report)
    assert_clean(report, EVERY)


def start(nproc: int, steps: int, directory, ledger, *options: str) -> str:
    """Start the example without dropout, whose random numbers are each rank's own; what it printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "UNBROKEN_LEDGER": str(ledger)}
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc))
    script = (SCRIPT, "--out", str(directory), "--steps", str(steps), "--every", "1", "--dropout", "0", *options)
    done = subprocess.run((*launcher, *script), env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("options", [(), ("--strategy", "fsdp2")])
def test_two_ranks_become_one_and_two_again_in_the_middle_of_an_epoch(tmp_path, options):
    start(2, 20, tmp_path / "whole", tmp_path / "expected", *options)
    for nproc, steps in [(2, 4), (1, 8), (2, 20)]:
        start(nproc, steps, tmp_path / "run", tmp_path / "found", *options)
    expected, found = steps_of(tmp_path / "expected"), steps_of(tmp_path / "found")
    assert list(found) == list(range(1, 21))
    for step, (samples, loss) in found.items():
        assert samples == expected[step][0], step
        assert loss == pytest.approx(expected[step][1], abs=TOLERANCE), step
