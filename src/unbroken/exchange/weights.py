"""A module's weights as safetensors files, by the names and in the form that Hugging Face's loaders read.

One file `model.safetensors`, or `model-00001-of-0000N.safetensors` and `model.safetensors.index.json`. Streamed: a few
stretches of a tensor and some blocks are in memory, whatever the model's size.
Tied tensors are written once, under their first name; the other names stand in the file's metadata as name -> name that
is kept, as `safetensors.torch.save_model` does, so that its `load_model` finds them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unbroken.errors import UsageError
from unbroken.exchange.contents import Contents, ModuleTensors, Progress, nbytes, tensors_of_module
from unbroken.exchange.placing import new_directory
from unbroken.image.header import FILE_METADATA, dtype_of, stored_form
from unbroken.image.image import ImageLayout, TensorSpec, lay_out
from unbroken.state.codec import decode
from unbroken.state.draft import count_and_name

INDEX = "model.safetensors.index.json"
CONFIGURATION = "config"
"""Registered name of a Transformers model's configuration."""


@dataclass(frozen=True, slots=True)
class ExportedFile:
    """One file that was written."""

    name: str
    size: int
    """Bytes."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What came of an export."""

    files: list[ExportedFile]
    tensors: int
    nbytes: int
    """Of the tensors."""
    aliases: dict[str, str]
    """Names that are not written -> the name of the same tensor."""


def export_safetensors(contents: Contents, module: str, out: Path, most_bytes: int, progress: Progress) -> Exported:
    """Write the weights of a registered module into the new directory `out`.

    most_bytes  of the tensors in one file; a larger tensor has a file of its own
    progress    called with the bytes of tensors that were read

    Raises DamagedCheckpoint, UsageError (also for a tensor that safetensors has no dtype for), OSError; then nothing
    is left at `out`.
    """
    tensors = tensors_of_module(contents, module)
    _check(contents, tensors)
    contents.note_whose(tensors.stored.values())
    if tensors.extra:
        contents.notes.append(f"extra state is no tensor and is left out: {count_and_name(sorted(tensors.extra))}")
    shards = _shards(contents, tensors.stored, most_bytes)
    names = [file_name(index, len(shards)) for index in range(len(shards))]
    files = []
    with new_directory(out, contents.side.store.root) as store:
        for name, shard in zip(names, shards, strict=True):
            kept = {alias: fqn for alias, fqn in tensors.aliases.items() if fqn in shard}
            layout = lay_out(_specs(contents, shard), {**kept, **FILE_METADATA})
            store.create_in_parts(name, _bytes_of(contents, layout, shard, progress))
            files.append(ExportedFile(name, layout.size))
        total = sum(nbytes(contents.record(full)) for full in tensors.stored.values())
        if len(shards) > 1:
            index = _index(names, shards, total)
            store.create(INDEX, index)
            files.append(ExportedFile(INDEX, len(index)))
    return Exported(files, len(tensors.stored), total, tensors.aliases)


def bytes_to_export(contents: Contents, module: str) -> int:
    """How many bytes `export_safetensors` will report as progress."""
    return sum(nbytes(contents.record(full)) for full in tensors_of_module(contents, module).stored.values())


def file_name(index: int, count: int) -> str:
    """Of file number `index`, from 0, of `count`."""
    return "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _check(contents: Contents, tensors: ModuleTensors) -> None:
    for fqn, full in tensors.stored.items():
        record = contents.record(full)
        dtype = dtype_of(record.dtype)
        if stored_form(dtype, record.shape)[1] != record.shape:
            raise UsageError(f"{fqn} is {record.dtype}, which safetensors does not have: export --to torch or dcp")
        if fqn == "__metadata__":
            raise UsageError(f"a safetensors file can hold no tensor of the name {fqn}: export --to torch or dcp")


def _shards(contents: Contents, stored: Mapping[str, str], most_bytes: int) -> list[dict[str, str]]:
    """The tensors in their order, divided so that those of one file have at most `most_bytes`."""
    shards: list[dict[str, str]] = [{}]
    size = 0
    for fqn, full in stored.items():
        length = nbytes(contents.record(full))
        if shards[-1] and size + length > most_bytes:
            shards.append({})
            size = 0
        shards[-1][fqn] = full
        size += length
    return shards


def _specs(contents: Contents, shard: Mapping[str, str]) -> list[TensorSpec]:
    records = {fqn: contents.record(full) for fqn, full in shard.items()}
    return [TensorSpec(fqn, dtype_of(record.dtype), tuple(record.shape)) for fqn, record in records.items()]


def _bytes_of(
    contents: Contents, layout: ImageLayout, shard: Mapping[str, str], progress: Progress
) -> Iterator[bytes | memoryview]:
    yield layout.header
    for entry in layout.entries:
        yield from contents.chunks(shard[entry.name], progress)


def _index(names: list[str], shards: list[dict[str, str]], total: int) -> bytes:
    """As transformers and huggingface_hub write it."""
    weight_map = {fqn: name for name, shard in zip(names, shards, strict=True) for fqn in shard}
    index: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def configuration(contents: Contents) -> str:
    """The text of `config.json`, as the integration for Transformers saves it. Raises UsageError if there is none."""
    value = contents.saved.values.get(CONFIGURATION)
    state = decode(value["state"], {}) if value is not None and value.get("kind") == "object" else {}
    text = state.get("config.json") if isinstance(state, dict) else None
    if not isinstance(text, str):
        raise UsageError(
            "the checkpoint has no configuration of a Transformers model (integrations.transformers saves one): "
            "export --to safetensors, and put the model's config.json beside it"
        )
    return text
