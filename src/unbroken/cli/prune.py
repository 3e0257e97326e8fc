"""`unbroken prune`: delete old checkpoints by hand."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console

from unbroken.cli.output import path_text, print_json, printable, size_text, stdout
from unbroken.cli.run import JsonOption, RunArgument, open_run, progress_bar, step_text
from unbroken.cli.verify import fault_json, fault_text
from unbroken.policy import Keep
from unbroken.pruning import Pruning, plan_pruning
from unbroken.pruning import prune as carry_out
from unbroken.retention import Kept
from unbroken.verification import bytes_to_read


def prune(
    run: RunArgument,
    keep: Annotated[int, typer.Option(min=1, help="How many usable checkpoints of the current history stay.")],
    abandoned: Annotated[
        bool, typer.Option("--abandoned", help="Delete older checkpoints of abandoned histories too.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Delete nothing, say what would be.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Delete all but the newest checkpoints of a run, and what dead saves left behind.

    \b
    Example:
      unbroken prune runs/gpt --keep 3 --dry-run

    First every checkpoint that is to stay is read whole: damaged ones do not count as kept and are left alone, and
    if none is usable nothing is deleted. Order is by recorded step and generation. Safe beside a running job: only
    what is older than the newest usable checkpoint is deleted, so a newer one of an abandoned history stays until
    the job has passed its step.

    It does not delete directories whose manifest cannot be read: their step cannot be known.

    \b
    Exit codes: 0 done; 1 nothing usable would stay, or something could not be
    deleted; 2 wrong use.
    """
    store = open_run(run)
    with progress_bar("verifying what stays", bytes_to_read(store)) as advance:
        plan = plan_pruning(store, Keep(last=keep), abandoned, advance)
    problems = [] if dry_run else carry_out(store, plan)
    if as_json:
        print_json({"run": path_text(run), "dry_run": dry_run, **_plan_json(plan), "problems": problems})
    else:
        _print(plan, "would delete" if dry_run else "deleted", stdout())
        for problem in problems:
            stdout().print(printable(problem), soft_wrap=True)
    if problems:
        raise typer.Exit(1)


def _plan_json(plan: Pruning) -> dict[str, Any]:
    return {
        "kept": [_kept_json(kept) for kept in plan.kept],
        "deleted": [_kept_json(kept) for kept in plan.checkpoints],
        "leftovers": plan.leftovers,
        "spared": [_kept_json(kept) for kept in plan.spared],
        "damaged": [fault_json(fault) for fault in plan.damaged],
    }


def _kept_json(kept: Kept) -> dict[str, Any]:
    manifest = kept.manifest
    return {
        "step": manifest.step,
        "micro_step": manifest.micro_step,
        "directory": kept.directory,
        "manifest": kept.name,
        "generation": manifest.generation,
        "bytes": sum(file.size for file in manifest.files),
    }


def _print(plan: Pruning, verb: str, console: Console) -> None:
    for fault in plan.damaged:
        console.print(f"left alone: {fault_text(fault)}", soft_wrap=True)
    for kept in plan.spared:
        console.print(f"left alone: {_text(kept)}, abandoned, until the job has passed it", soft_wrap=True)
    for kept in plan.kept:
        console.print(f"keeps {_text(kept)}", soft_wrap=True)
    for kept in plan.checkpoints:
        console.print(f"{verb} {_text(kept)}", soft_wrap=True)
    if plan.leftovers:
        console.print(f"{verb} {len(plan.leftovers)} files that dead saves left behind")
    if not plan.checkpoints and not plan.leftovers:
        console.print("nothing to delete")


def _text(kept: Kept) -> str:
    size = size_text(sum(file.size for file in kept.manifest.files))
    return f"step {step_text(kept.manifest)} of generation {kept.manifest.generation}, {size}"
