"""`unbroken import`: a run directory made of a checkpoint that others wrote."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from unbroken.cli.output import path_text, print_json, printable, size_text, stderr, stdout
from unbroken.cli.run import JsonOption, progress_bar
from unbroken.errors import UsageError
from unbroken.exchange.importing import import_checkpoint, read_dcp, read_torch
from unbroken.exchange.registering import MODEL, Wishes


class Format(enum.StrEnum):
    """What is read."""

    TORCH = "torch"
    DCP = "dcp"


def import_(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A file or a directory.", show_default=False)],
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run directory to make.", show_default=False)],
    written_by: Annotated[
        Format | None,
        typer.Option("--from", help="Who wrote it.  [default: torch for a file, dcp for a directory]"),
    ] = None,
    step: Annotated[int, typer.Option(help="Optimizer steps that were done.")] = 0,
    name: Annotated[str, typer.Option(help="Registered name of a module that has none in the source.")] = MODEL,
    prefix: Annotated[
        str | None,
        typer.Option(help="Taken off a module's names.  [default: module. and _orig_mod., if all have them]"),
    ] = None,
    tie: Annotated[list[str] | None, typer.Option(metavar="A=B", help="A is the same tensor as B; repeated.")] = None,
    skip: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Do not import this part; repeated.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a run directory of a file of torch.save, or of a directory of torch.distributed.checkpoint.

    \b
    Example:
      unbroken import checkpoint.pt runs/gpt --step 4000
      unbroken import dcp/step-4000 runs/gpt --step 4000

    A dict of tensors becomes the module `model`; of a dict of state dicts each becomes what it is: {"model": …,
    "optimizer": …, "scheduler": …}, also as "model_state_dict" and so on. A Checkpointer with objects of these names
    restores it, on any number of ranks and in any layout. What the source does not have (random state, the loader's
    position) begins anew; if an object of yours is not in it, use restore(strict=False).

    No pickle runs: a source that holds more than tensors and plain values is refused, or that part of it left out
    and named. An optimizer without names of parameters is matched by position if it has one group of
    as many as the model has, and refused otherwise.

    RUN must hold no checkpoint. It does not check whether your script's objects fit.

    \b
    Exit codes: 0 done; 1 the source is damaged; 2 wrong use, or it holds what
    cannot be imported. Then nothing is left at RUN.
    """
    if not source.exists():
        raise UsageError(f"{source} does not exist")
    wishes = Wishes(name, prefix, dict(map(_pair, tie or ())), frozenset(skip or ()))
    kind = written_by or (Format.DCP if source.is_dir() else Format.TORCH)
    registered = (read_dcp if kind is Format.DCP else read_torch)(source, wishes)
    total = sum(tensor.nbytes for tensor in registered.tensors.values())
    with progress_bar("importing", total) as advance:
        manifest = import_checkpoint(run, step, registered, advance)
    names = list(registered.values)
    if as_json:
        result = {"run": path_text(run), "format": str(kind), "step": step, "generation": manifest.generation}
        print_json(
            {**result, "names": names, "tensors": len(manifest.tensors), "bytes": total, "notes": registered.notes}
        )
        return
    for note in registered.notes:
        stderr().print(printable(f"note: {note}"), soft_wrap=True)
    stdout().print(
        f"imported {', '.join(names)} as step {step} of {path_text(run)}: {len(manifest.tensors)} tensors, "
        f"{size_text(total)}",
        soft_wrap=True,
    )


def _pair(text: str) -> tuple[str, str]:
    one, equals, other = text.partition("=")
    if not (one and equals and other):
        raise UsageError(f"{text!r} is no pair of names: give --tie lm_head.weight=embed.weight")
    return one, other
