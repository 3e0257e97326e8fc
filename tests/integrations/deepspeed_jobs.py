"""A small job with a DeepSpeed engine of any stage, on ranks that exist already, and what a start of it tells."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import unbroken

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("DS_IGNORE_CUDA_DETECTION", "1")
SAMPLES = 64


@dataclass(frozen=True)
class Job:
    """What the script of a job says."""

    stage: int = 1
    bf16: bool = False
    accumulate: int = 1
    wide_sums: bool = False
    """Gradients of bf16 are summed in float32."""
    clip: float = 0.5
    groups: int = 1
    frozen: bool = False
    offload: bool = False
    sub_group: int = 1 << 30
    """Elements of a sub-group of ZeRO-3."""
    keep_gathered: int = 0
    """Parameters of ZeRO-3 below this size stay gathered."""
    loader_of_its_own: bool = False
    """DeepSpeed makes the loader."""
    unmanaged: bool = False
    """The script says where a window ends."""


class Rows(Dataset[Any]):
    """Noise is drawn as augmentation would be."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return torch.full((6,), index / SAMPLES) + torch.rand(6) / 8, torch.tensor(float(index % 3)), index


class Net(nn.Module):
    """Odd sizes, so that pieces end inside parameters; a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.norm = nn.Linear(6, 7), nn.Dropout(0.2), nn.LayerNorm(7)
        self.middle, self.down = nn.Linear(7, 5, bias=False), nn.Linear(5, 1)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.down(self.middle(self.norm(self.drop(torch.relu(self.up(rows)))))).squeeze(-1)


def config_of(job: Job, world_size: int) -> dict[str, Any]:
    """As in a `ds_config.json`."""
    zero: dict[str, Any] = {
        "stage": job.stage,
        "stage3_param_persistence_threshold": job.keep_gathered,
        "sub_group_size": job.sub_group,
        "reduce_bucket_size": 1 << 12,
        "stage3_prefetch_bucket_size": 1 << 12,
    }
    if job.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": job.accumulate,
        "gradient_clipping": job.clip,
        "zero_optimization": zero,
        "bf16": {"enabled": job.bf16},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    if job.unmanaged:
        config["managed_gradient_accumulation"] = False
    if job.wide_sums:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def forget_groups() -> None:
    """DeepSpeed keeps process groups in its modules, and counts parameters; those of a case before are gone."""
    import deepspeed
    import deepspeed.comm.comm as comm
    import deepspeed.utils.groups as groups
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

    comm.cdb = None
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # a shorter way that has to be compiled first
    deepspeed.zero.Init.param_id = 0
    (count,) = inspect.unwrap(DeepSpeedZeRoOffload._register_deepspeed_module).__defaults__
    count[0] = 0
    for name, value in vars(groups).items():
        if name.startswith("_") and name.isupper() and not isinstance(value, dict):
            setattr(groups, name, None)
        elif name.startswith("_") and name.isupper():
            value.clear()


def optimizer_of(model: nn.Module, job: Job) -> torch.optim.Optimizer:
    """Of what is trained, in several groups."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    parts = [{"params": trained[at :: job.groups], "lr": 0.01 / (at + 1)} for at in range(job.groups)]
    return torch.optim.AdamW(parts, weight_decay=0.1)


class Run:
    """One start of a job."""

    def __init__(self, rank: int, world_size: int, directory: str, job: Job, every: int | None) -> None:
        import deepspeed

        from unbroken.integrations.deepspeed import checkpointer

        forget_groups()
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
        torch.manual_seed(0)
        model = Net()
        model.middle.weight.requires_grad_(not job.frozen)
        optimizer = optimizer_of(model, job)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        self.engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            lr_scheduler=scheduler,
            config=config_of(job, world_size),
            training_data=Rows() if job.loader_of_its_own else None,
        )
        self.job = job
        sampler = DistributedSampler(Rows(), world_size, rank, seed=3)
        self.loader = unbroken.resumable(DataLoader(Rows(), 4, sampler=sampler))
        torch.manual_seed(100 + rank)
        self.ckpt = checkpointer(
            self.engine,
            directory,
            {"loader": self.loader},
            every=unbroken.Every(steps=every) if every else None,
            keep=None,
            on_error="raise",
        )
        self.told: dict[int, list[Any]] = {}

    def go(self, until: int, stop: tuple[int, int] | None) -> None:
        """Train to a step; or stop with a checkpoint in the given step, after so many micro-steps of it."""
        kind = torch.bfloat16 if self.job.bf16 else torch.float32
        while self.ckpt.global_step < until:
            for rows, wanted, ids in self.loader:
                loss = (self.engine(rows.to(kind)).float() - wanted).square().mean()
                self.told.setdefault(self.ckpt.global_step + 1, []).append((loss.item().hex(), ids.tolist()))
                self.engine.backward(loss)
                self.engine.step()
                self.ckpt.step(loss=loss)
                if stop == (self.ckpt.global_step, self.ckpt.micro_step):
                    self.ckpt.save()
                    return
                if self.ckpt.global_step >= until:
                    break

    def end(self) -> dict[str, Any]:
        """What this start did and where it ended."""
        self.ckpt.close()
        told = {
            "told": self.told,
            "weights": weights_of(self.engine),
            "rates": [group["lr"] for group in self.engine.optimizer.param_groups],
            "random": torch.rand(()).item(),
            "counted": (
                self.engine.global_steps,
                self.engine.global_samples,
                self.engine.micro_steps,
                self.engine.skipped_steps,
            ),
            "seen": self.engine.module.seen.item(),
        }
        return told


def weights_of(engine: Any) -> dict[str, list[float]]:
    """Of the module, as a forward would see them."""
    import deepspeed

    parameters = list(engine.module.parameters())
    gathered = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    with deepspeed.zero.GatheredParameters(gathered, enabled=bool(gathered)):
        return {name: parameter.detach().flatten().tolist() for name, parameter in engine.module.named_parameters()}


@contextlib.contextmanager
def launched(rank: int, world_size: int, directory: str) -> Iterator[None]:
    """As by a launcher: with its variables, and a process group for one rank alone too. A ledger is kept."""
    variables: dict[str, object] = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_SIZE": world_size,
    }
    variables["UNBROKEN_LEDGER"] = f"{directory}/ledger"
    os.environ.update({name: str(value) for name, value in variables.items()})
    if world_size == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
        if world_size == 1:
            dist.destroy_process_group()


def train(
    rank: int,
    world_size: int,
    directory: str,
    job: Job,
    until: int,
    stop: tuple[int, int] | None = None,
    every: int | None = 1,
) -> dict[str, Any]:
    """One start of a job, to its end or to where it is stopped."""
    with launched(rank, world_size, directory):
        run = Run(rank, world_size, directory, job, every)
        run.ckpt.restore()
        run.go(until, stop)
        return run.end()


def masters_after(rank: int, world_size: int, directory: str, job: Job) -> dict[str, Any]:
    """Pieces of masters and moments by name, right after a restore; and the weights that a forward would see."""
    with launched(rank, world_size, directory):
        run = Run(rank, world_size, directory, job, None)
        assert run.ckpt.restore() is not None
        told = {"pieces": pieces_in(rank, run.ckpt), "weights": weights_of(run.engine)}
        run.ckpt.close()
        return told


def plainly(rank: int, world_size: int, directory: str, job: Job) -> dict[str, Any]:
    """The same in plain PyTorch, without an engine."""
    model = Net()
    state = {"model": model, "optimizer": optimizer_of(model, job)}
    with unbroken.Checkpointer(directory, state, keep=None) as ckpt:
        assert ckpt.restore(strict=False) is not None
        return {"pieces": pieces_in(rank, ckpt)}


def pieces_in(rank: int, ckpt: Any) -> dict[str, Any]:
    """Of all tensors of model and optimizer."""
    tensors = ckpt._state.capture(accumulating=False).tensors.items()
    return {name: pieces_of(rank, live) for name, live in tensors if name.startswith(("model/", "optimizer/state"))}


def pieces_of(rank: int, live: Any) -> list[tuple[Any, list[float]]]:
    """Boxes that this rank holds, with their elements."""
    if live.spread is None:
        return [(None, live.tensor.flatten().tolist())]
    flat, pieces, begin = live.tensor.reshape(-1), [], 0
    for box in live.spread.boxes_of(rank):
        pieces.append(((box.begin, box.end, live.spread.shape), flat[begin : begin + box.numel].tolist()))
        begin += box.numel
    return pieces
