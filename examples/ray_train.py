"""A small GPT on the source of Python's standard library, with Ray Train. Kill a worker, or everything, at any moment.

    python examples/ray_train.py --nproc 2 --out runs/ray --steps 60 --every 10
    python examples/ray_train.py --nproc 1 --out runs/ray --steps 90                # goes on, on another world size
    unbroken prove --launcher none --nproc 2 --trials 5 -- examples/ray_train.py --nproc 2 --out {out} --steps 60

Ray starts lost workers again by itself. It prints `restored step K …` when it resumes and `final <sha256>` over all
weights at the end: the same digest whether or not anything was ever killed.
"""

import argparse
import hashlib
import random
import sysconfig
from pathlib import Path

import numpy as np
import ray
import ray.train.torch
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import unbroken
from unbroken.integrations.ray import checkpointer, mend_records

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


def train(config):
    """What every worker runs."""
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    torch.manual_seed(1337)
    model = ray.train.torch.prepare_model(GPT())
    for seed in (random.seed, np.random.seed, torch.manual_seed):  # every rank its own dropout
        seed(1337 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config["steps"])

    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))
    lines = torch.frombuffer(bytearray(text[:text_bytes]), dtype=torch.uint8).long().unfold(0, block + 1, block)
    data = TensorDataset(lines)
    sampler = DistributedSampler(data, world_size, rank, drop_last=True)
    loader = unbroken.resumable(DataLoader(data, batch_size, sampler=sampler, drop_last=True))

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    with checkpointer(config["out"], state, every=unbroken.Every(steps=config["every"])) as ckpt:
        restored = ckpt.restore()
        if restored and rank == 0:
            print(restored, flush=True)
        device = ray.train.torch.get_device()
        while ckpt.global_step < config["steps"]:
            for (line,) in loader:
                accumulating = ckpt.micro_step + 1 < accumulate
                loss = model(line.to(device)) / accumulate
                loss.backward()
                if accumulating:
                    ckpt.step(accumulating=True)
                    continue
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                ckpt.step(loss=loss, metrics={"loss": loss.item() * accumulate})
                if ckpt.global_step >= config["steps"]:
                    break

    if rank == 0:
        digest = hashlib.sha256()
        for weight in getattr(model, "module", model).state_dict().values():
            digest.update(weight.cpu().contiguous().flatten().view(torch.uint8).numpy())
        (Path(config["out"]) / "final.txt").write_text(f"final {digest.hexdigest()}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="runs/ray", help="run directory; all nodes must share it")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--nproc", type=int, default=2, help="workers")
    args = parser.parse_args()
    out = Path(args.out).absolute()

    ray.init("local", num_cpus=args.nproc + 1, include_dashboard=False, object_store_memory=200 << 20)
    run_config = RunConfig(
        name="run",
        storage_path=str(out / "ray"),  # for what Ray keeps: pointers to our checkpoints, metrics
        failure_config=FailureConfig(max_failures=-1),
    )
    mend_records(run_config)
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"out": str(out), "steps": args.steps, "every": args.every},
        # A short timeout: when a worker is lost, the others must find out, and end, before Ray starts them again.
        torch_config=ray.train.torch.TorchConfig(timeout_s=30),
        scaling_config=ScalingConfig(num_workers=args.nproc, use_gpu=torch.cuda.is_available()),
        run_config=run_config,
    )
    trainer.fit()
    print((out / "final.txt").read_text(), end="", flush=True)
