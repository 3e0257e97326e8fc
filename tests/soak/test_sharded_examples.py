"""The examples of sharded models: struck and started again, started on other sizes, and in each other's directories."""

import os
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from soak.test_soak import EXAMPLES, assert_clean, tell
from unbroken.prove.launch import OUT, Command
from unbroken.prove.ledger import read_ledger
from unbroken.prove.run import Settings, prove

LAYOUTS = [
    ("fsdp2", 2),
    ("fsdp2", 4),
    ("fsdp2 --replicas 2", 4),
    ("fsdp1", 2),
    ("fsdp1", 4),
    ("fsdp1 --flat", 4),
    ("tensor_parallel", 2),
    ("tensor_parallel", 4),
    ("pipeline", 2),
    ("pipeline", 4),
]
NOT_CLIPPED = ("tensor_parallel", "pipeline")
"""Gradients lie on several meshes there, so these examples leave them as they are, and train otherwise."""
EVERY = 5
TOLERANCE = 1e-4
"""Of a loss on another number of ranks: the same numbers are added up in another order."""


def script_of(layout: str, directory: str, steps: int, every: int = EVERY, *options: str) -> tuple[str, ...]:
    name, *own = layout.split()
    script = str(EXAMPLES / f"{name}.py")
    return (script, "--out", directory, "--steps", str(steps), "--every", str(every), *own, *options)


def run(layout, nproc, directory, steps, ledger=None) -> str:
    """Start an example without dropout, whose random numbers are each rank's own; what it printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if ledger is not None:
        environment["UNBROKEN_LEDGER"] = str(ledger)
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc))
    script = script_of(layout, str(directory), steps, EVERY, "--dropout", "0")
    done = subprocess.run((*launcher, *script), env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def start_over_from(directory: Path, step: int, copy: Path) -> Path:
    """A copy of a run directory whose next start goes on from `step`."""
    shutil.copytree(directory, copy)
    command = (sys.executable, "-m", "unbroken.cli.main", "rollback", str(copy), "--step", str(step))
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return copy


def steps_of(ledger: Path) -> dict[int, tuple[list[int], float]]:
    """By step: all samples of all ranks, and the mean of the losses of those that have one."""
    lines: dict[int, list] = {}
    for (step, _), found in sorted(read_ledger(ledger).items()):
        lines.setdefault(step, []).append(found[0])
    return {
        step: (
            sorted(sample for line in found for sample in line.samples),
            statistics.mean(float.fromhex(line.loss) for line in found if line.loss is not None),
        )
        for step, found in lines.items()
    }


def final_of(output: str) -> str:
    """The digest of all weights."""
    return re.search(r"^final (\w{64})$", output, re.MULTILINE)[1]


def test_shards_of_two_ranks_of_which_one_is_lost_go_on_unchanged(tmp_path):
    command = Command(script_of("fsdp2", OUT, steps=8, every=3), 2)
    report = prove(Settings(command, 1, ("rank",), 1, 3, tmp_path, deadline_s=120.0))
    assert_clean(report, every=3)
    assert report.trials[0].strikes[0].restored > 0


@pytest.mark.slow  # its short twin is the one above
@pytest.mark.parametrize(("layout", "nproc"), LAYOUTS)
def test_kills_change_nothing(tmp_path, layout, nproc):
    command = Command(script_of(layout, OUT, steps=24), nproc)
    report = prove(Settings(command, 1, ("rank", "all"), 2, 0, tmp_path, deadline_s=300.0))
    tell(f"{layout} on {nproc}", report)
    assert_clean(report, EVERY)


@pytest.fixture(scope="module")
def whole_run(request, tmp_path_factory):
    """An example on four ranks, to its end: its name, and where its run directory and its ledger are."""
    directory = tmp_path_factory.mktemp("whole")
    run(request.param, 4, directory / "run", 20, directory / "ledger")
    return request.param, directory


def readers_in(layout: str) -> int:
    """How many ranks read the same samples."""
    return 2 if layout in NOT_CLIPPED else 1


@pytest.mark.slow  # its short twin is tests/sharded/test_layouts.py
@pytest.mark.parametrize(
    ("whole_run", "layout", "nproc"),
    [
        ("tensor_parallel" if layout in NOT_CLIPPED else "fsdp2", layout, nproc)
        for layout, nproc in [*LAYOUTS, ("fsdp2", 1)]
    ],
    indirect=["whole_run"],
)
def test_a_run_goes_on_in_another_size_or_layout_with_the_same_samples_and_losses(tmp_path, whole_run, layout, nproc):
    first, whole = whole_run
    directory = start_over_from(whole / "run", 10, tmp_path / "run")
    assert "restored step 10 " in run(layout, nproc, directory, 20, tmp_path / "ledger")
    expected, found = steps_of(whole / "ledger"), steps_of(tmp_path / "ledger")
    assert list(found) == list(range(11, 21))
    for step, (samples, loss) in found.items():
        assert sorted(samples * readers_in(first)) == sorted(expected[step][0] * readers_in(layout))
        assert loss == pytest.approx(expected[step][1], abs=TOLERANCE), step
    largest = max(abs(loss - expected[step][1]) for step, (_, loss) in found.items())
    print(f"{first} on 4 -> {layout} on {nproc}: losses of 10 steps differ by at most {largest:.1e}")


@pytest.mark.slow  # its short twin is tests/sharded/test_layouts.py
def test_each_layout_goes_on_with_the_weights_of_the_one_before(tmp_path):
    """Through all layouts in one directory. A start that has nothing left to do tells the weights that it restored."""
    step, final = EVERY, final_of(run(*LAYOUTS[0], tmp_path, EVERY))
    for layout in [*LAYOUTS[1:], LAYOUTS[0]]:
        output = run(*layout, tmp_path, step)
        assert f"restored step {step} " in output, layout
        assert final_of(output) == final, layout
        step += EVERY
        final = final_of(run(*layout, tmp_path, step))
