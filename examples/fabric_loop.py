"""A small network on noisy patterns, with Lightning Fabric. Kill it at any moment and start it again.

    python examples/fabric_loop.py --out runs/fabric --steps 60 --every 10                        # alone
    torchrun --nproc-per-node 4 examples/fabric_loop.py --out runs/fabric --steps 60 --every 10   # four ranks
    unbroken prove --nproc 4 --trials 5 -- examples/fabric_loop.py --out {out} --steps 60     # what changes?

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
from lightning.fabric.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, Dataset

import unbroken
from unbroken.integrations.fabric import checkpointer

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="runs/fabric", help="run directory; all nodes must share it")
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


lightning.seed_everything(1337, verbose=False)
world_size, local = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
fabric = lightning.Fabric(
    accelerator="auto" if torch.cuda.is_available() else "cpu",
    devices=local,
    num_nodes=world_size // local,
    # A short timeout: when a node is lost, the others must find out, and end.
    strategy=DDPStrategy(timeout=timedelta(seconds=30)) if "RANK" in os.environ else "auto",
)
fabric.launch()
layers = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
model, optimizer = fabric.setup(layers, torch.optim.AdamW(layers.parameters(), lr=1e-3))
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
loader = fabric.setup_dataloaders(DataLoader(Patterns(413), 8, shuffle=True, num_workers=1))

state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
ckpt = checkpointer(fabric, args.out, state, every=unbroken.Every(steps=args.every))
restored = ckpt.restore()
if restored:
    fabric.print(restored, flush=True)

accumulate = 2
while ckpt.global_step < args.steps:
    for x, y in loader:
        accumulating = ckpt.micro_step + 1 < accumulate
        with fabric.no_backward_sync(model, enabled=accumulating):
            loss = nn.functional.cross_entropy(model(x), y) / accumulate
            fabric.backward(loss)
        if not accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        ckpt.step(loss=loss, accumulating=accumulating)
        if ckpt.global_step >= args.steps:
            break
ckpt.close()

if fabric.is_global_zero:
    digest = hashlib.sha256()
    for weight in layers.state_dict().values():
        digest.update(weight.cpu().contiguous().flatten().view(torch.uint8).numpy())
    print(f"final {digest.hexdigest()}", flush=True)
    (Path(args.out) / "final.txt").write_text(f"final {digest.hexdigest()}\n")
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
