"""A small GPT on the source of Python's standard library, with Lightning Fabric. Kill it at any moment, start it again.

    python examples/fabric_loop.py --out runs/fabric --steps 60 --every 10                          # alone
    torchrun --nproc-per-node 4 examples/fabric_loop.py --out runs/fabric --steps 60 --every 10     # DDP on four ranks
    torchrun --nproc-per-node 4 examples/fabric_loop.py --out runs/fabric --strategy fsdp2          # sharded (FSDP2)
    unbroken prove --nproc 4 --trials 5 -- examples/fabric_loop.py --out {out} --steps 60           # nothing changes

It prints `restored step K …` when it resumes and `final <sha256>` over all weights at the end: the same digest
whether or not it was ever killed.
"""

import argparse
import hashlib
import os
import sysconfig
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import unbroken
from unbroken.integrations.fabric import checkpointer

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="runs/fabric", help="run directory; all nodes must share it")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
parser.add_argument("--strategy", choices=("ddp", "fsdp2"), default="ddp")
parser.add_argument("--precision", default="32-true", help="bf16-mixed, …")
parser.add_argument("--dropout", type=float, default=0.1)
args = parser.parse_args()

layers, heads, width, block = 2, 4, 64, 64
batch_size, accumulate = 8, 2  # sequences per rank and micro-step, micro-steps per optimizer step
validate_every = 7  # steps
text_bytes = 1 << 15  # little text, so that a short run crosses the edge of an epoch too


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(args.dropout)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(b, t, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=args.dropout if self.training else 0.0, is_causal=True)
        x = x + self.drop(self.proj(y.transpose(1, 2).reshape(b, t, width)))
        return x + self.drop(self.mlp(self.norm_2(x)))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(block, width)
        self.drop = nn.Dropout(args.dropout)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, line):
        h = self.drop(self.bytes(line[:, :-1]) + self.positions(torch.arange(block, device=line.device)))
        return F.cross_entropy(self.head(self.norm(self.blocks(h))).flatten(0, 1), line[:, 1:].flatten())


def sharded(model, mesh):
    """FSDP2, as Fabric's ModelParallelStrategy has it done."""
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh["data_parallel"])
    return model


# A short timeout: when a node is lost, the others must find out, and end, before somebody can start them again.
world_size, timeout = int(os.environ.get("WORLD_SIZE", 1)), timedelta(seconds=30)
local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
if args.strategy == "fsdp2":
    strategy = ModelParallelStrategy(sharded, data_parallel_size=world_size, tensor_parallel_size=1, timeout=timeout)
else:
    strategy = DDPStrategy(timeout=timeout) if world_size > 1 else "auto"
fabric = Fabric(devices=local_size, num_nodes=world_size // local_size, strategy=strategy, precision=args.precision)
fabric.launch()
fabric.seed_everything(1337, workers=True, verbose=False)

model = fabric.setup(GPT())
optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1))
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
torch.manual_seed(1337 + fabric.global_rank)  # every rank its own dropout

text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))
lines = torch.frombuffer(bytearray(text[:text_bytes]), dtype=torch.uint8).long().unfold(0, block + 1, block)
loader, unseen = fabric.setup_dataloaders(
    DataLoader(TensorDataset(lines[:-64]), batch_size, shuffle=True, drop_last=True),
    DataLoader(TensorDataset(lines[-64:]), batch_size),
)

ckpt = checkpointer(
    fabric,
    args.out,
    {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader, "unseen": unseen},
    every=unbroken.Every(steps=args.every),
)
restored = ckpt.restore()
if restored:
    fabric.print(restored, flush=True)


def validate():
    model.eval()
    with torch.no_grad():
        loss = torch.stack([model(line) for (line,) in unseen]).mean()
    model.train()
    fabric.print(f"step {ckpt.global_step + 1}: validation {fabric.all_reduce(loss).item():.4f}", flush=True)


while ckpt.global_step < args.steps:
    for (line,) in loader:
        accumulating = ckpt.micro_step + 1 < accumulate
        with fabric.no_backward_sync(model, enabled=accumulating):
            loss = model(line) / accumulate
            fabric.backward(loss)
        if accumulating:
            ckpt.step(accumulating=True)
            continue
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if (ckpt.global_step + 1) % validate_every == 0:
            validate()  # before ckpt.step(), so that a checkpoint of this step has it behind it
        ckpt.step(loss=loss)
        if ckpt.global_step >= args.steps:
            break
ckpt.close()

digest = hashlib.sha256()
for weight in model.state_dict().values():
    weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    digest.update(weight.cpu().contiguous().flatten().view(torch.uint8).numpy())
if fabric.is_global_zero:
    print(f"final {digest.hexdigest()}", flush=True)
    (Path(args.out) / "final.txt").write_text(f"final {digest.hexdigest()}\n")
if dist.is_initialized():
    dist.destroy_process_group()
