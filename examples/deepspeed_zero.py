"""A small GPT on the source of Python's standard library, with DeepSpeed's ZeRO. Kill it at any moment, start it again.

    torchrun --nproc-per-node 2 examples/deepspeed_zero.py --stage 2 --out runs/zero --steps 60 --every 10
    torchrun --nproc-per-node 4 examples/deepspeed_zero.py --stage 3 --out runs/zero --steps 90            # goes on
    unbroken prove --nproc 4 --trials 5 -- examples/deepspeed_zero.py --stage 3 --out {out} --steps 60  # what changes?

It prints `restored step K …` when it resumes and `final <sha256>` over all weights at the end: the same digest
whether or not it was ever killed.
"""

import argparse
import hashlib
import os
import sysconfig
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("RANK", "0")  # one process may be started without torchrun
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("LOCAL_RANK", "0")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29500")

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed

import unbroken
from unbroken.integrations.deepspeed import checkpointer

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="runs/zero", help="run directory; all nodes must share it")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), default=2)
parser.add_argument("--bf16", action="store_true")
args = parser.parse_args()

layers, heads, width, block = 2, 4, 64, 64
batch_size, accumulate = 8, 2  # sequences per rank and micro-step, micro-steps per optimizer step
text_bytes = 1 << 15  # little text, so that a short run crosses the edge of an epoch too


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(b, t, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0, is_causal=True)
        x = x + self.drop(self.proj(y.transpose(1, 2).reshape(b, t, width)))
        return x + self.drop(self.mlp(self.norm_2(x)))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(block, width)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, line):
        h = self.bytes(line[:, :-1]) + self.positions(torch.arange(block, device=line.device))
        logits = self.head(self.norm(self.blocks(h)))
        return F.cross_entropy(logits.float().flatten(0, 1), line[:, 1:].flatten())


# A short timeout: when a node is lost, the others must find out, and end, before somebody can start them again.
backend = "nccl" if torch.cuda.is_available() else "gloo"
deepspeed.init_distributed(backend, auto_mpi_discovery=False, timeout=timedelta(seconds=30), verbose=False)
rank, world_size = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
torch.manual_seed(1337)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=optimizer,
    lr_scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps),
    config={
        "train_micro_batch_size_per_gpu": batch_size,
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": args.bf16},
        "zero_optimization": {"stage": args.stage, "stage3_param_persistence_threshold": 1000},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1000,
    },
)
torch.manual_seed(1337 + rank)  # every rank its own dropout

text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))
lines = torch.frombuffer(bytearray(text[:text_bytes]), dtype=torch.uint8).long().unfold(0, block + 1, block)
data = TensorDataset(lines)
sampler = DistributedSampler(data, world_size, rank, drop_last=True)
loader = unbroken.resumable(DataLoader(data, batch_size, sampler=sampler, drop_last=True))

ckpt = checkpointer(engine, args.out, {"loader": loader}, every=unbroken.Every(steps=args.every))
restored = ckpt.restore()
if restored and rank == 0:
    print(restored, flush=True)

while ckpt.global_step < args.steps:
    for (line,) in loader:
        loss = engine(line.to(engine.device))
        engine.backward(loss)
        engine.step()
        ckpt.step(loss=loss)
        if ckpt.global_step >= args.steps:
            break
ckpt.close()

parameters = [parameter for parameter in engine.module.parameters() if hasattr(parameter, "ds_id")]
with deepspeed.zero.GatheredParameters(parameters, enabled=bool(parameters)):
    digest = hashlib.sha256()
    for weight in engine.module.state_dict().values():
        digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
if rank == 0:
    print(f"final {digest.hexdigest()}", flush=True)
    (Path(args.out) / "final.txt").write_text(f"final {digest.hexdigest()}\n")
torch.distributed.destroy_process_group()
