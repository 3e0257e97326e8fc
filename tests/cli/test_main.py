"""The command as a user calls it: exit codes, and errors on stderr in one place."""

import sys

import pytest

from unbroken.cli.main import main


def call(monkeypatch, *arguments):
    """Exit code of `unbroken ARGUMENTS`."""
    monkeypatch.setattr(sys, "argv", ["unbroken", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        main()
    return left.value.code or 0


@pytest.mark.parametrize("command", ["ls", "show", "prove"])
def test_help_has_an_example_and_the_exit_codes(monkeypatch, capsys, command):
    assert call(monkeypatch, command, "--help") == 0
    text = capsys.readouterr().out
    assert "Example:" in text
    assert "Exit codes:" in text
    assert max(map(len, text.splitlines())) <= 80


def test_an_error_of_the_library_is_one_line_on_stderr_with_its_exit_code(monkeypatch, capsys, tmp_path):
    assert call(monkeypatch, "ls", tmp_path / "nothing") == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == (
        f"unbroken: {tmp_path / 'nothing'} is not a directory; give the run directory that a Checkpointer was given\n"
    )


@pytest.mark.parametrize("arguments", [["ls"], ["unknown"], ["show", "--no-such-option", "x"], ["prove"]])
def test_wrong_use_exits_with_two(monkeypatch, capsys, arguments):
    assert call(monkeypatch, *arguments) == 2
    assert capsys.readouterr().err
