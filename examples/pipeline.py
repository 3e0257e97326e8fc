"""A small GPT on the source of Python's standard library, in two stages. Kill it at any moment and start it again.

    torchrun --nproc-per-node 2 examples/pipeline.py --out runs/pipeline --steps 60 --every 10     # two stages
    torchrun --nproc-per-node 4 examples/pipeline.py --out runs/pipeline --steps 60 --every 10     # twice, with DDP
    unbroken prove --nproc 4 --trials 5 -- examples/pipeline.py --out {out} --steps 60             # nothing changes

Each rank registers its own stage as `model`. Weights have the names that they have in the whole model
(`blocks.1.qkv.weight`, never `blocks.0` twice), so a checkpoint is one of the whole model.
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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import unbroken

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="runs/pipeline", help="run directory; all nodes must share it")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
parser.add_argument("--dropout", type=float, default=0.1)
args = parser.parse_args()

layers, heads, width, block = 2, 4, 64, 64
stages, batch_size, microbatches = 2, 8, 4  # sequences per replica of the pipeline
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
        if self.bytes is not None:
            x = self.drop(self.bytes(x) + self.positions(torch.arange(block, device=x.device)))
        for layer in self.blocks.values():
            x = layer(x)
        return x if self.head is None else self.head(self.norm(x))


def keep_stage(model, stage):
    """Take the other stages' layers out of the whole model; names stay."""
    for layer in range(layers):
        if layer * stages // layers != stage:
            del model.blocks[str(layer)]
    if stage > 0:
        model.bytes = model.positions = None
    if stage < stages - 1:
        model.norm = model.head = None
    return model


device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
# A short timeout: when a node is lost, the others must find out, and end, before somebody can start them again.
# Groups that init_device_mesh makes would wait for 30 minutes, so they are made here.
timeout = timedelta(seconds=30)
dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timeout)
rank = dist.get_rank()
ranks = torch.arange(dist.get_world_size()).view(-1, stages)
groups = [dist.new_subgroups_by_enumeration(lines.tolist(), timeout=timeout)[0] for lines in (ranks.T, ranks)]
mesh = DeviceMesh.from_group(groups, device, ranks, mesh_dim_names=("dp", "pp"))
replicas, replica, stage = mesh["dp"].size(), mesh["dp"].get_local_rank(), mesh["pp"].get_local_rank()
first, last = stage == 0, stage == stages - 1

torch.manual_seed(1337)
model = keep_stage(GPT(), stage).to(device)
module = DistributedDataParallel(model, process_group=mesh["dp"].get_group()) if replicas > 1 else model
torch.manual_seed(1337 + rank)  # every rank its own dropout
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)

text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))
bytes_ = torch.frombuffer(bytearray(text[:text_bytes]), dtype=torch.uint8).long()
data = TensorDataset(bytes_.unfold(0, block + 1, block))
sampler = DistributedSampler(data, replicas, replica, seed=1337, drop_last=True)
loader = unbroken.resumable(DataLoader(data, batch_size, sampler=sampler, drop_last=True))

ckpt = unbroken.Checkpointer(
    args.out,
    {"model": module, "optimizer": optimizer, "scheduler": scheduler, "loader": loader},
    every=unbroken.Every(steps=args.every),
)
restored = ckpt.restore()
if restored and rank == 0:
    print(restored, flush=True)

micro = loader.batch_size // microbatches  # a restore on fewer ranks keeps the global batch
tokens = torch.zeros(micro, block, dtype=torch.long, device=device)
hidden, logits = (torch.zeros(micro, block, size, device=device, requires_grad=True) for size in (width, 256))
# With the shapes given. Otherwise torch runs the model once more at the first step of every start, to learn them, and
# batch norm, if there were any, would count a batch that a job that was never killed does not have there.
inputs, outputs = tokens if first else hidden, logits if last else hidden
pipe = PipelineStage(module, stage, stages, torch.device(device), inputs, outputs, group=mesh["pp"].get_group())
schedule = Schedule1F1B(
    pipe, microbatches, lambda logits, target: F.cross_entropy(logits.flatten(0, 1), target.flatten())
)

while ckpt.global_step < args.steps:
    for (line,) in loader:
        line = line.to(device)
        losses = []
        schedule.step(*([line[:, :-1]] if first else []), target=line[:, 1:] if last else None, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        ckpt.step(loss=torch.stack(losses).mean() if last else None)
        if ckpt.global_step >= args.steps:
            break
ckpt.close()

digest = hashlib.sha256()
weights = [weight.detach().cpu() for weight in model.parameters()]
every_stage = [None] * stages
dist.all_gather_object(every_stage, weights, mesh["pp"].get_group())
for weight in (weight for weights in every_stage for weight in weights):
    digest.update(weight.contiguous().view(torch.uint8).numpy())
if rank == 0:
    print(f"final {digest.hexdigest()}", flush=True)
    (Path(args.out) / "final.txt").write_text(f"final {digest.hexdigest()}\n")
dist.destroy_process_group()
