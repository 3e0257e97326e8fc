"""The command line: one module per command, registered here. Results go to stdout, everything else to stderr.

Exit codes: 0 good, 1 a fault was found, 2 wrong use. Errors of the library carry theirs.
"""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from unbroken.cli.diff import diff
from unbroken.cli.export import export
from unbroken.cli.import_ import import_
from unbroken.cli.ls import ls
from unbroken.cli.output import leave_closed_pipe, printable
from unbroken.cli.prove import prove
from unbroken.cli.prune import prune
from unbroken.cli.rollback import rollback
from unbroken.cli.show import show
from unbroken.cli.verify import verify
from unbroken.errors import UnbrokenError

app = typer.Typer(
    name="unbroken",
    help="Look at checkpoints, and prove that a training script survives losing processes and nodes.",
    epilog="Exit codes: 0 good, 1 a fault was found, 2 wrong use.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (ls, show, verify, diff, prune, rollback, export, prove):
    app.command()(command)
app.command("import")(import_)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"unbroken {metadata.version('unbroken')}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Look at checkpoints, and prove that a training script survives losing processes and nodes."""


def main() -> None:
    """Entry point of the `unbroken` command."""
    if sys.stdout is None:  # closed by the caller: then there is nobody to tell
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  # until the process ends
    try:
        _run()
    except UnbrokenError as error:
        _complain(str(error))
        sys.exit(error.exit_code)
    except OSError as error:
        _complain(f"{error.filename}: {error.strerror}" if error.filename else f"{error.strerror or error}")
        sys.exit(2)


def _run() -> None:
    """The command, and everything it wrote delivered: a full disk must not surface as Python exits."""
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        leave_closed_pipe()
    except OSError:
        # What is still in the buffer cannot be written; Python would try again as it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def _complain(text: str) -> None:
    lines = "\n".join(map(printable, text.splitlines()))
    print(f"unbroken: {lines}", file=sys.stderr)  # noqa: T201  # this is the one place that speaks for all


if __name__ == "__main__":
    main()
