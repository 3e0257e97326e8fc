"""One run of a Trainer that may be broken off, for tests on one rank and on several."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

import unbroken
from integrations.accelerate_runs import shard
from unbroken.state.registry import State

SAMPLES = 46
TIMES = ("runtime", "per_second")


class BrokenOff(Exception):
    """What ends a run in the middle."""


class Numbers(Dataset):
    """Sequences of tokens, and whether their sum is odd."""

    def __init__(self, length: int = SAMPLES) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= self.length:
            raise IndexError(index)
        tokens = torch.randint(0, 60, (8,), generator=torch.Generator().manual_seed(index))
        noise = torch.rand(())  # as augmentation would: it must be the same again
        return {"input_ids": tokens, "labels": (tokens.sum() % 2).long(), "index": index, "noise": noise}


class Stream(IterableDataset):
    """The same, one after another."""

    def __iter__(self):
        numbers = Numbers()
        return (numbers[index] for index in range(SAMPLES))


class Net(torch.nn.Module):
    """Something with dropout and a running mean."""

    def __init__(self, sharded: bool) -> None:
        super().__init__()
        # FSDP2 leaves running means to each rank, and then no other number of ranks can have them.
        self.tokens, self.norm = (
            torch.nn.Embedding(64, 16),
            torch.nn.LayerNorm(16) if sharded else torch.nn.BatchNorm1d(16),
        )
        self.drop, self.head = torch.nn.Dropout(0.2), torch.nn.Linear(16, 2)
        self.seen: list[list[int]] = []

    def forward(self, input_ids, labels=None, index=None, noise=None):
        if self.training:
            self.seen.append(index.tolist())
        features = self.norm(self.tokens(input_ids).mean(1) + noise[:, None])
        logits = self.head(self.drop(features))
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class Restless(TrainerCallback, ExportableState):
    """A callback that begins anew as training begins, and draws random numbers there."""

    def __init__(self) -> None:
        self.evaluations = self.epochs = 0

    def on_train_begin(self, args, state, control, **_):
        self.evaluations = 0
        torch.rand(3)

    def on_epoch_begin(self, args, state, control, **_):
        self.epochs += 1
        torch.rand(2)

    def on_evaluate(self, args, state, control, **_):
        self.evaluations += 1

    def state(self):
        return {"args": {}, "attributes": {"evaluations": self.evaluations, "epochs": self.epochs}}


def of_a_gpu(kind: type) -> type:
    """A Trainer that takes the way of FSDP2 as on GPUs: on CPUs Accelerate takes that of DDP whatever it was asked."""

    class OfGPU(kind):
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            shard(self.accelerator)
            self.is_fsdp_enabled = True

    return OfGPU


def train(
    rank: int, world: int, out: str, settings: dict[str, Any], broken_at: int | None = None, every: int = 2, **more: Any
) -> dict[str, Any]:
    """Train to the end, or until the step after `broken_at`. What there is to compare then."""
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers import Trainer, TrainingArguments

    from unbroken.integrations.transformers import attach

    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()
    if world > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_PORT="1")

    class BreakOff(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step == broken_at:
                raise BrokenOff

    arguments = {
        "output_dir": f"{out}/own",
        "use_cpu": True,
        "per_device_train_batch_size": 4,
        "num_train_epochs": 3,
        "gradient_accumulation_steps": 2,
        "logging_steps": 3,
        "save_strategy": "no",
        "eval_strategy": "steps",
        "eval_steps": 4,
        "report_to": [],
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "label_names": ["labels"],
        "seed": 7,
        **settings,
    }
    stream, sharded = arguments.pop("stream", False), arguments.pop("sharded", False)
    extra = [make() for make in arguments.pop("callbacks", [])]
    torch.manual_seed(0)
    model = Net(sharded)
    trainer = (of_a_gpu(Trainer) if sharded and world > 1 else Trainer)(
        model,
        TrainingArguments(**arguments),
        train_dataset=Stream() if stream else Numbers(),
        eval_dataset=Numbers(10),
        callbacks=[BreakOff(), *extra],
        optimizers=more.get("optimizers", (None, None)),
    )
    attach(trainer, f"{out}/run", every=unbroken.Every(steps=every) if every else None, keep=None, on_error="raise")
    try:
        trainer.train()
    except BrokenOff:
        return {"seen": model.seen}
    finally:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"):
            os.environ.pop(name, None)
    logs = [
        {key: value for key, value in line.items() if not key.endswith(TIMES)} for line in trainer.state.log_history
    ]
    return {
        "seen": model.seen,
        "weights": State({"model": model}).digests()["model"],
        "optimizer": [float(state["exp_avg"].double().sum()) for state in trainer.optimizer.state.values()],
        "logs": logs,
        "epoch": trainer.state.epoch,
        "step": trainer.state.global_step,
        "kinds": sorted({type(weight).__name__ for weight in model.parameters()}),
        "random": torch.get_rng_state().sum().item(),
        "rate": trainer.lr_scheduler.get_last_lr(),
        "callbacks": [one.state()["attributes"] for one in extra if isinstance(one, ExportableState)],
        "own": sorted(path.name for path in Path(f"{out}/own").glob("checkpoint-*")),
    }
