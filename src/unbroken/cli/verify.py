"""`unbroken verify`: every byte of every checkpoint against what was recorded when it was saved."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console

from unbroken.cli.output import path_text, print_json, printable, size_text, stdout, table_of
from unbroken.cli.run import JsonOption, RunArgument, choose_any, complete_step, open_run, progress_bar, step_text
from unbroken.verification import Fault, Report, Verified, bytes_to_read, verify_run

MOST_TENSORS = 3
"""Names of tensors that a line lists; --json lists all."""


def verify(
    run: RunArgument,
    step: Annotated[
        str | None, typer.Option(help="Verify this step alone.  [default: all]", autocompletion=complete_step)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Read every byte of every checkpoint and list everything that is not as it was saved.

    \b
    Example:
      unbroken verify runs/gpt

    Abandoned histories are read too. Blocks are compared with their digests, the header of each file with the
    manifest, manifests and generation records with their own digests. It says which checkpoint a start of the job
    would restore now. A save that never finished is mentioned and is no fault. Nothing is changed; a job may run
    meanwhile.

    It does not check whether your script's objects fit a checkpoint, or who wrote it: digests find damage, not
    tampering.

    \b
    Exit codes: 0 everything is whole; 1 a fault was found; 2 wrong use.
    """
    store = open_run(run)
    if step is not None:
        choose_any(store, step)
    with progress_bar("verifying", bytes_to_read(store, step)) as advance:
        report = verify_run(store, advance, step)
    if as_json:
        print_json({"run": path_text(run), **_report_json(report)})
    else:
        _print_report(report, run_text=path_text(run), whole_run=step is None, console=stdout())
    if report.faults:
        raise typer.Exit(1)


def _report_json(report: Report) -> dict[str, Any]:
    return {
        "generation": report.generation,
        "checkpoints": [_checkpoint_json(checkpoint) for checkpoint in report.checkpoints],
        "faults": [fault_json(fault) for fault in report.faults],
        "unfinished": report.unfinished,
        "leftovers": [printable(name) for name in report.leftovers],
        "restores": report.restores.place.directory if report.restores else None,
        "refusal": report.refusal or None,
    }


def _checkpoint_json(checkpoint: Verified) -> dict[str, Any]:
    manifest = checkpoint.manifest
    return {
        "step": checkpoint.place.step,
        "micro_step": checkpoint.place.micro_step,
        "directory": checkpoint.place.directory,
        "manifest": checkpoint.place.name,
        "generation": manifest.generation if manifest else None,
        "world_size": manifest.world_size if manifest else None,
        "bytes": sum(file.size for file in manifest.files) if manifest else None,
        "on_lineage": checkpoint.on_lineage,
        "usable": checkpoint.usable,
        "faults": len(checkpoint.faults),
    }


def fault_json(fault: Fault) -> dict[str, Any]:
    """A fault as plain JSON values."""
    return {
        "file": fault.file,
        "problem": fault.problem,
        "begin": fault.begin,
        "end": fault.end,
        "tensors": list(fault.tensors),
    }


def _print_report(report: Report, run_text: str, whole_run: bool, console: Console) -> None:
    if report.checkpoints:
        table = table_of("step", "generation", "size", "state", left=("state",))
        for checkpoint in report.checkpoints:
            manifest = checkpoint.manifest
            size = size_text(sum(file.size for file in manifest.files)) if manifest else "-"
            number = str(manifest.generation) if manifest else "-"
            table.add_row(step_text(checkpoint.place), number, size, _state(checkpoint))
        console.print(table)
    for fault in report.faults:
        console.print(fault_text(fault), soft_wrap=True)
    if report.unfinished:
        console.print(f"never committed, or being saved now: {', '.join(report.unfinished)}", soft_wrap=True)
    if report.leftovers:
        names = ", ".join(printable(name) for name in report.leftovers)
        console.print(f"belongs to no checkpoint: {names}", soft_wrap=True)
    if whole_run:
        console.print(_forecast(report, run_text), soft_wrap=True)


def _state(checkpoint: Verified) -> str:
    if checkpoint.faults:
        return "damaged"
    return "good" if checkpoint.on_lineage else "good, abandoned"


def fault_text(fault: Fault) -> str:
    """A fault in one line."""
    shown = ", ".join(fault.tensors[:MOST_TENSORS])
    more = len(fault.tensors) - MOST_TENSORS
    tensors = f" ({shown}{f' and {more} more' if more > 0 else ''})" if shown else ""
    return printable(f"{fault}{tensors}")


def _forecast(report: Report, run_text: str) -> str:
    if report.restores is not None and report.restores.manifest is not None:
        generation = report.restores.manifest.generation
        return f"a start would restore step {step_text(report.restores.place)} of generation {generation}"
    if report.refusal:
        return printable(f"a start would refuse: {report.refusal}")
    return f"{run_text} holds no checkpoint: a start would be a fresh one"
