"""Ray's own records of a run, where they would keep a job from starting.

On each start of a driver Ray reads the file in which it wrote down what was reported, and ends with an error if the
file is torn (it is written in place) or if one of the directories it names is gone. What to resume from is not decided
there when `unbroken` saves: so the records may be mended by what is left.
"""

from __future__ import annotations

import json
import logging
import posixpath
from typing import Any

from pyarrow import fs

from unbroken.integrations.known import check_attributes, unknown
from unbroken.integrations.ray.private import OF_THE_STORAGE, TESTED

log = logging.getLogger(__name__)

Record = dict[str, Any]


def mend_records(run_config: Any) -> list[str]:
    """Drop from Ray's records what is not there any more; the names that were dropped.

        run_config = ray.train.RunConfig(name="gpt", storage_path="/shared/ray", …)
        mend_records(run_config)
        TorchTrainer(train_function, run_config=run_config, …).fit()

    Call it on the driver, before `fit`, while the run is not under way elsewhere. A torn file of records is moved
    aside, to `….torn` beside it. Checkpoints are neither read nor deleted.

    Raises UsageError if the records are not as Ray 2.60 writes them; OSError if the storage cannot be read or written.
    """
    storage = run_config.storage_context
    check_attributes(storage, OF_THE_STORAGE, "ray", TESTED)
    files, path = storage.storage_filesystem, storage.checkpoint_manager_snapshot_path
    if files.get_file_info(path).type == fs.FileType.NotFound:
        return []
    with files.open_input_stream(path) as file:
        text = file.read()
    try:
        records = json.loads(text)  # as Ray does: it takes numbers that are none
    except ValueError:
        files.move(path, f"{path}.torn")
        log.warning("Ray's records %s are torn, and were moved aside; checkpoints are intact", path)
        return [posixpath.basename(path)]
    try:
        vanished = _vanished(files, storage, records)
        mended = json.dumps(_without(records, set(vanished))).encode()
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise unknown(f"{path} ({error!r})", "ray", TESTED) from error
    if vanished:
        with files.open_output_stream(f"{path}.mended") as file:
            file.write(mended)
        files.move(f"{path}.mended", path)
        log.warning("Ray's records named what is gone: %s; dropped", ", ".join(vanished))
    return vanished


def _vanished(files: Any, storage: Any, records: Record) -> list[str]:
    names = [record["checkpoint_dir_name"] for record in records["checkpoint_results"]]
    kinds = [info.type for info in files.get_file_info([storage.build_checkpoint_path_from_name(n) for n in names])]
    return [name for name, kind in zip(names, kinds, strict=True) if kind == fs.FileType.NotFound]


def _without(records: Record, gone: set[str]) -> Record:
    """The records without those that name what is gone."""

    def kept(results: str, beside: str) -> Record:
        pairs = [
            pair
            for pair in zip(records[results], records[beside], strict=True)
            if pair[0]["checkpoint_dir_name"] not in gone
        ]
        return {results: [pair[0] for pair in pairs], beside: [pair[1] for pair in pairs]}

    mended = records | kept("checkpoint_results", "checkpoint_report_indices")
    mended |= kept("pending_training_results", "pending_validation_specs")
    latest = records["latest_checkpoint_result"]
    if latest is not None and latest["checkpoint_dir_name"] in gone:
        indices = mended["checkpoint_report_indices"]
        newest = indices.index(max(indices)) if indices else None
        mended["latest_checkpoint_result"] = None if newest is None else mended["checkpoint_results"][newest]
    return mended
