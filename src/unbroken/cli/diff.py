"""`unbroken diff`: what differs between two checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from unbroken.cli.output import path_text, print_json, printable, stdout, table_of
from unbroken.cli.run import ADDRESS, Entry, JsonOption, address, progress_bar, step_text
from unbroken.comparison import Comparison, Difference, Side, bytes_to_compare, compare
from unbroken.environment import differences
from unbroken.manifest import Manifest
from unbroken.store.local import LocalStore

MOST_VALUE_CHARS = 60
"""A value in the table is cut there; --json shows all of it."""


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help=ADDRESS, show_default=False)],
    b: Annotated[Path, typer.Argument(metavar="B", help="The same.", show_default=False)],
    as_json: JsonOption = False,
) -> None:
    """Say what differs between two checkpoints: tensors and values by name, and what each rank has of its own.

    \b
    Example:
      unbroken diff runs/a runs/b
      unbroken diff runs/a@40 runs/a/step-60

    Of a run the newest checkpoint that a start would restore is taken. Elements are compared by their bits: two
    NaNs with other payloads differ, and so do 0.0 and -0.0. Checkpoints of different world sizes are compared
    whatever files their tensors lie in; that difference itself is one. Every byte read is verified.

    It does not compare when, where and by which generation a checkpoint was saved, nor the order of keys. A
    different environment is mentioned, and does not count.

    \b
    Exit codes: 0 equal; 1 they differ, or one is damaged; 2 wrong use.
    """
    one, other = _side(*address(a)), _side(*address(b))
    with progress_bar("comparing", bytes_to_compare(one.manifest)) as advance:
        found = compare(one, other, advance)
    environment = differences(one.manifest.environment, other.manifest.environment)
    if as_json:
        print_json(_comparison_json(found, (a, b), (one.manifest, other.manifest), environment))
    else:
        _print(found, (one.manifest, other.manifest), environment, stdout())
    if not found.equal:
        raise typer.Exit(1)


def _side(store: LocalStore, entry: Entry) -> Side:
    assert entry.manifest is not None, "choose takes none without"
    return Side(store, entry.directory, entry.manifest)


def _comparison_json(
    found: Comparison, paths: tuple[Path, Path], manifests: tuple[Manifest, Manifest], environment: list[str]
) -> dict[str, Any]:
    sides = [
        {
            "path": path_text(path),
            "step": manifest.step,
            "micro_step": manifest.micro_step,
            "generation": manifest.generation,
            "world_size": manifest.world_size,
        }
        for path, manifest in zip(paths, manifests, strict=True)
    ]
    return {
        "equal": found.equal,
        "a": sides[0],
        "b": sides[1],
        "tensors": [_tensor_json(difference) for difference in found.tensors],
        "values": [_value_json(difference) for difference in found.values],
        "environment": environment,
    }


def _tensor_json(difference: Difference) -> dict[str, Any]:
    return {
        "name": difference.name,
        "ranks": difference.ranks,
        "a": difference.a,
        "b": difference.b,
        "elements": difference.elements,
        "differing": difference.differing,
        "largest": difference.largest,
    }


def _value_json(difference: Difference) -> dict[str, Any]:
    """A side that lacks the value has no key of its name: null is a value."""
    sides = {"a": difference.a, "b": difference.b}
    present = {side: msgspec.Raw(text.encode()) for side, text in sides.items() if text is not None}
    return {"path": difference.name, "ranks": difference.ranks, **present}


def _print(found: Comparison, manifests: tuple[Manifest, Manifest], environment: list[str], console: Console) -> None:
    one, other = manifests
    if found.steps[0] != found.steps[1]:
        console.print(f"step: {step_text(one)} and {step_text(other)}")
    if found.world_sizes[0] != found.world_sizes[1]:
        fewer = min(found.world_sizes)
        console.print(
            f"world size: {found.world_sizes[0]} and {found.world_sizes[1]}; ranks 0-{fewer - 1} are compared"
        )
    if found.tensors:
        _print_tensors(found.tensors, console)
    if found.values:
        _print_values(found.values, console)
    for line in environment:
        console.print(f"environment, not counted: {printable(line)}", soft_wrap=True)
    if found.equal:
        count = len(one.tensors) + sum(len(tensors) for tensors in one.rank_tensors)
        console.print(f"equal: {count} tensors and all values of step {step_text(one)}")


def _print_tensors(found: list[Difference], console: Console) -> None:
    table = table_of("tensor", "ranks", "differing", "of", "largest", left=("tensor", "ranks", "largest"))
    for item in found:
        row = [printable(item.name), _ranks(item)]
        if item.elements:
            row += [str(item.differing), str(item.elements), "NaN" if item.largest is None else f"{item.largest:.3g}"]
        else:
            row += ["", "", _sides(item)]
        table.add_row(*row)
    console.print(table)


def _sides(item: Difference) -> str:
    if item.a is None or item.b is None:
        return f"only in {'A' if item.b is None else 'B'}"
    return f"{item.a} and {item.b}"


def _print_values(found: list[Difference], console: Console) -> None:
    table = table_of("value", "ranks", "A", "B", left=("value", "ranks", "A", "B"))
    for item in found:
        table.add_row(printable(item.name), _ranks(item), _shown(item.a), _shown(item.b))
    console.print(table)


def _shown(text: str | None) -> str:
    if text is None:
        return "-"
    return printable(text if len(text) <= MOST_VALUE_CHARS else f"{text[:MOST_VALUE_CHARS]}…")


def _ranks(item: Difference) -> str:
    if item.ranks is None:
        return "all"
    shown = ",".join(map(str, item.ranks[:4]))
    return shown + ("…" if len(item.ranks) > 4 else "")
