"""Files of `torch.save`. The one module of ours that may touch pickle, and only so:

written, because `unbroken export --to torch` was asked for; read with torch's weights-only reader, which makes tensors,
numbers, strings and containers of them, and refuses everything else before any of it runs (invariant 10).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

import torch

from unbroken.errors import DamagedCheckpoint, UsageError
from unbroken.exchange.contents import Contents, Progress
from unbroken.exchange.placing import new_file
from unbroken.exchange.state_dicts import StateDicts, mapped_tensors, state_dicts, tensors_needed


def export_torch(contents: Contents, names: list[str], out: Path, progress: Progress) -> StateDicts:
    """Write the state dicts of registered objects, by name, into the new file `out`, as `torch.save` does.

    progress  called with the bytes of tensors that were read

    Needs room for the tensors twice beside `out`, and little memory.
    Raises DamagedCheckpoint, UsageError, OSError; then nothing is left at `out`.
    """
    with (
        new_file(out, contents.side.store.root) as path,
        mapped_tensors(contents, tensors_needed(contents, names), path.parent, progress) as tensors,
    ):
        made = state_dicts(contents, names, tensors, by_name=False)
        with path.open("wb") as file:  # by its name torch would write another name into the file each time
            torch.save(made.found, file)
        return made


def load_torch(path: Path) -> Any:
    """What `torch.save` wrote to `path`. Tensors are mapped from the file as far as its format allows.

    Raises UsageError if it holds anything but tensors and plain values, DamagedCheckpoint if it cannot be read.
    """
    if not path.is_file():
        raise UsageError(f"{path} is not a file; give one that torch.save wrote")
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise _refusal(str(path), error) from error
    except Exception as error:
        raise _refusal(str(path), error) from error
    with path.open("rb") as file:  # in the format of before torch 1.6, which cannot be mapped
        return _load(file, str(path))


def load_stream(stream: BinaryIO, what: str) -> Any:
    """The same of an open file; `what` names it in errors."""
    return _load(stream, what)


def _load(file: BinaryIO, what: str) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise _refusal(what, error) from error


def _refusal(what: str, error: Exception) -> Exception:
    """torch raises what it pleases: its own UnpicklingError, RuntimeError, and whatever a damaged file leads to."""
    first_line = str(error).strip().partition("\n")[0]
    if type(error).__name__ == "UnpicklingError" and "nsupported" in str(error):
        return UsageError(
            f"{what} holds more than tensors and plain values, and unbroken runs no pickle: {_cause(str(error))}. "
            "Save state dicts alone (torch.save(model.state_dict(), …)) and import that"
        )
    return DamagedCheckpoint(f"{what} cannot be read as a file of torch.save: {first_line or type(error).__name__}")


def _cause(text: str) -> str:
    """The line of torch's message that says what was in the way."""
    lines = [line.strip() for line in text.splitlines()]
    return next((line for line in lines if "nsupported" in line), lines[0]).partition(" was not an allowed")[0]
