"""The command line: one module per command, registered here. Results go to stdout, everything else to stderr.

Exit codes: 0 good, 1 a fault was found, 2 wrong use. Errors of the library carry theirs.
"""

from __future__ import annotations

import sys

import typer

from unbroken.cli.ls import ls
from unbroken.cli.prove import prove
from unbroken.cli.show import show
from unbroken.errors import UnbrokenError

app = typer.Typer(
    name="unbroken",
    help="Look at checkpoints, and prove that a training script survives losing processes and nodes.",
    epilog="Exit codes: 0 good, 1 a fault was found, 2 wrong use.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(ls)
app.command()(show)
app.command()(prove)


def main() -> None:
    """Entry point of the `unbroken` command."""
    try:
        app()
    except UnbrokenError as error:
        print(f"unbroken: {error}", file=sys.stderr)  # noqa: T201  # this is the one place that speaks for all
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
