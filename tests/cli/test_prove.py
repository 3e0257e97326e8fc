"""`unbroken prove` as a command; what a proof finds is tried in tests/prove/test_run.py."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import unbroken
from unbroken.cli.main import app

FAKE = str(Path(__file__).parents[1] / "prove" / "fake_training.py")
PROVE = [sys.executable, "-m", "unbroken.cli.main", "prove"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--faults", "rank,fire", "--", FAKE], "give some of rank, node, all"),
        (["--faults", ",", "--", FAKE], "give some of rank, node, all"),
        (["--trial", "4", "--trials", "3", "--", FAKE], "there are only 3"),
        (["--", "python", FAKE], "give the script alone"),
        (["--", "torchrun", FAKE], "give the script alone"),
        (["--", "no/such/script.py"], "there is no such script"),
    ],
)
def test_wrong_use_is_told_before_anything_runs(arguments, message):
    error = CliRunner().invoke(app, ["prove", *arguments]).exception
    assert isinstance(error, unbroken.UsageError)
    assert message in str(error)


def test_a_fail_exits_with_one_and_gives_the_command_that_repeats_it(tmp_path):
    arguments = [
        "--nproc",
        "1",
        "--faults",
        "rank",
        "--trials",
        "2",
        "--seed",
        "3",
        "--json",
        "--",
        FAKE,
        "--forget",
        "optimizer",
    ]
    first = subprocess.run([*PROVE, "--dir", tmp_path / "1", *arguments], capture_output=True, text=True, timeout=120)
    assert first.returncode == 1, first.stderr
    found = json.loads(first.stdout)
    assert found["verdict"] == "FAIL"
    trial = found["trials"][-1]
    assert trial[
        "repeat"
    ] == f"unbroken prove --nodes 1 --nproc 1 --faults rank --trials 2 --seed 3 --trial 1 -- {FAKE} " + (
        "--forget optimizer"
    )
    assert trial["difference"]["step"] == trial["faults"][0]["restored"] + 1
    assert Path(trial["directory"]).is_relative_to(tmp_path / "1")

    again = shlex.split(trial["repeat"])[2:]
    second = subprocess.run([*PROVE, "--dir", tmp_path / "2", *again], capture_output=True, text=True, timeout=120)
    assert second.returncode == 1, second.stderr
    assert "FAIL" in second.stdout and "repeat it: unbroken prove" in second.stdout


def test_a_pass_exits_with_zero_and_leaves_no_directory(tmp_path):
    done = subprocess.run(
        [*PROVE, "--nproc", "1", "--faults", "all", "--trials", "1", "--", FAKE],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "TMPDIR": str(tmp_path), "NO_COLOR": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "PASS: 1 trial" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_terminated_proof_ends_its_job_and_removes_its_directory(tmp_path):
    proof = subprocess.Popen(
        [*PROVE, "--nproc", "1", "--", FAKE, "--steps", "100000"],
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    try:
        assert proof.stderr.readline().startswith(b"undisturbed run")
        proof.send_signal(signal.SIGTERM)
        assert proof.wait(60) == 128 + signal.SIGTERM
    finally:
        proof.kill()
        proof.communicate()
    assert list(tmp_path.iterdir()) == []
