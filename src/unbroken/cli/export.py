"""`unbroken export`: a checkpoint in a format that others read."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated, Any

import typer

from unbroken.cli.output import parse_size, path_text, print_json, printable, size_text, stderr, stdout
from unbroken.cli.run import ADDRESS, JsonOption, address, progress_bar, step_text
from unbroken.errors import UsageError
from unbroken.exchange.contents import Contents, choose_module, contents_of, nbytes
from unbroken.exchange.dcp_files import export_dcp
from unbroken.exchange.state_dicts import StateDicts, chosen_names, tensors_needed
from unbroken.exchange.torch_files import export_torch
from unbroken.exchange.weights import bytes_to_export, configuration, export_safetensors


class Format(enum.StrEnum):
    """What is written."""

    SAFETENSORS = "safetensors"
    TRANSFORMERS = "transformers"
    TORCH = "torch"
    DCP = "dcp"


def export(
    checkpoint: Annotated[Path, typer.Argument(metavar="RUN", help=ADDRESS, show_default=False)],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="What to create; must not exist.", show_default=False)],
    to: Annotated[Format, typer.Option("--to", help="The format.")] = Format.SAFETENSORS,
    name: Annotated[
        list[str] | None,
        typer.Option(help="Registered name: of safetensors the module, else what to export, repeated.  [default: all]"),
    ] = None,
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Most bytes of one safetensors file.")] = "5GB",
    rank: Annotated[int, typer.Option(help="Whose values to take where each rank had its own.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint as safetensors, for Transformers, as a file of torch.save, or for DCP.

    \b
    Example:
      unbroken export runs/gpt weights
      unbroken export runs/gpt@40 step-40.pt --to torch

    \b
    safetensors  one module's weights as OUT/model.safetensors, or in several
                 files with an index, by the names that Hugging Face reads
    transformers the same with the model's config.json, for from_pretrained(OUT);
                 for what was trained by integrations.transformers
    torch        OUT is a file of all state dicts: {"model": …, "optimizer": …};
                 torch.load(OUT, weights_only=True) reads it
    dcp          OUT is a directory that dcp.load reads, also into sharded models

    No process group, no GPU, and no memory for the model is needed: safetensors are streamed, and for the others
    tensors are mapped from a temporary file beside OUT, so that they need twice the room there. Every byte read is
    verified; if one is damaged, nothing is left at OUT. Tied weights are written once in safetensors, the other
    names stand in the metadata as `safetensors.torch.save_model` writes them.

    What is no tensor stays behind in safetensors; random state and partial gradients always. Nothing in the run
    directory is changed.

    \b
    Exit codes: 0 done; 1 the checkpoint is damaged; 2 wrong use.
    """
    store, entry = address(checkpoint)
    assert entry.manifest is not None, "address takes none without"
    contents = contents_of(store, entry.directory, entry.manifest, rank)
    if to in (Format.SAFETENSORS, Format.TRANSFORMERS):
        config = configuration(contents) if to is Format.TRANSFORMERS else None
        result = _export_weights(contents, out, name or [], parse_size(max_shard_size))
        if config is not None:
            (out / "config.json").write_text(config)
    else:
        result = _export_state(contents, out, name, to)
    result = {"out": path_text(out), "format": str(to), "step": step_text(entry), **result, "notes": contents.notes}
    if as_json:
        print_json(result)
        return
    for note in contents.notes:
        stderr().print(printable(f"note: {note}"), soft_wrap=True)
    stdout().print(_sentence(result), soft_wrap=True)


def _export_weights(contents: Contents, out: Path, names: list[str], most_bytes: int) -> dict[str, Any]:
    if len(names) > 1:
        raise UsageError("safetensors hold one module: give --name once, and export each to a place of its own")
    module = choose_module(contents, names[0] if names else None)
    with progress_bar("exporting", bytes_to_export(contents, module)) as advance:
        made = export_safetensors(contents, module, out, most_bytes, advance)
    return {
        "names": [module],
        "tensors": made.tensors,
        "bytes": made.nbytes,
        "files": [{"name": file.name, "size": file.size} for file in made.files],
        "aliases": made.aliases,
    }


def _export_state(contents: Contents, out: Path, names: list[str] | None, to: Format) -> dict[str, Any]:
    chosen = chosen_names(contents, names)
    needed = tensors_needed(contents, chosen)
    total = sum(nbytes(contents.record(full)) for full in needed)
    write = export_torch if to is Format.TORCH else export_dcp
    with progress_bar("exporting", total) as advance:
        made: StateDicts = write(contents, chosen, out, advance)
    contents.notes.extend(f"left out: {reason}" for reason in made.left_out)
    return {"names": list(made.found), "tensors": len(needed), "bytes": total}


def _sentence(result: dict[str, Any]) -> str:
    what = ", ".join(map(printable, result["names"])) or "nothing"
    files = len(result.get("files", [])) or 1
    many = f" in {files} files" if files > 1 else ""
    return (
        f"exported {what} of step {result['step']}: {result['tensors']} tensors, {size_text(result['bytes'])}, "
        f"to {result['out']}{many}"
    )
