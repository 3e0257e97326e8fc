"""A small network on noisy digits-like data, in an Accelerate loop. Kill it at any moment and start it again.

    python examples/accelerate_loop.py --out runs/acc --steps 60 --every 10                        # alone
    torchrun --nproc-per-node 4 examples/accelerate_loop.py --out runs/acc --steps 60 --every 10   # four ranks
    unbroken prove --nproc 4 --trials 5 -- examples/accelerate_loop.py --out {out} --steps 60      # what changes?

It prints `restored step K …` when it resumes and `final <sha256>` over all weights at the end: the same digest
whether or not it was ever killed.
"""

import argparse
import hashlib
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset

import unbroken
from unbroken.integrations.accelerate import checkpointer

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="runs/acc", help="run directory; all nodes must share it")
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


# A short timeout: when a node is lost, the others must find out, and end.
accelerator = Accelerator(
    cpu=not torch.cuda.is_available(),
    gradient_accumulation_steps=2,
    kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=30))],
)
set_seed(1337)
model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps * accelerator.num_processes)
loader = DataLoader(Patterns(413), 8, shuffle=True, num_workers=1)
held_out = DataLoader(Patterns(64), 16)
model, optimizer, scheduler, loader, held_out = accelerator.prepare(model, optimizer, scheduler, loader, held_out)

state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
ckpt = checkpointer(accelerator, args.out, state, every=unbroken.Every(steps=args.every))
restored = ckpt.restore()
if restored:
    accelerator.print(restored, flush=True)

while ckpt.global_step < args.steps:
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        ckpt.step(loss=loss)
        if ckpt.global_step >= args.steps:
            break
    model.eval()
    with torch.no_grad():
        right = sum(accelerator.gather_for_metrics(model(x).argmax(1) == y).sum().item() for x, y in held_out)
    model.train()
    accelerator.print(f"step {ckpt.global_step}: {right} of 64 right", flush=True)
ckpt.close()

if accelerator.is_main_process:
    digest = hashlib.sha256()
    for weight in accelerator.unwrap_model(model).state_dict().values():
        digest.update(weight.cpu().contiguous().flatten().view(torch.uint8).numpy())
    print(f"final {digest.hexdigest()}", flush=True)
    (Path(args.out) / "final.txt").write_text(f"final {digest.hexdigest()}\n")
accelerator.end_training()
