"""`unbroken show`: what one checkpoint holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from unbroken.cli.output import print_json, printable, size_text, stdout, table_of
from unbroken.cli.run import JsonOption, RunArgument, choose, complete_step, open_run, step_text
from unbroken.image.header import dtype_of
from unbroken.manifest import Manifest, TensorRecord

MOST_VALUE_CHARS = 300
"""A value is cut there; --json shows all of it."""


def show(
    run: RunArgument,
    step: Annotated[
        str | None,
        typer.Option(help="Show this step.  [default: the newest that can be restored]", autocompletion=complete_step),
    ] = None,
    generation: Annotated[int | None, typer.Option(help="Of this start of the job, if several saved the step.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a checkpoint holds: tensors, values, what each rank has of its own, and the environment.

    \b
    Example:
      unbroken show runs/gpt --step 40

    Only the manifest is read: numbers inside tensors are neither shown nor checked. --json prints all of it.

    \b
    Exit codes: 0 good; 1 it is damaged; 2 wrong use, or there is no such
    checkpoint.
    """
    manifest = choose(open_run(run), step, generation).manifest
    assert manifest is not None, "choose takes none without"
    if as_json:
        print_json(manifest)
        return
    console = stdout()
    _print_head(manifest, console)
    _print_tensors("tensors, the same on all ranks", manifest.tensors, console)
    for ranks, tensors in _alike(manifest.rank_tensors):
        _print_tensors(f"tensors, {ranks} each its own", tensors, console)
    _print_values(manifest, console)
    _print_mapping("environment", manifest.environment, console)
    _print_mapping("timings, seconds", {name: float(f"{s:.3g}") for name, s in manifest.timings.items()}, console)


def _print_head(manifest: Manifest, console: Console) -> None:
    size = size_text(sum(file.size for file in manifest.files))
    came = "a fresh start"
    if manifest.lineage:
        came = f"step {manifest.lineage[0].step} of generation {manifest.lineage[0].generation}"
    console.print(f"step {step_text(manifest)}, saved {printable(manifest.saved_at)}", soft_wrap=True)
    console.print(f"by generation {manifest.generation}, which went on from {came}")
    console.print(f"world size {manifest.world_size}, {size} in {len(manifest.files)} files")


def _alike(rank_tensors: list[dict[str, TensorRecord]]) -> Iterator[tuple[str, dict[str, TensorRecord]]]:
    """Runs of ranks whose own tensors have equal names, dtypes and shapes, with the first one's."""
    begin = 0
    for rank in range(1, len(rank_tensors) + 1):
        if rank == len(rank_tensors) or _outline(rank_tensors[rank]) != _outline(rank_tensors[begin]):
            if rank_tensors[begin]:
                yield (f"rank {begin}" if rank - begin == 1 else f"ranks {begin}-{rank - 1}"), rank_tensors[begin]
            begin = rank


def _outline(tensors: Mapping[str, TensorRecord]) -> list[tuple[str, str, list[int]]]:
    return [(name, tensor.dtype, tensor.shape) for name, tensor in sorted(tensors.items())]


def _print_tensors(title: str, tensors: Mapping[str, TensorRecord], console: Console) -> None:
    if not tensors:
        return
    sizes = {name: math.prod(tensor.shape) * dtype_of(tensor.dtype).itemsize for name, tensor in tensors.items()}
    table = table_of("name", "dtype", "shape", "size", left=("name", "dtype", "shape"))
    for name, tensor in tensors.items():
        table.add_row(printable(name), tensor.dtype, str(tensor.shape), size_text(sizes[name]))
    console.print(f"\n{title}: {len(tensors)}, {size_text(sum(sizes.values()))}", style="bold")
    console.print(table)


def _print_values(manifest: Manifest, console: Console) -> None:
    rows = {}
    for name, records in manifest.values.items():
        for record in records:
            shared = record.ranks == [(0, manifest.world_size - 1)]
            rows[name if shared else f"{name}, {_ranges(record.ranks)}"] = record.value
    _print_mapping("values", rows, console)


def _ranges(ranks: list[tuple[int, int]]) -> str:
    return "rank " + ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranks)


def _print_mapping(title: str, values: Mapping[str, Any], console: Console) -> None:
    if not values:
        return
    console.print(f"\n{title}", style="bold")
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    for name, value in values.items():
        table.add_row(printable(name), _value_text(value))
    console.print(table)


def _value_text(value: Any) -> str:
    text = printable(msgspec.json.encode(value).decode())
    return text if len(text) <= MOST_VALUE_CHARS else f"{text[:MOST_VALUE_CHARS]}… ({len(text)} characters)"
