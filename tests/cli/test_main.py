"""The command as a user calls it: exit codes, errors on stderr in one place, completion, pipes, narrow terminals."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
import typer

import unbroken
from unbroken.cli.main import app, main
from unbroken.cli.run import complete_step

COMMANDS = ["ls", "show", "verify", "diff", "prune", "rollback", "prove"]
COMMAND = [sys.executable, "-m", "unbroken.cli.main"]


def call(monkeypatch, *arguments):
    """Exit code of `unbroken ARGUMENTS`."""
    monkeypatch.setattr(sys, "argv", ["unbroken", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        main()
    return left.value.code or 0


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Steps 2, 4 and 40 of a small state."""
    path = tmp_path_factory.mktemp("main") / "run"
    with unbroken.Checkpointer(path, {"w": torch.arange(1000.0)}, keep=None) as ckpt:
        ckpt.restore()
        for step in range(1, 41):
            ckpt.step()
            if step in (2, 4, 40):
                ckpt.save()
    return path


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_what_is_not_checked_and_the_exit_codes(monkeypatch, capsys, command):
    assert call(monkeypatch, command, "--help") == 0
    text = capsys.readouterr().out
    assert "Example:" in text
    assert f"unbroken {command} " in text
    assert re.search(r"(does not|neither) (check|compare|delete|shown)", " ".join(text.split()))
    assert "Exit codes:" in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_version_is_that_of_the_package(monkeypatch, capsys):
    assert call(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"unbroken {metadata.version('unbroken')}\n"


def test_an_error_of_the_library_is_one_line_on_stderr_with_its_exit_code(monkeypatch, capsys, tmp_path):
    assert call(monkeypatch, "ls", tmp_path / "nothing") == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == (
        f"unbroken: {tmp_path / 'nothing'} is not a directory; give the run directory that a Checkpointer was given\n"
    )


@pytest.mark.parametrize(
    "arguments", [["ls"], ["unknown"], ["show", "--no-such-option", "x"], ["prove"], ["diff", "a"], ["rollback", "a"]]
)
def test_wrong_use_exits_with_two(monkeypatch, capsys, arguments):
    assert call(monkeypatch, *arguments) == 2
    assert capsys.readouterr().err


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
def test_nothing_is_written_to_a_full_disk_and_that_is_said(run, command):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*COMMAND, command, run], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr == "unbroken: No space left on device\n"


@pytest.mark.parametrize("arguments", [["show"], ["show", "--json"], ["verify"]])
def test_a_reader_that_goes_away_ends_the_command_quietly(run, arguments):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*COMMAND, *arguments, run], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_closed_stdout_is_no_traceback(run):
    line = f"{shlex.join(COMMAND)} ls {run} >&-"
    done = subprocess.run(["sh", "-c", line], stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_no_column_loses_its_text_in_a_narrow_terminal(monkeypatch, capsys, run):
    for columns in ("20", "1"):
        monkeypatch.setenv("COLUMNS", columns)
        for command, words in (("ls", ["abandoned", "good"]), ("show", ["rng/numpy/state/key", "float32"])):
            assert call(monkeypatch, command, run) == 0
            text = capsys.readouterr().out
            assert any(word in text for word in words), text
            assert "\u2026" not in text.partition("values")[0]


def test_nothing_is_coloured_where_no_colour_is_wanted(monkeypatch, capsys, run):
    monkeypatch.setenv("FORCE_COLOR", "1")
    call(monkeypatch, "ls", run)
    assert "\x1b[1m" in capsys.readouterr().out, "a terminal gets a bold header"
    monkeypatch.setenv("NO_COLOR", "1")
    call(monkeypatch, "ls", run)
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", capsys.readouterr().out)


def test_a_directory_that_does_not_speak_utf8_is_no_traceback(monkeypatch, capsys, run, tmp_path):
    strange = tmp_path / os.fsdecode(b"run\xff\x1b[2J")
    shutil.copytree(run, strange)
    for command in ("ls", "show", "verify"):
        for json_too in ([], ["--json"]):
            assert call(monkeypatch, command, strange, *json_too) == 0
            assert "\x1b" not in capsys.readouterr().out
    assert call(monkeypatch, "ls", strange / "step-2") == 2
    assert "\x1b" not in capsys.readouterr().err


def test_steps_are_completed_from_the_run_that_was_typed(run):
    context = typer.Context(typer.main.get_command(app))
    context.params = {"run": run}
    assert complete_step(context, "") == ["40", "4", "2"]
    assert complete_step(context, "4") == ["40", "4"]
    context.params = {"run": run / "nothing"}
    assert complete_step(context, "") == []
    context.params, context.args = {"run": None}, ["--json", str(run)]
    assert complete_step(context, "2") == ["2"], "what is typed up to --step cannot be parsed yet"
    context.args = []
    assert complete_step(context, "") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_can_ask_for_completion(run, shell):
    """As the script asks that --show-completion prints."""
    words = f"unbroken show {run} --step 4"
    asked = {"bash": {"COMP_WORDS": words, "COMP_CWORD": "4"}}.get(shell, {"_TYPER_COMPLETE_ARGS": words})
    environment = {**os.environ, "_UNBROKEN_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    code = "import sys; sys.argv[0] = 'unbroken'; from unbroken.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**environment, **asked}, capture_output=True, text=True, timeout=120
    )
    assert "40" in done.stdout, done
