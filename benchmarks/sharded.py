"""Saves and loads of a model that FSDP2 shards over ranks: this library beside torch.distributed.checkpoint (DCP).

    python benchmarks/sharded.py                  # 4 ranks save; 4, and 2, load
    python benchmarks/sharded.py --mb 200 --ranks 2

The slowest rank counts. Each peer saves in processes of its own, and others load what it saved.

call     seconds until training may go on, after the first save
durable  seconds until the save is durable (files synced)
load     seconds to load into as many ranks, and into half of them, with the files in the page cache
same     whether all gathered values are those that were saved, bit for bit
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import peers
import torch
import torch.distributed as dist
import xxhash
from saving import build
from torch import nn
from torch.distributed.fsdp import fully_shard

SAVES = 5


class Dcp(peers.Dcp):
    """torch.distributed.checkpoint.save, and fsync, by several ranks."""

    asynchronous = False

    def __init__(self, directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(directory, model, optimizer)
        self._group = dist.new_group()  # or a save in a thread and a collective of the loop meet in another order
        self._future: Any = None

    def save(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        self.newest = self.directory / str(step)
        if self.asynchronous:
            self._future = dcp.async_save(self._named(), checkpoint_id=self.newest, process_group=self._group)
        else:
            dcp.save(self._named(), checkpoint_id=self.newest)
            self._sync()

    def finish(self) -> None:
        if self._future is not None:
            self._future.result()
            self._sync()
            self._future = None

    def load(self) -> None:
        self.newest = max(self.directory.iterdir(), key=lambda path: int(path.name))
        super().load()

    def _sync(self) -> None:
        if dist.get_rank() == 0:
            peers.sync(self.newest)
        dist.barrier()


class DcpThread(Dcp):
    """DCP's async_save in a thread."""

    asynchronous = True


PEERS: dict[str, Callable[..., Any]] = {"dcp": Dcp, "dcp async thread": DcpThread, "unbroken": peers.Unbroken}


def start(arguments: argparse.Namespace) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The sharded model after a step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    model = build(arguments.mb, small=False)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One optimizer step."""
    optimizer.zero_grad()
    model(torch.ones(4, 1024)).square().mean().backward()
    optimizer.step()


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of all values, gathered."""
    found = xxhash.xxh3_128()
    for tensor in (*model.parameters(), *(item for state in optimizer.state.values() for item in state.values())):
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        found.update(whole.detach().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def slowest(seconds: float) -> float:
    """The longest time of all ranks."""
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def work(arguments: argparse.Namespace) -> None:
    """One rank of a phase."""
    model, optimizer = start(arguments)
    peer = PEERS[arguments.peer](Path(arguments.dir), model, optimizer)
    found: dict[str, Any] = {}
    if arguments.phase == "save":
        calls, durable = [], []
        for number in range(SAVES + 2):
            step(model, optimizer)
            dist.barrier()
            began = time.perf_counter()
            peer.save(number + 1)
            calls.append(slowest(time.perf_counter() - began))
            peer.finish()
            durable.append(slowest(time.perf_counter() - began))
        found = {"call": statistics.median(calls[2:]), "durable": statistics.median(durable[2:])}
    else:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        dist.barrier()
        began = time.perf_counter()
        peer.load()
        found = {"load": slowest(time.perf_counter() - began)}
    found["digest"] = digest(model, optimizer)
    peer.close()
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def phase(arguments: argparse.Namespace, peer: str, directory: str, name: str, ranks: int) -> dict[str, Any]:
    """Run one phase in processes of its own; what rank 0 printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, "--phase", name, "--peer", peer, "--dir", directory, "--mb", str(arguments.mb)]
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    environment |= {"OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            command, env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate(timeout=600)[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"{peer}: {name} failed")
    return json.loads(outputs[0].splitlines()[-1])


def main() -> None:
    """Run all peers, or be one rank of one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=PEERS)
    parser.add_argument("--mb", type=int, default=604, help="megabytes of weights and moments of the whole model")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--dir", default=".", help="where to write; the disk that is measured")
    parser.add_argument("--phase", choices=("save", "load"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.phase:
        work(arguments)
        return
    print(f"{'':18} {'call s':>8} {'durable s':>9} {'load s':>8} {'half s':>8}  same")
    for peer in [arguments.peer] if arguments.peer else PEERS:
        directory = tempfile.mkdtemp(dir=arguments.dir)
        try:
            saved = phase(arguments, peer, directory, "save", arguments.ranks)
            loads = [phase(arguments, peer, directory, "load", n) for n in (arguments.ranks, arguments.ranks // 2)]
        finally:
            shutil.rmtree(directory)
        same = all(load["digest"] == saved["digest"] for load in loads)
        cells = f"{saved['call']:8.3f} {saved['durable']:9.3f} {loads[0]['load']:8.3f} {loads[1]['load']:8.3f}"
        print(f"{peer:18} {cells}  {same}", flush=True)


if __name__ == "__main__":
    main()
