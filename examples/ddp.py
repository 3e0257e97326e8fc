"""A small GPT on the source of Python's standard library, with DDP. Kill it at any moment and start it again.

    python examples/ddp.py --out runs/gpt --steps 60 --every 10                          # alone
    torchrun --nproc-per-node 4 examples/ddp.py --out runs/gpt --steps 60 --every 10     # on four ranks
    unbroken prove --nproc 4 --trials 5 -- examples/ddp.py --out {out} --steps 60        # see that nothing changes

It prints `restored step K …` when it resumes and `final <sha256>` over all weights at the end: the same digest
whether or not it was ever killed.
"""

import argparse
import contextlib
import hashlib
import math
import os
import random
import sysconfig
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import unbroken

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="runs/gpt", help="run directory; all nodes must share it")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
args = parser.parse_args()

layers, heads, width, block = 2, 4, 64, 64
batch_size, accumulate = 8, 2  # sequences per rank and micro-step, micro-steps per optimizer step
learning_rate, warmup, dropout = 1e-3, 10, 0.1
text_bytes = 1 << 17  # little text, so that a short run crosses the edge of an epoch too


class Text(Dataset):
    """The standard library, byte by byte, in blocks."""

    def __init__(self):
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = b""
        while files and len(text) < text_bytes:
            text += files.pop(0).read_bytes()
        self.text = torch.frombuffer(bytearray(text[:text_bytes]), dtype=torch.uint8).long()

    def __len__(self):
        return (len(self.text) - 1) // block

    def __getitem__(self, index):
        begin = index * block
        return self.text[begin : begin + block], self.text[begin + 1 : begin + block + 1]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(b, t, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout if self.training else 0.0, is_causal=True)
        x = x + self.drop(self.proj(y.transpose(1, 2).reshape(b, t, width)))
        return x + self.drop(self.mlp(self.norm_2(x)))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(block, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)
        self.head.weight = self.bytes.weight  # tied

    def forward(self, x, y):
        h = self.drop(self.bytes(x) + self.positions(torch.arange(x.shape[1], device=x.device)))
        logits = self.head(self.norm(self.blocks(h)))
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def learning_rate_factor(step):
    """Linear warm-up, then a cosine down to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, args.steps - warmup))))


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

gpt = GPT().to(device)
model = DistributedDataParallel(gpt) if distributed else gpt
for seed in (random.seed, np.random.seed, torch.manual_seed):  # every rank its own dropout
    seed(1337 + rank)

decayed = [p for p in model.parameters() if p.dim() >= 2]
others = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW(
    [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=learning_rate
)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor)

data = Text()
sampler = DistributedSampler(data, world_size, rank, shuffle=True, seed=1337, drop_last=True)
loader = unbroken.resumable(DataLoader(data, batch_size, sampler=sampler, drop_last=True))

ckpt = unbroken.Checkpointer(
    args.out,
    {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader},
    every=unbroken.Every(steps=args.every),
)
restored = ckpt.restore()
if restored and rank == 0:
    print(restored, flush=True)

while ckpt.global_step < args.steps:
    for x, y in loader:
        accumulating = ckpt.micro_step + 1 < accumulate
        with model.no_sync() if distributed and accumulating else contextlib.nullcontext():
            loss = model(x.to(device), y.to(device)) / accumulate
            loss.backward()
        if accumulating:
            ckpt.step(accumulating=True)
            continue
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        ckpt.step(loss=loss)
        if rank == 0 and ckpt.global_step % 10 == 0:
            print(f"step {ckpt.global_step}: loss {loss.item() * accumulate:.4f}", flush=True)
        if ckpt.global_step >= args.steps:
            break
ckpt.close()

if rank == 0:
    digest = hashlib.sha256()
    for weight in gpt.state_dict().values():
        digest.update(weight.cpu().contiguous().flatten().view(torch.uint8).numpy())
    print(f"final {digest.hexdigest()}", flush=True)
    (Path(args.out) / "final.txt").write_text(f"final {digest.hexdigest()}\n")
if distributed:
    dist.destroy_process_group()
