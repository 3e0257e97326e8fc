"""The private names of Transformers' Trainer that the integration leans on, all of them, and how they are replaced.

Known to hold for transformers 5.24; `check` compares names and parameters, so that another version is refused with a
clear message instead of going wrong.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from unbroken.integrations.known import unknown

AT_LEAST = "5.24.0"
TESTED = "5.24.0"
METHODS: dict[str, tuple[str, ...]] = {
    "_inner_training_loop": ("batch_size", "args", "resume_from_checkpoint", "trial", "ignore_keys_for_eval"),
    "get_train_dataloader": (),
    "get_eval_dataloader": ("eval_dataset",),
    "_init_training_state": (
        "max_steps",
        "num_update_steps_per_epoch",
        "num_train_epochs",
        "resume_from_checkpoint",
        "trial",
    ),
    "_prepare_for_training": ("max_steps", "train_dataloader", "resume_from_checkpoint"),
    "_run_epoch": (
        "model",
        "epoch",
        "train_dataloader",
        "steps_in_epoch",
        "num_update_steps_per_epoch",
        "trial",
        "ignore_keys_for_eval",
        "start_time",
        "resume_from_checkpoint",
        "epochs_trained",
        "steps_trained_in_current_epoch",
    ),
    "_maybe_log_save_evaluate": (
        "tr_loss",
        "grad_norm",
        "model",
        "trial",
        "epoch",
        "ignore_keys_for_eval",
        "start_time",
        "learning_rate",
    ),
}
"""Methods that are replaced, with the names of their parameters."""
LOSS = "_tr_loss"
SUMS = ("_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step", "current_flos")
"""Attributes of a Trainer that trains, of which its log lines are made: a tensor, and numbers."""


def check(trainer: Any) -> None:
    """Raise UsageError, naming the method, if this Trainer is not as the integration knows it."""
    for name, parameters in METHODS.items():
        method = getattr(trainer, name, None)
        if method is None or tuple(inspect.signature(method).parameters) != parameters:
            raise unknown(f"Trainer.{name}", "transformers", TESTED)


def check_begun(trainer: Any) -> None:
    """The same of what it has only from when training begins."""
    for name in (LOSS, *SUMS):
        if not hasattr(trainer, name):
            raise unknown(f"Trainer.{name}", "transformers", TESTED)


def replace(trainer: Any, name: str, hook: Callable[..., Any]) -> None:
    """Let `hook(original, arguments)` stand for a method of this Trainer; arguments come by name."""
    original = getattr(trainer, name)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return hook(lambda: original(*bound.args, **bound.kwargs), bound.arguments)

    setattr(trainer, name, call)
