"""One run of a Lightning Trainer that may be broken off, for tests on one rank and on several."""

from __future__ import annotations

import os
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import unbroken
from unbroken.integrations.lightning import UnbrokenCheckpoint
from unbroken.state.registry import State

SAMPLES = 46


class BrokenOff(Exception):
    """What ends a run in the middle."""


class Numbers(Dataset):
    """Vectors that are another in each epoch, with their number."""

    def __init__(self, length: int = SAMPLES) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((4,), index / self.length) + 0.1 * torch.randn(4), index


class Stream(IterableDataset):
    """The same, one after another, without a length."""

    def __iter__(self):
        numbers = Numbers()
        return (numbers[index] for index in range(SAMPLES))


class Net(lightning.LightningModule):
    """Dropout, a running mean, a scheduler that waits for a metric, a number that hooks keep."""

    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        self.norm, self.drop, self.head = nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 1)
        self.other = nn.Linear(4, 1)
        self.automatic_optimization = not manual
        self.seen: list[list[int]] = []
        self.validated: list[tuple[int, float]] = []
        self.kept = 0

    def loss_of(self, head, batch):
        x, index = batch
        return (head(self.drop(self.norm(x))).squeeze(1) - index / SAMPLES).square().mean()

    def training_step(self, batch, batch_idx):
        self.seen.append(batch[1].tolist())
        self.kept += 1
        if self.automatic_optimization:
            loss = self.loss_of(self.head, batch) + 0 * sum(p.sum() for p in self.other.parameters())
            self.log("loss", loss)
            return loss
        for optimizer, head in zip(self.optimizers(), (self.head, self.other), strict=True):
            optimizer.zero_grad()
            self.manual_backward(self.loss_of(head, batch))
            optimizer.step()
        return None

    def validation_step(self, batch, batch_idx):
        loss = self.loss_of(self.head, batch)
        self.log("val", loss, sync_dist=True)
        if batch_idx == 0 and not self.trainer.sanity_checking:
            self.validated.append((self.trainer.global_step, loss.item()))

    def on_save_checkpoint(self, checkpoint):
        checkpoint["kept"] = self.kept

    def on_load_checkpoint(self, checkpoint):
        self.kept = checkpoint["kept"]

    def configure_optimizers(self):
        if not self.automatic_optimization:
            return [torch.optim.Adam(self.head.parameters(), 0.01), torch.optim.SGD(self.other.parameters(), 0.01)]
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val", "strict": False}}


class BreakOff(Callback):
    """Raises before the batch after so many."""

    def __init__(self, at: int | None) -> None:
        self.at = at

    def on_train_batch_start(self, trainer, *_):
        if trainer.fit_loop.epoch_loop.batch_progress.total.completed == self.at:
            raise BrokenOff


def train(
    rank: int, world: int, out: str, settings: dict[str, Any], broken_at: int | None = None, every: int = 2
) -> dict[str, Any]:
    """Train to the end, or until so many batches are done. What there is to compare then."""
    settings = dict(settings)
    manual, stream, workers = (settings.pop(name, 0) for name in ("manual", "stream", "workers"))
    stopping = settings.pop("stopping", None)
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    if world > 1:
        os.environ.update({name: str(value) for name, value in environment.items()})
        os.environ.update(MASTER_PORT="1", TORCHELASTIC_RUN_ID="tests", GROUP_RANK="0")
    lightning.seed_everything(3, verbose=False)
    module = Net(bool(manual))
    callbacks: list[Callback] = [BreakOff(broken_at)]
    if stopping:
        callbacks.append(EarlyStopping("val", min_delta=10.0, patience=stopping))
    callbacks.append(
        UnbrokenCheckpoint(
            f"{out}/run", every=unbroken.Every(steps=every) if every else None, keep=None, on_error="raise"
        )
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=DDPStrategy(find_unused_parameters=False) if world > 1 else "auto",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        **{"max_epochs": 3, "enable_checkpointing": False, **settings},
    )
    data = Stream() if stream else Numbers()
    loader = DataLoader(data, 4, shuffle=not stream, num_workers=workers)
    try:
        trainer.fit(module, loader, DataLoader(Numbers(8), 4))
    except BrokenOff:
        return {"seen": module.seen}
    finally:
        for name in (*environment, "MASTER_PORT", "TORCHELASTIC_RUN_ID", "GROUP_RANK"):
            os.environ.pop(name, None)
    return {
        "seen": module.seen,
        "validated": module.validated,
        "weights": State({"model": module}).digests()["model"],
        "optimizers": [
            State({"model": module, "optimizer": each}).digests()["optimizer"] for each in trainer.optimizers
        ],
        "rate": [group["lr"] for each in trainer.optimizers for group in each.param_groups],
        "steps": (trainer.global_step, trainer.current_epoch, trainer.fit_loop.epoch_loop._batches_that_stepped),
        "kept": module.kept,
        "random": torch.get_rng_state().sum().item(),
    }
