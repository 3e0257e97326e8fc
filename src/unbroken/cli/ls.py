"""`unbroken ls`: the checkpoints of a run."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import typer
from rich.table import Table

from unbroken.cli.output import path_text, print_json, printable, size_text, stdout, table_of
from unbroken.cli.run import Entry, JsonOption, RunArgument, entries, open_run, step_text


def ls(run: RunArgument, as_json: JsonOption = False) -> None:
    """List the checkpoints of a run, newest first.

    \b
    Example:
      unbroken ls runs/gpt

    The state is "good" (the newest good one is what the next start restores), "abandoned" (its history was left when
    a job went on from an older step), "unfinished" (never committed, or being written now) or "damaged".

    It reads manifests and looks at the sizes of files; it does not check the bytes of tensors: `unbroken verify` does.

    \b
    Exit codes: 0 good; 1 a checkpoint is damaged; 2 wrong use, or RUN is no run
    directory.
    """
    tip, found = entries(open_run(run))
    if as_json:
        print_json(
            {
                "run": path_text(run),
                "generation": tip.number if tip else None,
                "checkpoints": [_entry_json(entry) for entry in found],
            }
        )
    elif found:
        console = stdout()
        console.print(_table(found))
        for entry in found:
            if entry.problem:
                console.print(f"{entry.directory}: {printable(entry.problem)}", soft_wrap=True)
    else:
        stdout().print(f"{path_text(run)} holds no checkpoint", soft_wrap=True)
    if any(entry.problem for entry in found):
        raise typer.Exit(1)


def state_of(entry: Entry) -> str:
    """One word for what a checkpoint is good for."""
    if entry.problem:
        return "damaged"
    if not entry.committed:
        return "unfinished"
    return "good" if entry.on_lineage else "abandoned"


def _entry_json(entry: Entry) -> dict[str, Any]:
    manifest = entry.manifest
    return {
        "step": entry.step,
        "micro_step": entry.micro_step,
        "directory": entry.directory,
        "generation": manifest.generation if manifest else None,
        "world_size": manifest.world_size if manifest else None,
        "bytes": sum(file.size for file in manifest.files) if manifest else None,
        "saved_at": manifest.saved_at if manifest else None,
        "complete": manifest is not None,
        "on_lineage": entry.on_lineage,
        "state": state_of(entry),
        "problem": entry.problem or None,
    }


def _table(found: list[Entry]) -> Table:
    table = table_of("step", "generation", "world size", "size", "age", "state", left=("state",))
    now = datetime.now(UTC)
    for entry in found:
        manifest = entry.manifest
        details = ["-"] * 4
        if manifest is not None:
            size = size_text(sum(file.size for file in manifest.files))
            details = [str(manifest.generation), str(manifest.world_size), size, age_text(manifest.saved_at, now)]
        table.add_row(step_text(entry), *details, state_of(entry))
    return table


def age_text(saved_at: str, now: datetime) -> str:
    """How long ago, in one unit; `?` if the record does not say it in a way that can be read."""
    try:
        seconds = (now - datetime.fromisoformat(saved_at)).total_seconds()
    except (ValueError, TypeError):
        return "?"
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
