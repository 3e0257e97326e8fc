"""A small job for Ray Train, and the same one without Ray on ranks that exist already."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import unbroken

SAMPLES = 48
BATCH = 2
EVERY = 4


class Rows(Dataset[Any]):
    """Noise is drawn as augmentation would be."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return torch.full((6,), index / SAMPLES) + torch.rand(6) / 8, torch.tensor([float(index % 3)]), index


class Net(nn.Module):
    """With dropout, and enough parameters for more than one of DDP's buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.Linear(64, 1))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layers(rows)


def plain(rank: int, world_size: int, out: str, until: int) -> None:
    """The job under torchrun, so to speak."""
    model = seeded(lambda net: DistributedDataParallel(net), rank)
    go_on(lambda path, state: unbroken.Checkpointer(path, state), model, rank, world_size, {"out": out, "until": until})


def with_ray(config: dict[str, Any]) -> None:
    """The job as Ray's workers run it."""
    import ray.train.torch

    from unbroken.integrations.ray import checkpointer

    context = ray.train.get_context()
    model = seeded(ray.train.torch.prepare_model, context.get_world_rank())

    def make(path: str, state: dict[str, object]) -> unbroken.Checkpointer:
        return checkpointer(path, state, every=unbroken.Every(steps=config.get("every", EVERY)))

    go_on(make, model, context.get_world_rank(), context.get_world_size(), config)


def seeded(wrap: Any, rank: int) -> nn.Module:
    torch.manual_seed(7)
    model: nn.Module = wrap(Net())
    torch.manual_seed(100 + rank)
    return model


def go_on(make: Any, model: nn.Module, rank: int, world_size: int, config: dict[str, Any]) -> None:
    """Train to step `config["until"]`; each step is told in a file of this rank, and the weights at the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    data = Rows()
    sampler = DistributedSampler(data, world_size, rank, drop_last=True)
    loader = unbroken.resumable(DataLoader(data, BATCH, sampler=sampler, drop_last=True))
    out = Path(config["out"])
    told = Told(out, rank)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    with make(config["out"], state) as ckpt:
        restored = ckpt.restore()
        told.line(restored=restored.step if restored else 0, world=world_size)
        while ckpt.global_step < config["until"]:
            for rows, targets, samples in loader:
                loss = nn.functional.mse_loss(model(rows), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                told.line(step=ckpt.global_step + 1, loss=loss.item().hex(), samples=samples.tolist())
                more = {"metrics": {"loss": loss.item()}} if "storage" in config else {}
                ckpt.step(loss=loss, **more)
                disturb(out, ckpt.global_step, rank, config)
                if ckpt.global_step >= config["until"]:
                    break
    if config.get("own"):
        import ray.train

        own = ray.train.Checkpoint.from_directory(config["own"])
        ray.train.report({"own": 1}, own if rank == 0 else None, delete_local_checkpoint_after_upload=False)
    weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    told.line(final=hashlib.sha256(weights).hexdigest(), draws=torch.rand(3).tolist())


class Told:
    """What a rank tells, line by line; a killed process leaves what it had told."""

    def __init__(self, out: Path, rank: int) -> None:
        told = out.with_name(f"{out.name}-told")
        told.mkdir(parents=True, exist_ok=True)
        self._file = (told / f"{rank}.jsonl").open("a", encoding="utf-8")

    def line(self, **values: Any) -> None:
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()


def told_by(out: Path, rank: int) -> list[dict[str, Any]]:
    path = out.with_name(f"{out.name}-told") / f"{rank}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def disturb(out: Path, step: int, rank: int, config: dict[str, Any]) -> None:
    """What the test asked for at this step: once each."""
    for act in config.get("acts", []):
        if act["step"] != step or rank not in act["ranks"]:
            continue
        mark = out.with_name(f"{out.name}-{act['act']}-{step}-{rank}")
        if mark.exists():
            continue
        mark.touch()
        if act["act"] == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if act["act"] == "wait for the notice":
            wait_until(preempted)
        if act["act"] == "wait for the end":
            wait_until(lambda: False)


def preempted() -> bool:
    from unbroken.integrations.ray.private import preemption

    return preemption().preemption_info is not None


def wait_until(come: Any, deadline_s: float = 180) -> None:
    """The deadline is long: beside other tests Ray may need a minute to start workers anew."""
    start = time.monotonic()
    while not come():
        assert time.monotonic() - start < deadline_s, "what the test promised did not come"
        time.sleep(0.02)


def odd_ways(config: dict[str, Any]) -> None:
    """What a train function may do wrong, and what is right though it looks odd; each rank tells what came of it."""
    import ray.train.torch

    from unbroken.errors import UnbrokenError
    from unbroken.integrations.ray import checkpointer

    rank = ray.train.get_context().get_world_rank()
    out = Path(config["out"])
    told = Told(out, rank)

    def told_error(name: str, act: Any) -> None:
        try:
            act()
        except UnbrokenError as error:
            told.line(**{name: f"{type(error).__name__}: {error}"})

    model = seeded(ray.train.torch.prepare_model, rank)
    told_error("relative", lambda: checkpointer("runs/x", {"model": model}))
    apart = checkpointer(out / f"of-rank-{rank}", {"model": model}, deadline_s=20.0)
    told_error("apart", apart.restore)

    loader = DataLoader(Rows(), BATCH, drop_last=True)
    told_error("wrapped", lambda: unbroken.resumable(ray.train.torch.prepare_data_loader(loader)))
    loader = ray.train.torch.prepare_data_loader(loader, move_to_device=False)
    with unbroken.Checkpointer(out / "plain", {"model": model, "loader": unbroken.resumable(loader)}) as ckpt:
        restored = ckpt.restore()
        told.line(plain=restored.step if restored else 0)
        for _ in range(2):
            ckpt.step()
        ckpt.save()
        ckpt.wait()
        if not restored and rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
