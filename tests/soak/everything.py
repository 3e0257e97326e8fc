"""Everything that is easily forgotten, in one script: started by test_soak.py under `unbroken prove`.

Three models (batch norm in channels_last, one inside torch.compile, one tied in bf16), three optimizers and schedulers,
one of which follows each rank's own loss so that DDP's replicas drift apart, accumulation with no_sync, gradients
zeroed in place, a scaler off its default, an EMA, a generator per rank, workers that augment with all three libraries.
"""

import contextlib
import hashlib
import random
import sys
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import swa_utils
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR, ReduceLROnPlateau, SequentialLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import unbroken

steps = 45
dist.init_process_group("gloo", timeout=timedelta(seconds=30))
rank = dist.get_rank()
for seed in (random.seed, np.random.seed, torch.manual_seed):
    seed(rank)


class Noise(Dataset):
    def __len__(self):
        return 203

    def __getitem__(self, index):
        image = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(index))
        noise = torch.from_numpy(np.random.rand(3, 8, 8).astype(np.float32))
        return image + noise * random.random() + torch.rand(1), index


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head, self.inner = nn.Embedding(10, 16), nn.Linear(16, 10, bias=False), nn.Linear(16, 16)
        self.head.weight = self.embedding.weight
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, index):
        self.calls += 1
        return self.head(self.inner(self.embedding(index % 10)))


def convolution(inputs, outputs):
    return nn.Conv2d(inputs, outputs, 3, padding=1)


with torch.random.fork_rng():
    torch.manual_seed(3)
    layers = (
        convolution(3, 8),
        nn.BatchNorm2d(8),
        nn.Dropout2d(0.1),
        convolution(8, 8),
        nn.LeakyReLU(),
        convolution(8, 3),
    )
    maker = nn.Sequential(*layers).to(memory_format=torch.channels_last)
    body = (
        nn.Flatten(),
        nn.Linear(192, 64),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 1),
    )
    critic = torch.compile(nn.Sequential(*body), backend="eager")
    tied = Tied().bfloat16()
average = swa_utils.AveragedModel(maker, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
maker = DistributedDataParallel(maker, bucket_cap_mb=0.001)
critic = DistributedDataParallel(critic)
tied = DistributedDataParallel(tied)

flat = [p for p in maker.parameters() if p.ndim <= 1]
thick = [p for p in maker.parameters() if p.ndim > 1]
adamw = torch.optim.AdamW([{"params": thick, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}], lr=1e-3)
sgd = torch.optim.SGD(critic.parameters(), lr=0.01, momentum=0.9, nesterov=True)
adam = torch.optim.Adam(tied.parameters(), lr=1e-3, foreach=True, amsgrad=True)
cycle = OneCycleLR(adamw, 1e-2, total_steps=steps + 1)
plateau = ReduceLROnPlateau(sgd, patience=2, factor=0.7)
chain = SequentialLR(adam, [LinearLR(adam, total_iters=5), CosineAnnealingLR(adam, steps)], [5])
scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=7)
generator = torch.Generator().manual_seed(100 + rank)
data = Noise()
sampler = DistributedSampler(data, shuffle=True, seed=1, drop_last=True)
loader = unbroken.resumable(
    DataLoader(data, 5, sampler=sampler, num_workers=2, persistent_workers=True, drop_last=True)
)

state = {"maker": maker, "critic": critic, "tied": tied, "adamw": adamw, "sgd": sgd, "adam": adam, "cycle": cycle}
state |= {"plateau": plateau, "chain": chain, "scaler": scaler, "average": average, "generator": generator}
state |= {"loader": loader}
ckpt = unbroken.Checkpointer(sys.argv[1], state, every=unbroken.Every(steps=4), keep=unbroken.Keep(last=2))
restored = ckpt.restore()
if restored and rank == 0:
    print(restored, flush=True)

while ckpt.global_step < steps:
    # An epoch has an even number of batches on each rank, so a window never crosses its edge.
    for micro_step, (images, ids) in enumerate(loader):
        images = images.contiguous(memory_format=torch.channels_last)
        last = micro_step % 2 == 1
        with contextlib.nullcontext() if last else maker.no_sync():
            made = maker(images) + 0.01 * torch.randn(images.shape, generator=generator)
            loss = made.square().mean() + 0.1 * critic.module(made).mean()
            scaler.scale(loss).backward()
        if not last:
            ckpt.step(accumulating=True)
            continue
        for parameter in critic.parameters():
            parameter.grad.zero_()
        judged = critic(torch.cat([images, made.detach()])).square().mean()
        judged.backward()
        named = tied(ids).float().square().mean()
        named.backward()
        scaler.step(adamw)
        scaler.update()
        sgd.step()
        adam.step()
        adamw.zero_grad(set_to_none=False)
        sgd.zero_grad(set_to_none=False)
        adam.zero_grad()
        cycle.step()
        plateau.step(judged.item())
        chain.step()
        average.update_parameters(maker.module)
        ckpt.step(loss=loss + judged + named)
        if ckpt.global_step >= steps:
            break
ckpt.close()

digest = hashlib.sha256()
for model in (maker, critic, tied, average):
    for value in [*model.parameters(), *model.buffers()]:
        digest.update(value.detach().float().contiguous().numpy().tobytes())
if rank == 0:
    print(f"final {digest.hexdigest()}", flush=True)
dist.destroy_process_group()
