"""A training job of each framework with that framework's own checkpoints, resumed as its documentation says.

    torchrun --nproc-per-node 2 benchmarks/own_resume.py lightning --out runs/own --steps 60 --every 7

For `benchmarks/frameworks.py`, which strikes it beside the examples that use `unbroken`. The network and the data are
those of the examples; the ledger of `unbroken` tells what each step was, and nothing else of `unbroken` is used.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from unbroken.ledger import VARIABLE, Ledger
from unbroken.state.registry import State

BATCH, ACCUMULATE, SEED = 8, 2, 1337
TIMEOUT = timedelta(seconds=30)
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
LOCAL = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


class Patterns(Dataset[Any]):
    """Ten patterns with noise: the noise of a sample is another in each epoch."""

    def __init__(self, length: int) -> None:
        self.patterns = torch.randn(10, 64, generator=torch.Generator().manual_seed(5))
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.patterns[index % 10] + torch.randn(64), "labels": index % 10}


class Seen:
    """What the network was trained on since the last step. In the ledger beside the state, of which it is no part."""

    def __init__(self) -> None:
        self.batches: list[str] = []

    def drain_samples(self) -> list[str]:
        """Digests of batches."""
        batches, self.batches = self.batches, []
        return batches

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


seen = Seen()


class Net(nn.Sequential):
    """Takes and gives what a Trainer asks for."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        seen.batches.append(hashlib.sha256(x.numpy().tobytes()).hexdigest()[:16])
        logits = super().forward(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def training_loader() -> DataLoader[Any]:
    """Shuffled, with noise from a worker."""
    return DataLoader(Patterns(413), BATCH, shuffle=True, num_workers=1)


class Record:
    """The ledger of this rank, if one is kept."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        objects: dict[str, object] = {"model": model, "optimizer": optimizer, "seen": seen}
        directory = os.environ.get(VARIABLE)
        rank = int(os.environ.get("RANK", "0"))
        self._ledger = Ledger(Path(directory), rank, WORLD, 0, State(objects), objects) if directory else None

    def step(self, step: int, loss: Tensor | None) -> None:
        """After an optimizer step."""
        if self._ledger is not None:
            self._ledger.write(step, loss)


def transformers(out: Path, steps: int, every: int) -> nn.Module:
    """The Trainer, from `get_last_checkpoint`."""
    from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
    from transformers.trainer_utils import get_last_checkpoint

    class Tell(TrainerCallback):
        record: Record | None = None

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            self.record = self.record or Record(trainer.model_wrapped, trainer.optimizer)
            self.record.step(state.global_step, None)

    set_seed(SEED)
    model = Net()
    arguments = TrainingArguments(
        output_dir=str(out / "own"),
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATE,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        save_steps=every,
        save_total_limit=3,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_num_workers=1,
        use_cpu=True,
        ddp_timeout=30,
        seed=SEED,
    )
    trainer = Trainer(model, arguments, train_dataset=Patterns(413), callbacks=[Tell()])
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(out / "own")) if (out / "own").exists() else None)
    return model


def accelerate(out: Path, steps: int, every: int) -> nn.Module:
    """`save_state` with automatic names, `load_state`, `skip_first_batches`."""
    from accelerate import Accelerator, InitProcessGroupKwargs
    from accelerate.utils import ProjectConfiguration, set_seed

    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=ACCUMULATE,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=TIMEOUT)],
        project_config=ProjectConfiguration(str(out / "own"), automatic_checkpoint_naming=True, total_limit=3),
    )
    set_seed(SEED)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps * accelerator.num_processes)
    prepared, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, training_loader())
    record, done = Record(prepared, optimizer.optimizer), 0
    saved = out / "own" / "checkpoints"
    if saved.exists() and any(saved.iterdir()):
        accelerator.load_state()
        newest = max(int(path.name.rpartition("_")[2]) for path in saved.iterdir())
        done = (newest + 1) * every
        accelerator.project_configuration.iteration = newest + 1
    per_epoch = -(-len(loader) // ACCUMULATE)
    while done < steps:
        batches = accelerator.skip_first_batches(loader, done % per_epoch * ACCUMULATE) if done % per_epoch else loader
        for batch in batches:
            with accelerator.accumulate(prepared):
                loss = prepared(**batch)["loss"]
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                done += 1
                record.step(done, loss)
                if done % every == 0:
                    accelerator.save_state()
                if done >= steps:
                    break
    return model


def lightning(out: Path, steps: int, every: int) -> nn.Module:
    """`ModelCheckpoint(save_last=True)`, `fit(ckpt_path="last")`."""
    import lightning as L
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import DDPStrategy

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.record: Record | None = None
            self.done = 0

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss: Tensor = self.net(**batch)["loss"]
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.trainer.global_step > self.done:
                self.record = self.record or Record(self.trainer.strategy.model, self.trainer.optimizers[0])
                self.record.step(self.trainer.global_step, outputs["loss"])
            self.done = self.trainer.global_step

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    L.seed_everything(SEED, verbose=False)
    own = ModelCheckpoint(
        out / "own", every_n_train_steps=every, save_last=True, save_top_k=3, monitor="step", mode="max"
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=LOCAL,
        num_nodes=WORLD // LOCAL,
        strategy=DDPStrategy(timeout=TIMEOUT) if "RANK" in os.environ else "auto",
        max_steps=steps,
        accumulate_grad_batches=ACCUMULATE,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        callbacks=[own],
    )
    module = Module()
    trainer.fit(module, training_loader(), ckpt_path="last")
    return module.net


def fabric(out: Path, steps: int, every: int) -> nn.Module:
    """`fabric.save` and `fabric.load` of one file, with the step in it."""
    import lightning as L
    from lightning.fabric.strategies import DDPStrategy

    L.seed_everything(SEED, verbose=False)
    own = L.Fabric(
        accelerator="cpu",
        devices=LOCAL,
        num_nodes=WORLD // LOCAL,
        strategy=DDPStrategy(timeout=TIMEOUT) if "RANK" in os.environ else "auto",
    )
    own.launch()
    net = Net()
    model, optimizer = own.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    loader = own.setup_dataloaders(training_loader())
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
    path = out / "own.ckpt"
    if path.exists():
        own.load(path, state)
    record, begun = Record(model._forward_module, optimizer.optimizer), 0
    while state["step"] < steps:
        for batch in loader:
            begun += 1
            accumulating = begun % ACCUMULATE != 0
            with own.no_backward_sync(model, enabled=accumulating):
                loss = model(**batch)["loss"]
                own.backward(loss)
            if accumulating:
                continue
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            state["step"] += 1
            record.step(state["step"], loss)
            if state["step"] % every == 0:
                own.save(path, state)
            if state["step"] >= steps:
                break
    return net


FRAMEWORKS: dict[str, Callable[[Path, int, int], nn.Module]] = {
    "transformers": transformers,
    "accelerate": accelerate,
    "lightning": lightning,
    "fabric": fabric,
}


def main() -> None:
    """Train to the end, from wherever the framework finds that it was."""
    parser = argparse.ArgumentParser()
    parser.add_argument("framework", choices=list(FRAMEWORKS))
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=7, help="steps between checkpoints")
    args = parser.parse_args()
    model = FRAMEWORKS[args.framework](Path(args.out), args.steps, args.every)
    if os.environ.get("RANK", "0") == "0":
        digest = hashlib.sha256()
        for weight in model.state_dict().values():
            digest.update(weight.cpu().contiguous().flatten().view(torch.uint8).numpy())
        print(f"final {digest.hexdigest()}", flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
