"""Handwritten digits: augmentation in workers, mixed precision, an EMA of the weights. Kill it and start it again.

    pip install scikit-learn                                                                # for the images
    python examples/digits.py --out runs/digits --steps 60 --every 10                       # alone
    torchrun --nproc-per-node 2 examples/digits.py --out runs/digits --steps 60 --every 10  # on two ranks
    unbroken prove --nproc 2 --trials 5 -- examples/digits.py --out {out} --steps 60        # see that nothing changes

It prints `restored step K …` when it resumes and `final <sha256>` over all weights at the end: the same digest
whether or not it was ever killed.
"""

import argparse
import hashlib
import os
import random
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import unbroken

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="runs/digits", help="run directory; all nodes must share it")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
args = parser.parse_args()

batch_size, workers = 16, 2
learning_rate, momentum, ema_decay = 0.05, 0.9, 0.99


class Digits(Dataset):
    """8x8 images, shifted and made noisy by NumPy's global generator: in workers, where most loaders lose it."""

    def __init__(self):
        digits = load_digits()
        self.images = (digits.images / 16).astype(np.float32)
        self.labels = digits.target

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = np.roll(self.images[index], np.random.randint(-1, 2, size=2), axis=(0, 1))
        image = image + np.random.normal(0, 0.05, image.shape).astype(np.float32)
        return torch.from_numpy(image[None]), int(self.labels[index])


# any launcher that sets RANK and WORLD_SIZE, or none
distributed = "RANK" in os.environ
device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
if distributed:
    # A short timeout: when a node is lost, the others must find out, and end, before somebody can start them again.
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timedelta(seconds=30))
rank, world_size = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
torch.manual_seed(1337)

net = nn.Sequential(
    *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
    *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
    *(nn.Flatten(), nn.Dropout(0.1), nn.Linear(32 * 4 * 4, 10)),
).to(device, memory_format=torch.channels_last)
ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(ema_decay))
model = DistributedDataParallel(net) if distributed else net
for seed in (random.seed, np.random.seed, torch.manual_seed):  # every rank its own dropout
    seed(1337 + rank)

optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=momentum)
scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=20)

data = Digits()
sampler = DistributedSampler(data, world_size, rank, shuffle=True, seed=1337)
loader = unbroken.resumable(DataLoader(data, batch_size, sampler=sampler, num_workers=workers, persistent_workers=True))

ckpt = unbroken.Checkpointer(
    args.out,
    {"model": model, "ema": ema, "optimizer": optimizer, "scaler": scaler, "loader": loader},
    every=unbroken.Every(steps=args.every),
)
restored = ckpt.restore()
if restored and rank == 0:
    print(restored, flush=True)

while ckpt.global_step < args.steps:
    for images, labels in loader:
        images = images.to(device, memory_format=torch.channels_last)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(images), labels.to(device))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        ema.update_parameters(net)
        ckpt.step(loss=loss)
        if rank == 0 and ckpt.global_step % 10 == 0:
            print(f"step {ckpt.global_step}: loss {loss.item():.4f}", flush=True)
        if ckpt.global_step >= args.steps:
            break
ckpt.close()

if rank == 0:
    digest = hashlib.sha256()
    for weight in [*net.state_dict().values(), *ema.state_dict().values()]:
        digest.update(weight.cpu().contiguous().flatten().view(torch.uint8).numpy())
    print(f"final {digest.hexdigest()}", flush=True)
    (Path(args.out) / "final.txt").write_text(f"final {digest.hexdigest()}\n")
if distributed:
    dist.destroy_process_group()
