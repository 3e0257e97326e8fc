"""A small job of Lightning's Trainer in every shape that the tests need, and what a run of it tells."""

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path

import lightning as L
import torch
import torchmetrics
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, GradientAccumulationScheduler
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import unbroken
from unbroken.integrations.lightning import UnbrokenCheckpoint

SAMPLES = 46


class Killed(BaseException):
    """Stands for a SIGKILL: nothing is saved on the way out."""


class Noisy(Dataset):
    """Rows with random augmentation."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return torch.randn(8) * 0.01 + index / SAMPLES, torch.tensor(float(index % 3)), index


class Stream(IterableDataset):
    """The same without a length, dealt to ranks and workers."""

    def __iter__(self):
        rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        worker = torch.utils.data.get_worker_info()
        part, parts = (worker.id, worker.num_workers) if worker else (0, 1)
        for index in range(SAMPLES // world):
            if index % parts == part:
                yield torch.randn(8) * 0.01 + index / SAMPLES, torch.tensor(float(index % 3)), index * world + rank


class Model(L.LightningModule):
    def __init__(self, job):
        super().__init__()
        self.job = job
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), *job.norm(16), nn.Linear(16, 1))
        if job.compiled:
            self.net = torch.compile(self.net, backend="eager")
        self.batches = {}
        self.error = torchmetrics.MeanSquaredError()

    def configure_model(self):
        if self.job.sharded and self.trainer.world_size > 1:
            mesh = self.device_mesh["data_parallel"]
            fully_shard(self.net[0], mesh=mesh)
            fully_shard(self.net, mesh=mesh)

    def error_of(self, batch):
        return self.net(batch[0]).squeeze(-1) - batch[1]

    def training_step(self, batch, batch_idx):
        loss = self.error_of(batch).square().mean()
        self.batches[self.trainer.fit_loop.total_batch_idx] = (batch[2].tolist(), loss.item().hex())
        self.error.update(self.net(batch[0]).squeeze(-1).detach(), batch[1])
        self.log("error", self.error, on_step=False, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.error_of(batch).square().mean() + 0.01 * torch.rand(()), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        if self.job.plateau:
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return [optimizer], [{"scheduler": scheduler, "monitor": "val_loss", "interval": "epoch"}]
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def train_dataloader(self):
        if self.job.stream:
            return DataLoader(Stream(), self.job.batch_size, num_workers=self.job.workers)
        loader = DataLoader(Noisy(), self.job.batch_size, shuffle=True, num_workers=self.job.workers)
        return unbroken.resumable(loader, seed=3) if self.job.resumable_already else loader

    def val_dataloader(self):
        persist = self.job.workers > 0
        return DataLoader(Noisy(), 8, num_workers=int(persist), persistent_workers=persist)


class TwoOptimizers(Model):
    """Manual optimization: one optimizer each batch, another each second one."""

    def __init__(self, job):
        super().__init__(job)
        self.automatic_optimization = False
        self.other = nn.Linear(8, 1)
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        loss = self.error_of(batch).square().mean()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        if batch_idx % 2:
            second.zero_grad()
            self.manual_backward(self.other(batch[0]).square().mean())
            second.step()
        self.batches[self.trainer.fit_loop.total_batch_idx] = (batch[2].tolist(), loss.item().hex())
        self.mean.update(loss.detach())
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        self.log("most", loss, reduce_fx="max", on_step=False, on_epoch=True)
        return {"loss": loss, "more": 1}

    def configure_optimizers(self):
        first = torch.optim.Adam(self.net.parameters(), 1e-2)
        return first, torch.optim.SGD(self.other.parameters(), 1e-2, momentum=0.9)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["mine"] = sorted(checkpoint["state_dict"])[0], self.trainer.global_step

    def on_load_checkpoint(self, checkpoint):
        assert checkpoint["mine"] == (sorted(checkpoint["state_dict"])[0], self.trainer.global_step)


class AddingUp(TwoOptimizers):
    """One optimizer adds up gradients over three batches, while the other steps in each."""

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        loss = self.error_of(batch).square().mean()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.manual_backward(self.other(batch[0]).square().mean())
        if batch_idx % 3 == 2:
            second.step()
            second.zero_grad()
        self.batches[self.trainer.fit_loop.total_batch_idx] = (batch[2].tolist(), loss.item().hex())


class Freezing(Model):
    """Freezes a layer and lets no unit drop out from the second epoch on."""

    def on_train_epoch_start(self):
        self.net[0].requires_grad_(self.current_epoch == 0)
        self.net[1].train(self.current_epoch == 0)


class TwoLoaders(Model):
    """A long and a short loader, which goes round."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch["long"], batch_idx) + batch["short"][0].mean() * self.net[0].weight.mean()

    def train_dataloader(self):
        short = DataLoader(TensorDataset(torch.arange(10.0)), 4, shuffle=True)
        return {"long": DataLoader(Noisy(), self.job.batch_size, shuffle=True), "short": short}


class Log(DummyLogger):
    """What a logger is told, by step."""

    def __init__(self):
        super().__init__()
        self.told = []

    def log_metrics(self, metrics, step):
        self.told.append((step, sorted(metrics.items())))


class Killer(L.Callback):
    """Ends the job before a batch, or at the end of an epoch, before other hooks."""

    def __init__(self, batch, epoch_end, restarted):
        self.batch, self.epoch_end, self.restarted = batch, epoch_end, restarted

    def on_train_start(self, trainer, pl_module):
        if self.restarted:
            torch.rand(3)  # hooks of the start may draw: the next batch must not notice

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.fit_loop.total_batch_idx == self.batch:
            raise Killed

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == self.epoch_end:
            raise Killed


@dataclass
class Job:
    """A kind of job."""

    model: str = "Model"
    batch_size: int = 4
    every: int | None = 1
    workers: int = 0
    stream: bool = False
    plateau: bool = False
    average: bool = False
    doubling: bool = False
    sharded: bool = False
    batch_norm: bool = True
    patience: int = 100
    resumable_already: bool = False
    compiled: bool = False
    scaled: bool = False
    """With a grad scaler, which Lightning makes on GPUs only."""
    trainer: dict = field(default_factory=dict)

    def norm(self, width):
        return [nn.BatchNorm1d(width)] if self.batch_norm else []


@dataclass
class Told:
    """What a run told; a killed one, up to there."""

    batches: dict
    """Samples and loss, by batch counted over all epochs."""
    log: list
    weights: str = ""
    metrics: dict = field(default_factory=dict)
    place: tuple = ()
    """`global_step`, `current_epoch`, learning rates, and what early stopping counts."""


def run(directory, job, *, batch=None, epoch_end=None, rank=0, world=1, keep=None, callbacks=()):
    """Train to the end, or to where it is killed."""
    L.seed_everything(7, verbose=False)
    model, log = globals()[job.model](job), Log()
    stopping = EarlyStopping("val_loss", patience=job.patience)
    own = [Killer(batch, epoch_end, Path(directory).exists()), stopping, *callbacks]
    own += [EMAWeightAveraging(decay=0.9)] if job.average else []
    own += [GradientAccumulationScheduler({1: 2})] if job.doubling else []
    every = None if job.every is None else unbroken.Every(steps=job.every)
    options = {"max_epochs": 3, "accumulate_grad_batches": 1 if job.doubling else 2, "val_check_interval": 3}
    options["enable_checkpointing"] = False
    strategy = "auto"
    if job.scaled:
        scaler = torch.amp.GradScaler("cpu", init_scale=8, growth_interval=3)
        options["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler)]
    if world > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_PORT": "1"}
        os.environ |= {"TORCHELASTIC_RUN_ID": "tests", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": str(world)}
        options["plugins"] = [TorchElasticEnvironment()]
        strategy = ModelParallelStrategy(world, 1) if job.sharded else DDPStrategy()
    else:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "GROUP_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=strategy,
        callbacks=[UnbrokenCheckpoint(directory, every=every, keep=keep, on_error="raise"), *own],
        logger=log,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{**options, **job.trainer},
    )
    try:
        trainer.fit(model)
    except Killed:
        return Told(model.batches, log.told)
    metrics = {name: value.item().hex() for name, value in trainer.callback_metrics.items()}
    rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
    if job.scaled:
        metrics["scale"] = trainer.precision_plugin.scaler.get_scale()
    place = (trainer.global_step, trainer.current_epoch, rates, stopping.wait_count, stopping.best_score.item())
    return Told(model.batches, log.told, digest_of(model), metrics, place)


def digest_of(model):
    """SHA-256 over all weights and buffers."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        digest.update(name.encode() + whole.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def on_rank(rank, world, directory, job, batch=None, epoch_end=None):
    """The same as one rank of several."""
    return run(directory, job, batch=batch, epoch_end=epoch_end, rank=rank, world=world)


def joined(killed, resumed):
    """The batches of a run in two parts; fails if the second part did one again in another way."""
    for number in killed.batches.keys() & resumed.batches.keys():
        assert killed.batches[number] == resumed.batches[number], f"batch {number}"
    return killed.batches | resumed.batches


def assert_same(killed, resumed, straight):
    """A killed and resumed run equals one that was left alone."""
    assert joined(killed, resumed) == straight.batches
    assert (resumed.weights, resumed.place) == (straight.weights, straight.place)
    assert resumed.metrics == straight.metrics
    first = resumed.log[0][0] if resumed.log else None
    assert resumed.log == straight.log[len(straight.log) - len(resumed.log) :], f"logs differ from step {first} on"
