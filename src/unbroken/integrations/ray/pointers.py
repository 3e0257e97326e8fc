"""What Ray is told of a checkpoint: a directory of Ray's own, with one small file that says where the checkpoint is.

So each owns what it deletes: Ray its pointers (`CheckpointConfig.num_to_keep`), the Checkpointer its checkpoints
(`keep`). A checkpoint inside Ray's directory would be deleted by both, and Ray refuses to start when one is gone.
"""

from __future__ import annotations

import logging
import posixpath
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from pyarrow import fs
from ray import train

from unbroken.commit import SaveId
from unbroken.errors import UnbrokenError, UsageError
from unbroken.integrations.ray.private import storage, train_function

log = logging.getLogger(__name__)

FILE = "unbroken.json"
_NAME = re.compile(r"unbroken-start-(\d+)-step-(\d+)(?:\+(\d+))?-*")


class Pointer(msgspec.Struct, frozen=True):
    """A checkpoint of `unbroken`, as reported to Ray."""

    run: str
    """The run directory."""
    checkpoint: str
    """The checkpoint's directory inside it. It may have been deleted since, by `keep`."""
    step: int
    """Optimizer steps done."""
    micro_step: int = 0

    @property
    def path(self) -> Path:
        """The checkpoint's directory: for `unbroken show`, `export`, `diff`."""
        return Path(self.run) / self.checkpoint


def pointer_of(checkpoint: Any) -> Pointer:
    """The checkpoint that a `ray.train.Checkpoint` points to: of `Result.checkpoint`, `ray.train.get_checkpoint()`.

    Raises UnbrokenError if it is None, was not reported by `unbroken`, or is not there any more.
    """
    if checkpoint is None:
        raise UnbrokenError("Ray has no checkpoint: none was reported yet")
    path = posixpath.join(checkpoint.path, FILE)
    try:
        with checkpoint.filesystem.open_input_stream(path) as file:
            return msgspec.json.decode(file.read(), type=Pointer)
    except (OSError, msgspec.MsgspecError) as error:
        raise UnbrokenError(f"{checkpoint.path} is no checkpoint that unbroken reported to Ray: {error}") from error


def write_pointer(run: Path, save: SaveId, start: int) -> Any:
    """Write the pointer of a committed checkpoint where Ray keeps its own; a `ray.train.Checkpoint`, or None.

    start  number of this start of the job: a later one may tell of the same step

    None in Ray's local mode, and if this node does not see Ray's storage, or cannot write there: training goes on, and
    nothing is lost, since resuming does not depend on what Ray knows.
    """
    if train_function() == "local":
        return None
    where = storage()
    files = where.storage_filesystem
    pointer = Pointer(str(run), save.directory, save.step, save.micro_step)
    inside = f"+{save.micro_step}" if save.micro_step else ""
    path = where.build_checkpoint_path_from_name(f"unbroken-start-{start}-step-{save.step}{inside}")
    try:
        # The driver has made the directory of the experiment. Where it is not, the storage is another machine's disk.
        if files.get_file_info(where.experiment_fs_path).type != fs.FileType.Directory:
            raise FileNotFoundError(f"this node does not see {where.experiment_fs_path}")
        while files.get_file_info(path).type != fs.FileType.NotFound:
            path += "-"  # of another Checkpointer in the same function: Ray must be able to delete one alone
        files.create_dir(path)
        with files.open_output_stream(posixpath.join(path, FILE)) as file:
            file.write(msgspec.json.encode(pointer))
    except Exception as error:
        log.warning(
            "Ray is not told of the checkpoint of step %d: %s; the job resumes from it all the same. "
            "Give RunConfig(storage_path=…) on storage that all nodes see",
            save.step,
            error,
        )
        return None
    return train.Checkpoint(path, filesystem=files)


def checked(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics that Ray can keep: numbers of NumPy become Python's. Raises UsageError, naming the first it cannot."""
    kept = {name: value.item() if isinstance(value, np.generic) else value for name, value in metrics.items()}
    for name, value in kept.items():
        try:
            msgspec.json.encode({name: value})
        except (TypeError, ValueError) as error:
            kind = type(value).__name__
            raise UsageError(f"metrics: {name!r} is a {kind}, which Ray cannot keep ({error})") from error
    return kept


def step_known_to_ray() -> int | None:
    """The step of the newest checkpoint that Ray knows of; None if it knows of none of ours.

    Told by the name alone, which all workers have from Ray: no storage is asked.
    """
    newest = train.get_checkpoint()
    if newest is None:
        return None
    found = _NAME.fullmatch(posixpath.basename(newest.path.rstrip("/")))
    return int(found[2]) if found else None
