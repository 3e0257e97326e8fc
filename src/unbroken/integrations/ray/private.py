"""The private names of Ray Train that the integration leans on, all of them.

Known to hold for ray 2.60; `check_imported` looks for each, so that another version is refused with a clear message
instead of going wrong.
"""

from __future__ import annotations

import importlib
from typing import Any, Literal

from unbroken.errors import UsageError
from unbroken.integrations.known import check_attributes

AT_LEAST = "2.60"
TESTED = "2.60.0"

IMPORTED = {
    "ray.train": ("report", "get_context", "get_all_reported_checkpoints", "Checkpoint"),
    "ray.train.v2.api.report_config": ("CheckpointConsistencyMode", "CheckpointUploadMode"),
    "ray.train.v2._internal.execution.context": ("get_train_context",),
    "ray.train.v2._internal.execution.train_fn_utils": ("get_train_fn_utils",),
}
"""By module."""
OF_THE_STORAGE = (
    "storage_filesystem",
    "experiment_fs_path",
    "build_checkpoint_path_from_name",
    "checkpoint_manager_snapshot_path",
)


def check_imported() -> None:
    """Raise UsageError, naming it, if something that is imported is not there."""
    for module, names in IMPORTED.items():
        try:
            found = importlib.import_module(module)
        except ImportError as error:
            raise UsageError(
                f"{module} cannot be imported ({error}): pip install 'unbroken[ray]' (known to work: ray {TESTED})"
            ) from error
        check_attributes(found, names, "ray", TESTED)


def train_function() -> Literal["worker", "local"] | None:
    """Where the caller is: in a worker's train function, in one of local mode (`num_workers=0`), or neither."""
    from ray.train.v2._internal.execution.train_fn_utils import get_train_fn_utils

    try:
        return "worker" if get_train_fn_utils().is_distributed() else "local"
    except RuntimeError:
        return None


def preemption() -> Any:
    """What holds this worker's notice of preemption: `preemption_info`, None until there is one.

    `ray.train.get_preemption_info` is a barrier of all workers: nothing to ask at every step.
    """
    from ray.train.v2._internal.execution.context import get_train_context

    found = get_train_context().preemption_context
    check_attributes(found, ("preemption_info",), "ray", TESTED)
    return found


def storage() -> Any:
    """Where Ray keeps what is reported, as this worker sees it. Its local mode keeps nothing."""
    from ray import train

    found = train.get_context().get_storage()
    check_attributes(found, OF_THE_STORAGE, "ray", TESTED)
    return found
