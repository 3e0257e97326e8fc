"""Ways to save one process's training state, as their users use them, all made durable: files are synced.

Each has `save(step)`, which returns when training may go on; `finish()`, when the save is durable; and `load()`, which
brings the newest save back into the live objects. A peer that is not installed is left out.
"""

from __future__ import annotations

import importlib.util
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer


def sync(path: Path) -> None:
    """Make a file, or all files of a directory, durable."""
    for file in [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]:
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


class Peer:
    """What the others have in common."""

    needs: ClassVar[str] = ""
    """A package that must be installed."""

    def __init__(self, directory: Path, model: nn.Module, optimizer: Optimizer) -> None:
        self.directory, self.model, self.optimizer = directory, model, optimizer
        self.newest = directory

    @classmethod
    def is_there(cls) -> bool:
        """True if it can run here."""
        return not cls.needs or importlib.util.find_spec(cls.needs) is not None

    def prepare(self) -> None:
        """What comes before a save and is not counted."""

    def save(self, step: int) -> None:
        """Return when training may go on."""
        raise NotImplementedError

    def finish(self) -> None:
        """Return when the newest save is durable."""

    def load(self) -> None:
        """Bring the newest save back."""
        raise NotImplementedError

    def close(self) -> None:
        """End what it started."""

    def written(self) -> int:
        """Bytes of the newest save."""
        files = [self.newest] if self.newest.is_file() else [each for each in self.newest.rglob("*") if each.is_file()]
        return sum(file.stat().st_size for file in files)

    def lock(self) -> AbstractContextManager[Any]:
        """Held during the optimizer's step, if the peer asks for it."""
        return nullcontext()

    def state(self) -> dict[str, Any]:
        """What is saved, as the framework's own state dicts."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def put(self, state: dict[str, Any]) -> None:
        """Give state dicts back."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


class Nothing(Peer):
    """No save at all."""

    def save(self, step: int) -> None:
        pass

    def load(self) -> None:
        pass


class Raw(Peer):
    """The limit: the same bytes from warm memory to the disk and back by plain system calls. No copy, no digest."""

    THREADS = 2
    RUN_BYTES = 8 << 20

    def __init__(self, directory: Path, model: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(directory, model, optimizer)
        self._memory: mmap.mmap | None = None

    def prepare(self) -> None:
        """Copy all into page-aligned memory."""
        views = self._views()
        if self._memory is None:
            length = -(-sum(map(len, views)) // 4096) * 4096
            self._memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._memory.seek(0)
        for view in views:
            self._memory.write(view)

    def save(self, step: int) -> None:
        """Write what `prepare` copied, which is not counted: it is the disk that is measured."""
        if self._memory is None:
            self.prepare()
        assert self._memory is not None
        self.newest = self.directory / f"{step}.raw"
        fd = os.open(self.newest, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        view = memoryview(self._memory)
        while view:
            view = view[os.write(fd, view[: 64 << 20]) :]
        os.fsync(fd)
        os.close(fd)

    def load(self) -> None:
        fd = os.open(self.newest, os.O_RDONLY)
        with ThreadPoolExecutor(self.THREADS) as pool:
            for _ in pool.map(lambda run: os.preadv(fd, run[1], run[0]), self._runs()):
                pass
        os.close(fd)

    def _runs(self) -> Iterator[tuple[int, list[memoryview]]]:
        """Where in the file each run begins, and the memory it goes to."""
        begin = length = 0
        views: list[memoryview] = []
        for whole in self._views():
            for at in range(0, len(whole), self.RUN_BYTES):
                view = whole[at : at + self.RUN_BYTES]
                if views and (length + len(view) > self.RUN_BYTES or len(views) == 1024):
                    yield begin, views
                    begin, length, views = begin + length, 0, []
                views.append(view)
                length += len(view)
        yield begin, views

    def _views(self) -> list[memoryview]:
        state = [value for parameter in self.model.parameters() for value in self.optimizer.state[parameter].values()]
        tensors = [tensor.detach() for tensor in (*self.model.parameters(), *state)]
        return [memoryview(tensor.reshape(-1).view(torch.uint8).numpy()) for tensor in tensors]


class TorchSave(Peer):
    """torch.save and fsync."""

    def save(self, step: int) -> None:
        self.newest = self.directory / f"{step}.pt"
        torch.save(self.state(), self.newest)
        sync(self.newest)

    def load(self) -> None:
        self.put(torch.load(self.newest, weights_only=True))


class Dcp(Peer):
    """torch.distributed.checkpoint.save."""

    def save(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        self.newest = self.directory / str(step)
        dcp.save(self._named(), checkpoint_id=self.newest)

    def load(self) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self._named()
        dcp.load(state, checkpoint_id=self.newest)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def _named(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}


class DcpThread(Dcp):
    """DCP's async_save in a thread."""

    kind = "thread"
    _future: Future[Any] | None = None

    def save(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        self.finish()
        self.newest = self.directory / str(step)
        kind = AsyncCheckpointerType.THREAD if self.kind == "thread" else AsyncCheckpointerType.PROCESS
        self._future = dcp.async_save(self._named(), checkpoint_id=self.newest, async_checkpointer_type=kind)

    def finish(self) -> None:
        if self._future is not None:
            self._future.result()
            self._future = None


class DcpProcess(DcpThread):
    """DCP's async_save in a process, which wants a process group."""

    kind = "process"

    def __init__(self, directory: Path, model: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(directory, model, optimizer)
        import torch.distributed as dist

        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
        os.environ.update(MASTER_PORT=str(store.port), RANK="0", WORLD_SIZE="1")
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)

    def close(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()


class SyncedBeside(Peer):
    """One that writes beside the loop and does not sync: a thread does, as soon as all is written."""

    _durable: Future[None] | None = None

    def __init__(self, directory: Path, model: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(directory, model, optimizer)
        self._pool = ThreadPoolExecutor(1)

    def sync_after(self, wait: Callable[[], Any]) -> None:
        """Sync what lies in `newest` when `wait` returns."""

        def run() -> None:
            wait()
            sync(self.newest)

        self._durable = self._pool.submit(run)

    def finish(self) -> None:
        if self._durable is not None:
            self._durable.result()
            self._durable = None

    def close(self) -> None:
        self._pool.shutdown()


class Snapshot(SyncedBeside):
    """torchsnapshot's async_take."""

    needs = "torchsnapshot"

    def save(self, step: int) -> None:
        import torchsnapshot

        self.finish()
        self.newest = self.directory / str(step)
        self.sync_after(torchsnapshot.Snapshot.async_take(str(self.newest), self._app_state()).wait)

    def load(self) -> None:
        import torchsnapshot

        torchsnapshot.Snapshot(str(self.newest)).restore(self._app_state())

    def _app_state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}


class TorchCheckpointing(SyncedBeside):
    """torch_checkpointing's manager: copied by a thread, written by a process."""

    needs = "torch_checkpointing"

    def __init__(self, directory: Path, model: nn.Module, optimizer: Optimizer) -> None:
        import torch_checkpointing

        super().__init__(directory, model, optimizer)
        # Its default writes past the page cache from memory that is on no page, which systems refuse (EINVAL).
        storage = torch_checkpointing.storage.filesystem.LocalFileSystemStorageConfig(use_direct_io=False)
        config = torch_checkpointing.CheckpointManager.Config(storage_config=storage)
        self._manager = torch_checkpointing.CheckpointManager(config)

    def save(self, step: int) -> None:
        self.finish()
        self.newest = self.directory / str(step)
        self.sync_after(self._manager.save(str(self.newest), self.state()).result)

    def lock(self) -> AbstractContextManager[Any]:
        return self._manager.lock()

    def load(self) -> None:
        state = self.state()
        self._manager.load(str(self.newest), into=state)
        self.put(state)

    def close(self) -> None:
        super().close()
        self._manager.close()


class Safetensors(Peer):
    """safetensors' save_file of weights and moments, and fsync."""

    needs = "safetensors"

    def save(self, step: int) -> None:
        from safetensors.torch import save_file

        self.newest = self.directory / f"{step}.safetensors"
        save_file(self._flat(), self.newest)
        sync(self.newest)

    def load(self) -> None:
        from safetensors import safe_open

        live = self._flat()
        with safe_open(self.newest, "pt") as file, torch.no_grad():
            for name in file.keys():  # noqa: SIM118  # no mapping
                live[name].copy_(file.get_tensor(name))

    def _flat(self) -> dict[str, torch.Tensor]:
        flat = {f"model.{name}": tensor.detach() for name, tensor in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            flat |= {f"optimizer.{name}.{key}": value for key, value in self.optimizer.state[parameter].items()}
        return flat


class Accelerate(Peer):
    """Accelerate's save_state, which does not sync by itself."""

    needs = "accelerate"

    def __init__(self, directory: Path, model: nn.Module, optimizer: Optimizer) -> None:
        from accelerate import Accelerator

        super().__init__(directory, model, optimizer)
        self._accelerator = Accelerator(cpu=True)
        self._accelerator.prepare(model, optimizer)

    def save(self, step: int) -> None:
        self.newest = self.directory / str(step)
        self._accelerator.save_state(str(self.newest))
        sync(self.newest)

    def load(self) -> None:
        self._accelerator.load_state(str(self.newest))


class Lightning(Peer):
    """What Lightning's Trainer and Fabric save with (TorchCheckpointIO), which does not sync by itself."""

    needs = "lightning"

    def save(self, step: int) -> None:
        from lightning.fabric.plugins import TorchCheckpointIO

        self.newest = self.directory / f"{step}.ckpt"
        TorchCheckpointIO().save_checkpoint(self.state(), self.newest)
        sync(self.newest)

    def load(self) -> None:
        from lightning.fabric.plugins import TorchCheckpointIO

        self.put(TorchCheckpointIO().load_checkpoint(self.newest, weights_only=True))


class Unbroken(Peer):
    """This library, with digests and fsync, as it comes."""

    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, directory: Path, model: nn.Module, optimizer: Optimizer) -> None:
        import unbroken

        super().__init__(directory, model, optimizer)
        state = {"model": model, "optimizer": optimizer}
        self._checkpointer = unbroken.Checkpointer(directory, state, on_error="raise", **self.options)

    def save(self, step: int) -> None:
        self._checkpointer.step()
        self._checkpointer.save()

    def finish(self) -> None:
        self._checkpointer.wait()
        self.newest = self.directory / f"step-{self._checkpointer.global_step}"

    def close(self) -> None:
        self._checkpointer.close()

    def load(self) -> None:
        import unbroken

        with unbroken.Checkpointer(self.directory, {"model": self.model, "optimizer": self.optimizer}) as again:
            again.restore()


class UnbrokenBlock(Unbroken):
    """The same with snapshot="block"."""

    options: ClassVar[dict[str, Any]] = {"snapshot": "block"}


PEERS: dict[str, type[Peer]] = {
    "nothing": Nothing,
    "raw": Raw,
    "torch.save": TorchSave,
    "dcp": Dcp,
    "dcp async thread": DcpThread,
    "dcp async process": DcpProcess,
    "torchsnapshot": Snapshot,
    "torch_checkpointing": TorchCheckpointing,
    "safetensors": Safetensors,
    "accelerate": Accelerate,
    "lightning": Lightning,
    "unbroken": Unbroken,
    "unbroken block": UnbrokenBlock,
}
