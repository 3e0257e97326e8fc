"""`unbroken prove`: the user's own script, undisturbed and then with faults, compared bit for bit."""

from __future__ import annotations

import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer

from unbroken.cli.output import print_json, stderr, stdout
from unbroken.errors import UsageError
from unbroken.prove.faults import DEFAULT, KINDS
from unbroken.prove.launch import OUT, Command
from unbroken.prove.report import RepeatCommand, print_report, report_json
from unbroken.prove.run import Report, Settings
from unbroken.prove.run import prove as run_proof


class Launcher(StrEnum):
    """What starts the workers of a job."""

    torchrun = "torchrun"
    none = "none"


def prove(
    script: Annotated[list[str], typer.Argument(metavar="SCRIPT", show_default=False)],
    nodes: Annotated[int, typer.Option(min=1, help="Nodes to simulate.")] = 1,
    nproc: Annotated[int, typer.Option(min=1, help="Workers per node.")] = 2,
    launcher: Annotated[
        Launcher,
        typer.Option(help="`none`: SCRIPT starts its workers itself, and again when one is lost, as with Ray."),
    ] = Launcher.torchrun,
    faults: Annotated[
        str,
        typer.Option(
            help=f"Kinds of faults, with commas, or `every`: {', '.join(KINDS)}.  [default: {', '.join(DEFAULT)}]",
            show_default=False,
        ),
    ] = "",
    trials: Annotated[int, typer.Option(min=1, help="Disturbed runs; each has one to three faults.")] = 10,
    seed: Annotated[int, typer.Option(help="Decides which faults strike when.")] = 0,
    trial: Annotated[int | None, typer.Option(min=1, help="Run only this one of the trials.")] = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Keep everything here; must be empty. Else kept only after a FAIL.")
    ] = None,
    deadline: Annotated[float, typer.Option(min=1, help="Seconds that one start of the job may take.")] = 600,
    loopback: Annotated[bool, typer.Option("--loopback", help="No network namespaces, even where they work.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Prove that a training script resumes bit for bit.

    Runs SCRIPT under torchrun (or alone, see --launcher), first undisturbed; then, per trial, strikes it at random
    moments, starts the job again until it ends, and compares every loss, sample, random state and weight with the
    undisturbed run.

    Each run gets a run directory of its own: it replaces {out} in the arguments, and every Checkpointer uses it
    whatever its script says. With several nodes, as root and with iproute2, nodes are network namespaces; otherwise
    they are groups of processes.

    \b
    Example:
      unbroken prove --nodes 2 --nproc 2 --faults node --trials 3 -- \\
        train.py --out {out} --steps 60

    Faults: rank, node and all are killed without notice; save and restore kill a worker at a point inside one, every
    trial at another; sigterm preempts; disk-full fails one save; bit-flip and truncate damage the newest checkpoint
    after everything was killed. Each chosen kind strikes at least once; a trial has one to three faults, or more if
    there are more kinds than trials. save, restore and disk-full need a script that saves with a Checkpointer.

    A script that keeps the ledger (every Checkpointer does) is compared step by step, and a FAIL names the parts that
    differ and what was not brought back; one that only prints `final <sha256>` is compared by that line.

    It does not check another world size, faults of the network, or anything on a machine other than this one. A script
    whose undisturbed runs already differ from each other fails, and is told so: nothing could show that it resumes
    exactly.

    \b
    Exit codes: 0 PASS; 1 FAIL (the first step that differs, what differs, and how
    to repeat the trial are shown); 2 wrong use, or the script fails undisturbed.
    """
    kinds = _kinds(faults) if faults else []
    command = Command(_checked(script), nproc, launcher.value)
    if launcher is Launcher.none and nodes > 1:
        raise UsageError("--launcher none: the script starts its nodes itself; leave --nodes out")
    if trial is not None and trial > trials:
        raise UsageError(f"--trial {trial}: there are only {trials}, see --trials")
    kept = directory.absolute() if directory is not None else None
    root = kept or Path(tempfile.mkdtemp(prefix="unbroken-prove-"))
    settings = Settings(command, nodes, kinds, trials, seed, root, deadline, trial, loopback=loopback)
    console = stderr()

    def repeat(number: int) -> str:
        faults = f"--faults {','.join(report.kinds)} --trials {trials} --seed {seed} --trial {number}"
        how = "" if launcher is Launcher.torchrun else f"--launcher {launcher.value} "
        options = f"{how}--nodes {nodes} --nproc {nproc} {faults}"
        return f"unbroken prove {options}{' --loopback' if loopback else ''} -- {shlex.join(script)}"

    with _ended_in_order(), console.status("starting") as status:

        def tell(line: str) -> None:
            status.update(line)
            if not console.is_terminal:
                console.print(line, soft_wrap=True)

        try:
            report = run_proof(settings, tell)
        except BaseException:
            _remove(root, kept)
            raise
    _show(report, repeat, as_json)
    if not report.passed:
        raise typer.Exit(1)
    _remove(root, kept)


def _show(report: Report, repeat: RepeatCommand, as_json: bool) -> None:
    if as_json:
        print_json(report_json(report, repeat))
    else:
        print_report(report, repeat, stdout())


def _kinds(faults: str) -> list[str]:
    kinds = list(dict.fromkeys(kind.strip() for kind in faults.split(",") if kind.strip()))
    if kinds == ["every"]:
        return list(KINDS)
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        choices = "; ".join(f"{kind}: {text}" for kind, text in KINDS.items())
        raise UsageError(f"--faults {faults!r}: give some of {', '.join(KINDS)} ({choices})")
    return kinds


def _checked(script: list[str]) -> tuple[str, ...]:
    """The script, if torchrun could start it. Raises UsageError for what people type instead."""
    if script[0] == "-m" and len(script) > 1:
        return tuple(script)
    if Path(script[0]).name.startswith(("python", "torchrun")):
        raise UsageError(f"{script[0]}: give the script alone; prove starts it itself")
    if not Path(script[0].replace(OUT, "")).is_file():
        raise UsageError(f"{script[0]}: there is no such script; the script comes after `--`")
    return tuple(script)


def _remove(root: Path, kept: Path | None) -> None:
    if kept is None:
        shutil.rmtree(root, ignore_errors=True)


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """SIGTERM ends the proof as Ctrl-C does: no process and no namespace stays behind."""

    def leave(number: int, _frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
