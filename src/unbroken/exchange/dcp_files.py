"""Export into the format of `torch.distributed.checkpoint`, for `dcp.load` without a process group or with any."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unbroken.exchange.contents import Contents, Progress
from unbroken.exchange.placing import new_directory
from unbroken.exchange.state_dicts import StateDicts, mapped_tensors, state_dicts, tensors_needed


def export_dcp(contents: Contents, names: list[str], out: Path, progress: Progress) -> StateDicts:
    """Write the state dicts of registered objects, by name, into the new directory `out`.

    progress  called with the bytes of tensors that were read

    Optimizer state goes by the names of parameters, as `torch.distributed.checkpoint.state_dict` gives it. Options of
    groups are there in both of its forms: a list of groups, and flattened by parameter.
    Needs room for the tensors twice beside `out`, and little memory.
    Raises DamagedCheckpoint, UsageError, OSError; then nothing is left at `out`.
    """
    import torch.distributed.checkpoint as dcp

    with (
        new_directory(out, contents.side.store.root) as store,
        mapped_tensors(contents, tensors_needed(contents, names), store.root.parent, progress) as tensors,
    ):
        made = state_dicts(contents, names, tensors, by_name=True)
        written = {
            name: {**_flat_options(value), **value} if _is_optimizer(value) else value
            for name, value in made.found.items()
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that torch.distributed is not initialised: it is not needed
            dcp.save(written, checkpoint_id=store.root, no_dist=True)  # type: ignore[attr-defined]  # torch exports it so
        return made


def _is_optimizer(value: Any) -> bool:
    return (
        isinstance(value, dict) and isinstance(value.get("state"), dict) and isinstance(value.get("param_groups"), list)
    )


def _flat_options(value: Mapping[str, Any]) -> dict[str, Any]:
    """`param_groups.<parameter>.<option>`, as with `flatten_optimizer_state_dict=True`."""
    flat: dict[str, Any] = {}
    for group in value["param_groups"]:
        for parameter in group["params"]:
            if str(parameter).isdigit():
                return {}  # DCP would call both forms the same
            flat |= {f"param_groups.{parameter}.{key}": item for key, item in group.items() if key != "params"}
    return flat
