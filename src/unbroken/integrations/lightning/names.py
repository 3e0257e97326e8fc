"""The private names of Lightning that the integration leans on, all of them.

`check` looks whether they are there, so that another version is refused with a clear message instead of going wrong.
"""

from __future__ import annotations

from typing import Any

from unbroken.errors import UsageError

AT_LEAST = "2.5"
TESTED = "2.6.6"
FIT_LOOP = ("_data_source", "setup_data", "epoch_loop", "_restarting", "state_dict", "load_state_dict")
EPOCH_LOOP = ("on_run_start", "on_advance_end", "batch_progress", "_num_ready_batches_reached", "_skip_next_val")
TRAINER = ("_accelerator_connector", "_checkpoint_connector", "distributed_sampler_kwargs", "lr_scheduler_configs")


def check(trainer: Any) -> None:
    """Raise UsageError, naming what is missing, if this Trainer is not as the integration knows it."""
    looked_at = ((trainer, TRAINER), (trainer.fit_loop, FIT_LOOP), (trainer.fit_loop.epoch_loop, EPOCH_LOOP))
    for owner, names in looked_at:
        for name in names:
            if not hasattr(owner, name):
                raise UsageError(
                    f"Lightning's {type(owner).__name__} has no {name}, which unbroken knows from {TESTED}: "
                    "a newer unbroken may know this version"
                )
