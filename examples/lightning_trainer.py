"""A small GPT with Lightning's Trainer, on the source of Python's standard library. Kill it and start it again.

    python examples/lightning_trainer.py --out runs/pl --steps 60 --every 10                          # alone
    torchrun --nproc-per-node 2 examples/lightning_trainer.py --out runs/pl --steps 60 --every 10     # DDP
    torchrun --nproc-per-node 2 examples/lightning_trainer.py --out runs/pl --strategy fsdp2          # sharded
    unbroken prove --nproc 2 --trials 5 -- examples/lightning_trainer.py --out {out} --steps 60       # nothing changes

The two lines of unbroken are the import and the callback. It needs `pip install 'unbroken[lightning]'`.
"""

import argparse
import hashlib
import os
import sysconfig
from datetime import timedelta
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import unbroken
from unbroken.integrations.lightning import UnbrokenCheckpoint

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="runs/lightning", help="run directory; all nodes must share it")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
parser.add_argument("--strategy", choices=["ddp", "fsdp2"], default="ddp", help="with several ranks")
parser.add_argument("--dropout", type=float, default=0.1)
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
        self.drop = nn.Dropout(args.dropout)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(b, t, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        dropout = args.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x = x + self.drop(self.proj(y.transpose(1, 2).reshape(b, t, width)))
        return x + self.drop(self.mlp(self.norm_2(x)))


class GPT(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(block, width)
        self.drop = nn.Dropout(args.dropout)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def configure_model(self):
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            for part in (*self.blocks, self):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def forward(self, x):
        h = self.drop(self.bytes(x) + self.positions(torch.arange(x.shape[1], device=x.device)))
        return self.head(self.norm(self.blocks(h)))

    def loss(self, line):
        return F.cross_entropy(self(line[:, :-1]).flatten(0, 1), line[:, 1:].flatten())

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch[0])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch[0]), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))
bytes_ = torch.frombuffer(bytearray(text[: text_bytes + (1 << 12)]), dtype=torch.uint8).long()
training = TensorDataset(bytes_[:text_bytes].unfold(0, block + 1, block))
validation = TensorDataset(bytes_[text_bytes:].unfold(0, block + 1, block))

world_size, strategy = int(os.environ.get("WORLD_SIZE", 1)), "auto"
if world_size > 1:
    # A short timeout: when a node is lost, the others must find out, and end, before somebody can start them again.
    timeout = timedelta(seconds=30)
    if args.strategy == "ddp":
        strategy = DDPStrategy(timeout=timeout)
    else:
        strategy = ModelParallelStrategy(data_parallel_size=world_size, tensor_parallel_size=1, timeout=timeout)
L.seed_everything(1337)
model = GPT()
trainer = L.Trainer(
    accelerator="auto",
    devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
    num_nodes=world_size // int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
    strategy=strategy,
    max_steps=args.steps,
    accumulate_grad_batches=accumulate,
    gradient_clip_val=1.0 if args.strategy == "ddp" else None,
    val_check_interval=8,
    callbacks=[
        UnbrokenCheckpoint(args.out, every=unbroken.Every(steps=args.every)),
        EarlyStopping("val_loss", patience=9),
    ],
    log_every_n_steps=10,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, DataLoader(training, batch_size, shuffle=True), DataLoader(validation, batch_size))

digest = hashlib.sha256()
for weight in model.state_dict().values():
    whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    digest.update(whole.cpu().contiguous().flatten().view(torch.uint8).numpy())
if trainer.is_global_zero:
    print(f"final {digest.hexdigest()}", flush=True)
    (Path(args.out) / "final.txt").write_text(f"final {digest.hexdigest()}\n")
