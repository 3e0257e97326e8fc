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
from ray.train.v2.api.report_config import CheckpointConsistencyMode

from unbroken.commit import SaveId
from unbroken.errors import UnbrokenError, UsageError

log = logging.getLogger(__name__)

FILE = "unbroken.json"
KNOWN_S = 20.0
"""How long Ray's controller may take to say what it knows, in seconds."""
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


def write_pointer(where: Any, run: Path, save: SaveId, start: int) -> Any:
    """Write the pointer of a committed checkpoint where Ray keeps its own; a `ray.train.Checkpoint`, or None.

    where  Ray's storage, see private.py
    start  number of this start of the job: a later one may tell of the same step

    None if this node does not see Ray's storage, or cannot write there: training goes on, and nothing is lost, since
    resuming does not depend on what Ray knows.
    """
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
    """Metrics that Ray can keep: numbers of NumPy become Python's. Raises UsageError for others."""
    kept = {name: value.item() if isinstance(value, np.generic) else value for name, value in metrics.items()}
    try:
        msgspec.json.encode(kept)
    except (TypeError, ValueError) as error:
        kinds = ", ".join(f"{name!r} is a {type(value).__name__}" for name, value in kept.items())
        raise UsageError(f"metrics: Ray keeps numbers and strings, but {kinds} ({error})") from error
    return kept


def step_known_to_ray() -> int | None:
    """The step of the newest of our checkpoints that Ray knows of, whatever else was reported; None if of none.

    Told by the names alone, which all workers have from Ray: no storage is asked.
    """
    reported = train.get_all_reported_checkpoints(CheckpointConsistencyMode.COMMITTED, timeout_s=KNOWN_S)
    names = (posixpath.basename(each.checkpoint.path.rstrip("/")) for each in reported)
    known = [(int(found[1]), int(found[2])) for name in names if (found := _NAME.fullmatch(name))]
    return max(known)[1] if known else None
