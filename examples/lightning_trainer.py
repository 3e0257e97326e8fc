"""A small network on noisy patterns, with Lightning's Trainer. Kill it at any moment and start it again.

    python examples/lightning_trainer.py --out runs/pl --steps 60 --every 10                        # alone
    torchrun --nproc-per-node 4 examples/lightning_trainer.py --out runs/pl --steps 60 --every 10   # four ranks
    unbroken prove --nproc 4 --trials 5 -- examples/lightning_trainer.py --out {out} --steps 60     # what changes?

It prints `restored step K …` when it resumes and `final <sha256>` over all weights at the end: the same digest
whether or not it was ever killed.
"""

import argparse
import hashlib
import os
from datetime import timedelta
from pathlib import Path

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, Dataset

import unbroken
from unbroken.integrations.lightning import UnbrokenCheckpoint

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="runs/pl", help="run directory; all nodes must share it")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
args = parser.parse_args()


class Patterns(Dataset):
    """Ten patterns with noise: the noise of a sample is another in each epoch."""

    def __init__(self, length):
        self.patterns = torch.randn(10, 64, generator=torch.Generator().manual_seed(5))
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.patterns[index % 10] + torch.randn(64), index % 10


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10)
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.layers(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("right", (self.layers(x).argmax(1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


lightning.seed_everything(1337, verbose=False)
world_size = int(os.environ.get("WORLD_SIZE", "1"))
trainer = lightning.Trainer(
    accelerator="auto" if torch.cuda.is_available() else "cpu",
    devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    num_nodes=world_size // int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    # A short timeout: when a node is lost, the others must find out, and end.
    strategy=DDPStrategy(timeout=timedelta(seconds=30)) if "RANK" in os.environ else "auto",
    max_steps=args.steps,
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    val_check_interval=10,
    log_every_n_steps=5,
    enable_progress_bar=False,
    enable_model_summary=False,
    enable_checkpointing=False,
    logger=False,
    callbacks=[UnbrokenCheckpoint(args.out, every=unbroken.Every(steps=args.every))],
)
model = Classifier()
trainer.fit(model, DataLoader(Patterns(413), 8, shuffle=True, num_workers=1), DataLoader(Patterns(64), 16))

if trainer.is_global_zero:
    digest = hashlib.sha256()
    for weight in model.state_dict().values():
        digest.update(weight.cpu().contiguous().flatten().view(torch.uint8).numpy())
    print(f"final {digest.hexdigest()}", flush=True)
    (Path(args.out) / "final.txt").write_text(f"final {digest.hexdigest()}\n")
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
