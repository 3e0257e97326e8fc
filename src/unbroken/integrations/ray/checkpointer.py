"""A checkpointer of a train function.

    def train_function(config):
        model = ray.train.torch.prepare_model(GPT())
        …
        with checkpointer("/shared/runs/x", {"model": model, …}, every=unbroken.Every(steps=100)) as ckpt:
            ckpt.restore()
            …

Which checkpoint a start goes on from is decided by what lies in the run directory and is whole; Ray is told of each
that was committed, and its own records decide nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ray import train
from ray.train.v2.api.report_config import CheckpointUploadMode

from unbroken.checkpointer import Checkpointer
from unbroken.cluster import rank_and_world_size
from unbroken.commit import SaveId
from unbroken.directory import RUN_DIRECTORY
from unbroken.errors import NoUsableCheckpoint, UsageError
from unbroken.integrations.ray.notice import Drain
from unbroken.integrations.ray.pointers import checked, step_known_to_ray, write_pointer
from unbroken.integrations.ray.private import storage, train_function
from unbroken.restored import Restored
from unbroken.session import Session


def checkpointer(path: str | Path, state: Mapping[str, object], **options: Any) -> RayCheckpointer:
    """A Checkpointer inside a train function of Ray Train.

    path     the run directory, absolute, shared by all nodes; not inside Ray's `storage_path`
    state    names -> objects, as for `Checkpointer`; models after `ray.train.torch.prepare_model`
    options  the Checkpointer's: `every`, `keep`, `on_error`, …

    Raises UsageError outside of a train function, and for a relative path.
    """
    return RayCheckpointer(path, state, **options)


class RayCheckpointer(Checkpointer):
    """A Checkpointer that tells Ray Train of each committed checkpoint, and saves when Ray says that nodes will go.

    At each save all workers call `ray.train.report`, rank 0 with a pointer to the newest checkpoint that is durable
    by then: mostly the one before. `close` reports the last. Nothing is uploaded but the pointer.
    """

    def __init__(self, path: str | Path, state: Mapping[str, object], **options: Any) -> None:
        """See `checkpointer`."""
        where = train_function()
        if where is None:
            raise UsageError(
                "unbroken.integrations.ray is for inside the function that a ray.train trainer runs; "
                "elsewhere use unbroken.Checkpointer"
            )
        if not (os.environ.get(RUN_DIRECTORY) or Path(path).expanduser().is_absolute()):
            raise UsageError(
                f"{path}: give an absolute path, since Ray gives each start of a job another working directory"
            )
        super().__init__(path, state, **options)
        # Local mode keeps nothing, and leaves signals to the Checkpointer.
        self._storage = storage() if where == "worker" else None
        self._drain = Drain() if where == "worker" else None
        self._notice = self._drain or self._notice
        self._metrics: dict[str, Any] = {}
        self._metrics_at: dict[tuple[int, int], dict[str, Any]] = {}
        """Of saves that Ray has not been told of; of no interest on other ranks than 0."""
        self._told: SaveId | None = None
        """The checkpoint that Ray was told of last."""
        self._thread = threading.current_thread()

    def restore(self, *, strict: bool = True) -> Restored | None:
        """As `Checkpointer.restore`, and also raises NoUsableCheckpoint if only Ray remembers a checkpoint."""
        restored = super().restore(strict=strict)
        if restored is None and (known := step_known_to_ray()) is not None:
            raise NoUsableCheckpoint(
                f"Ray knows of a checkpoint of step {known}, but {self._root} is empty: is this the run directory, on "
                "storage that all nodes see? To start over, give another RunConfig(name=…)"
            )
        return restored

    def step(
        self,
        *,
        loss: Any = None,
        accumulating: bool = False,
        gradients: bool = False,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """As `Checkpointer.step`. It never raises Preempted: Ray's notice of it leads to a save, and training goes on.

        metrics  for Ray, with the checkpoint of this step if one is saved: names -> numbers and strings

        Also raises UsageError for metrics that Ray could not keep: tensors, say.
        """
        if metrics is not None:
            self._metrics = checked(metrics)
        super().step(loss=loss, accumulating=accumulating, gradients=gradients)

    def close(self) -> None:
        """As `Checkpointer.close`; then tells Ray of the last checkpoint. Every worker must come here."""
        if self._closed:
            return
        try:
            super().close()
        finally:
            # At the end of the process Ray's train function is over: whoever did not close in it tells Ray nothing.
            if threading.current_thread() is self._thread:
                self._tell()

    def _open(self) -> Session:
        workers, (_, world_size) = train.get_context().get_world_size(), rank_and_world_size()
        if workers != world_size:
            raise UsageError(
                f"Ray runs {workers} workers, but torch.distributed knows of {world_size}: use "
                "ray.train.torch.TorchTrainer, or call torch.distributed.init_process_group() before restore()"
            )
        return super()._open()

    def _wanted(self) -> Literal["save", "leave"] | None:
        return "save" if self._drain is not None and self._drain.unanswered() else super()._wanted()

    def _save(self) -> None:
        if self._drain is not None:
            self._drain.answer()
        if self._storage is not None and rank_and_world_size()[0] == 0:
            self._metrics_at[self._global_step, self._micro_step] = self._metrics
        super()._save()
        self._tell()

    def _tell(self) -> None:
        """Report to Ray. All workers must come equally often; what rank 0 says counts."""
        session, committed = self._session, self._saves.committed
        if session is None or session.generation is None:
            return
        checkpoint, metrics = None, self._metrics
        tells = session.cluster.rank == 0 and self._storage is not None
        if tells and committed is not None and committed != self._told:
            self._told = committed
            place = committed.step, committed.micro_step
            checkpoint = write_pointer(self._storage, self._root, committed, session.generation.number)
            # Ray keeps the metrics with the checkpoint, and may score it by them: never those of another step.
            metrics = self._metrics_at[place] if checkpoint is not None else metrics
            self._metrics_at = {at: found for at, found in self._metrics_at.items() if at > place}
        # ASYNC: the workers wait for each other, but not until Ray's controller has looked, which it does each second
        # or so. The pointer is written already: there is nothing to upload.
        train.report(
            metrics,
            checkpoint=checkpoint,
            checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
            checkpoint_upload_fn=_uploaded,
            delete_local_checkpoint_after_upload=False,
        )


def _uploaded(checkpoint: Any, _name: str) -> Any:
    return checkpoint
