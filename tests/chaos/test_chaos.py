"""`ckpt-chaos`, a fault harness by others, on our examples: it kills the job at each change of a file and compares.

`make chaos` runs all of its modes on one rank and on either of two; it starts the job twice for each point, so its
short twin in the default run is `tests/crash`. Its events are Python's audit events, so it tears only
files that `torch.save`, safetensors or `open()` write, and it knows no directory fsync; `tests/crash` does. It
marks as PLAN DRIFT every point at a temporary file, whose name is a random number in each run.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
MODES = "before,torn,term,unsynced"
FAIL_ON = "HARD_FAIL,SILENT_DIVERGENCE,LOST_WORK,CONTROL_FAIL"

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ckpt_chaos") is None, reason="ckpt-chaos is not installed")


def run(work: Path, modes: str, ranks: int, crash_rank: int, most: int, example: str = "ddp") -> Counter[str]:
    """Crash points that passed, by mode; fails if one did not."""
    command = [
        sys.executable,
        "-m",
        "ckpt_chaos",
        "run",
        "--work",
        str(work / "runs"),
        "--junit",
        str(work / "junit.xml"),
    ]
    command += ["--ranks", str(ranks), "--crash-rank", str(crash_rank), "--modes", modes, "--max-points", str(most)]
    # A manifest holds times, so its size varies. Three checkpoints, as many as the example keeps.
    command += ["--checkpoint-glob", "{out}/step-*", "--ckpt-ignore-size", "--step-regex", r"restored step (\d+)"]
    command += ["--result-file", "{out}/final.txt", "--fail-on", FAIL_ON, "--timeout", "300", "--"]
    command += [sys.executable, str(EXAMPLES / f"{example}.py"), "--out", "{out}", "--steps", "6", "--every", "2"]
    # 0.1.8 tells only its `bench` targets which rank to strike: without this, `--crash-rank 1` strikes nobody.
    # And it sets all that torchrun sets but this, by which Lightning is told how its ranks lie on nodes.
    environment = {**os.environ, "CKPT_CHAOS_CRASH_RANK": str(crash_rank), "LOCAL_WORLD_SIZE": str(ranks)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^PASS: \d+$", done.stdout, re.MULTILINE), done.stdout
    assert "<failure" not in (work / "junit.xml").read_text()
    points = [json.loads(path.read_text()) for path in (work / "runs").glob("pt_*/result.json")]
    struck = [point for point in points if "point" in point]
    # A job that gets SIGTERM at its last step ends well, which is no crash; all others must have been killed.
    assert all(point["crashed"] for point in struck if point["point"][1] != "term"), done.stdout
    return Counter(point["point"][1] for point in struck)


@pytest.mark.slow
def test_a_kill_in_a_save_loses_nothing_by_the_verdict_of_ckpt_chaos(tmp_path):
    assert run(tmp_path, "unsynced", ranks=1, crash_rank=0, most=2) == {"unsynced": 2}


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "crash_rank"), [(1, 0), (2, 0), (2, 1)])
def test_every_mode_of_ckpt_chaos_at_every_file_boundary_passes(tmp_path, ranks, crash_rank):
    passed = run(tmp_path, MODES, ranks, crash_rank, most=1000)
    print(f"{ranks} ranks, rank {crash_rank} struck: {dict(passed)}")
    assert {"before", "term", "unsynced"} <= passed.keys()


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "crash_rank"), [(1, 0), (2, 0)])
@pytest.mark.parametrize("example", ["transformers_trainer", "lightning_trainer"])
def test_the_examples_of_frameworks_pass_at_file_boundaries(tmp_path, example, ranks, crash_rank):
    """Spread over all of them: each takes two starts of a framework."""
    passed = run(tmp_path, MODES, ranks, crash_rank, most=24, example=example)
    print(f"{example}, {ranks} ranks: {dict(passed)}")
    assert {"before", "unsynced"} <= passed.keys()
