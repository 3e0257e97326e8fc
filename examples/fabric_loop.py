"""A small GPT in a loop of one's own with Lightning Fabric. Kill it at any moment and start it again.

    python examples/fabric_loop.py --out runs/fabric --steps 60 --every 10                          # alone
    torchrun --nproc-per-node 2 examples/fabric_loop.py --out runs/fabric --steps 60 --every 10     # DDP
    unbroken prove --nproc 2 --trials 5 -- examples/fabric_loop.py --out {out} --steps 60           # nothing changes

It needs `pip install 'unbroken[lightning]'`.
"""

import argparse
import hashlib
import os
import sysconfig
from datetime import timedelta
from pathlib import Path

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import unbroken
from unbroken.integrations.fabric import checkpointer

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="runs/fabric", help="run directory; all nodes must share it")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
parser.add_argument("--dropout", type=float, default=0.1)
args = parser.parse_args()

layers, heads, width, block = 2, 4, 64, 64
batch_size, accumulate = 8, 2  # sequences per rank and micro-step, micro-steps per optimizer step
text_bytes = 1 << 15  # little text, so that a short run crosses the edge of an epoch too


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(block, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, args.dropout, F.gelu, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        h = self.bytes(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        return self.head(self.blocks(h, mask, is_causal=True))


world_size, local = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
# A short timeout: when a node is lost, the others must find out, and end, before somebody can start them again.
strategy = DDPStrategy(timeout=timedelta(seconds=30)) if world_size > 1 else "auto"
fabric = Fabric(accelerator="auto", devices=local, num_nodes=world_size // local, strategy=strategy)
fabric.launch()
fabric.seed_everything(1337)

gpt = GPT()
model, optimizer = fabric.setup(gpt, torch.optim.AdamW(gpt.parameters(), lr=1e-3, weight_decay=0.1))
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
torch.manual_seed(1337 + fabric.global_rank)  # every rank its own dropout

text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))
bytes_ = torch.frombuffer(bytearray(text[:text_bytes]), dtype=torch.uint8).long()
data = TensorDataset(bytes_.unfold(0, block + 1, block))
loader = fabric.setup_dataloaders(DataLoader(data, batch_size, shuffle=True, drop_last=True))

ckpt = checkpointer(
    fabric,
    args.out,
    {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader},
    every=unbroken.Every(steps=args.every),
)
restored = ckpt.restore()
if restored:
    fabric.print(restored, flush=True)

while ckpt.global_step < args.steps:
    for (line,) in loader:
        accumulating = ckpt.micro_step + 1 < accumulate
        with fabric.no_backward_sync(model, enabled=accumulating):
            loss = F.cross_entropy(model(line[:, :-1]).flatten(0, 1), line[:, 1:].flatten()) / accumulate
            fabric.backward(loss)
        if accumulating:
            ckpt.step(accumulating=True)
            continue
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        ckpt.step(loss=loss)
        if ckpt.global_step >= args.steps:
            break
ckpt.close()

if fabric.is_global_zero:
    digest = hashlib.sha256()
    for weight in gpt.state_dict().values():
        digest.update(weight.cpu().contiguous().flatten().view(torch.uint8).numpy())
    print(f"final {digest.hexdigest()}", flush=True)
    (Path(args.out) / "final.txt").write_text(f"final {digest.hexdigest()}\n")
