"""The private names of Lightning that the integration leans on, all of them.

Known to hold for lightning 2.6; `check` looks for each, so that another version is refused with a clear message instead
of going wrong.
"""

from __future__ import annotations

import importlib
from typing import Any

from unbroken.integrations.known import unknown

AT_LEAST = "2.6"
TESTED = "2.6.6"

NAMES: dict[str, tuple[str, ...]] = {
    "lightning.pytorch.loops.fit_loop:_FitLoop": (
        "run",
        "reset",
        "done",
        "setup_data",
        "on_advance_end",
        "on_iteration_done",
        "state_dict",
        "load_state_dict",
        "_can_stop_early",
    ),
    "lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop": (
        "reset",
        "on_run_start",
        "on_advance_end",
        "on_iteration_done",
        "global_step",
        "_is_training_done",
        "_num_ready_batches_reached",
    ),
    "lightning.pytorch.loops.fit_loop:RestartStage": ("RESTARTED_MID_EPOCH",),
    "lightning.pytorch.loops.utilities:_is_max_limit_reached": (),
    "lightning.pytorch.trainer.connectors.data_connector:_DataConnector": ("_prepare_dataloader",),
    "lightning.pytorch.trainer.connectors.signal_connector:_SignalConnector": ("teardown",),
    "lightning.pytorch.trainer.connectors.logger_connector.result:_ResultCollection": ("log",),
    "lightning.pytorch.trainer.connectors.logger_connector.result:_ResultMetric": ("update", "compute"),
    "lightning.pytorch.trainer.connectors.logger_connector.result:_Metadata": (),
    "lightning.pytorch.trainer.connectors.logger_connector.result:_Sync": (),
}
"""Classes and functions by module, with their attributes."""
OF_A_TRAINER = (
    "fit_loop._combined_loader",
    "fit_loop._data_fetcher",
    "fit_loop._restart_stage",
    "fit_loop._restarting",
    "fit_loop.epoch_loop._results",
    "fit_loop.epoch_loop._restarting",
    "fit_loop.epoch_loop.batch_progress",
    "fit_loop.epoch_loop.val_loop",
    "fit_loop.epoch_loop.automatic_optimization",
    "fit_loop.epoch_loop.manual_optimization",
    "_data_connector",
    "_accelerator_connector.use_distributed_sampler",
    "_signal_connector",
    "_logger_connector._progress_bar_metrics",
    "_logger_connector._logged_metrics",
    "_logger_connector._callback_metrics",
    "_logger_connector._current_fx",
    "_logger_connector._first_loop_iter",
    "_val_check_time_interval",
)
"""Attributes of a Trainer, each a path."""


def check(trainer: Any) -> None:
    """Raise UsageError, naming what is missing, if this Lightning is not as the integration knows it."""
    for name, attributes in NAMES.items():
        module, _, member = name.partition(":")
        try:
            found = getattr(importlib.import_module(module), member)
        except (ImportError, AttributeError) as error:
            raise unknown(name.replace(":", "."), "lightning", TESTED) from error
        for attribute in attributes:
            if not hasattr(found, attribute):
                raise unknown(f"{member}.{attribute}", "lightning", TESTED)
    for path in OF_A_TRAINER:
        found = trainer
        for attribute in path.split("."):
            if not hasattr(found, attribute):
                raise unknown(f"Trainer.{path}", "lightning", TESTED)
            found = getattr(found, attribute)
