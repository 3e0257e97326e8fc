"""A small GPT on the source of Python's standard library, with FSDP1. Kill it at any moment and start it again.

    torchrun --nproc-per-node 4 examples/fsdp1.py --out runs/fsdp1 --steps 60 --every 10    # on four ranks
    unbroken prove --nproc 4 --trials 5 -- examples/fsdp1.py --out {out} --steps 60         # see that nothing changes

With --flat the optimizer holds FSDP1's flat parameters (`use_orig_params=False`); each parameter is saved by its name
all the same. New code takes `fully_shard` (fsdp2.py). All of them go on in the same directory.
"""

import argparse
import hashlib
import os
import sysconfig
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import unbroken

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="runs/fsdp1", help="run directory; all nodes must share it")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
parser.add_argument("--flat", action="store_true", help="use_orig_params=False")
parser.add_argument("--dropout", type=float, default=0.1)
args = parser.parse_args()

layers, heads, width, block = 2, 4, 64, 64
batch_size = 8  # sequences per rank
text_bytes = 1 << 14  # little text, so that a short run crosses the edge of an epoch too


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(args.dropout)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(b, t, -1, 3, width // heads).permute(3, 0, 2, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=args.dropout, is_causal=True)
        x = x + self.drop(self.proj(y.transpose(1, 2).reshape(b, t, -1)))
        return x + self.drop(self.mlp(self.norm_2(x)))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(block, width)
        self.drop = nn.Dropout(args.dropout)
        self.blocks = nn.ModuleDict({str(layer): Block() for layer in range(layers)})
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, x):
        x = self.drop(self.bytes(x) + self.positions(torch.arange(block, device=x.device)))
        for layer in self.blocks.values():
            x = layer(x)
        return self.head(self.norm(x))


device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
# A short timeout: when a node is lost, the others must find out, and end, before somebody can start them again.
dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timedelta(seconds=30))
rank, world_size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(1337)
model = FullyShardedDataParallel(
    GPT(), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=not args.flat, device_id=torch.device(device)
)
torch.manual_seed(1337 + rank)  # every rank its own dropout
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)

text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))
bytes_ = torch.frombuffer(bytearray(text[:text_bytes]), dtype=torch.uint8).long()
data = TensorDataset(bytes_.unfold(0, block + 1, block))
sampler = DistributedSampler(data, world_size, rank, seed=1337, drop_last=True)
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
    for (line,) in loader:
        line = line.to(device)
        loss = F.cross_entropy(model(line[:, :-1]).flatten(0, 1), line[:, 1:].flatten())
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        ckpt.step(loss=loss)
        if ckpt.global_step >= args.steps:
            break
ckpt.close()

digest = hashlib.sha256()
with FullyShardedDataParallel.summon_full_params(model, writeback=False):
    for weight in model.parameters():
        digest.update(weight.detach().clone().cpu().contiguous().view(torch.uint8).numpy())
if rank == 0:
    print(f"final {digest.hexdigest()}", flush=True)
    (Path(args.out) / "final.txt").write_text(f"final {digest.hexdigest()}\n")
dist.destroy_process_group()
