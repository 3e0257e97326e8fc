"""The callback: what a script sees, and what the loops ask of it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import RunningStage
from torch.utils.data import RandomSampler

from unbroken.checkpointer import Checkpointer
from unbroken.errors import UnbrokenError, UsageError
from unbroken.integrations.dealing import deal
from unbroken.integrations.lightning import loops
from unbroken.integrations.lightning.loader import EpochLoader, epoch_loader, unwrapped
from unbroken.integrations.lightning.metrics import Metrics
from unbroken.integrations.lightning.private import check
from unbroken.integrations.lightning.progress import Files, Progress, averages
from unbroken.integrations.lightning.settings import is_tuning, refuse, refuse_ckpt_path
from unbroken.integrations.workers import ending_with_each_pass
from unbroken.integrations.world import size_as_saved
from unbroken.state.rng import undisturbed


class UnbrokenCheckpoint(Callback):
    """Saves as `trainer.fit` trains, and lets it go on from the newest good checkpoint, bit for bit.

        trainer = Trainer(callbacks=[UnbrokenCheckpoint("runs/x", every=unbroken.Every(steps=100))])
        trainer.fit(model)

    path     the run directory, shared by all nodes; not Lightning's `default_root_dir`
    state    further objects to save, by name
    options  the Checkpointer's: `every`, `keep`, `on_error`, …

    A step of `every` is a batch after which an optimizer stepped: with several optimizers `trainer.global_step`, which
    counts each, goes ahead of it. Saved are model, optimizers, schedulers, scaler, the position in the data, random
    numbers, metrics, and what loops and callbacks count. The training loaders are replaced by ones with an exact
    position (`unbroken.resumable`). Do not give `fit` a `ckpt_path`. Lightning's own checkpoints go on beside.

    `fit` raises UsageError for a setting with which no exact resume is possible, naming it, and what Checkpointer does.
    """

    def __init__(self, path: str | Path, *, state: Mapping[str, object] | None = None, **options: Any) -> None:
        self._path = path
        self._state = dict(state or {})
        self._options = options
        self._trainer: Any = None
        self._loaders: list[EpochLoader] = []
        self._checkpointer: Checkpointer | None = None
        self._progress: Progress | None = None
        self._loss: Any = None
        self._counted = 0
        self._asked = False
        self._random = contextlib.ExitStack()
        self.resumed = False

    def save(self) -> None:
        """Save when the batch under way is over, in the middle of an accumulation window too. On all ranks alike."""
        self._asked = True

    # Lightning's hooks.

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Before there are optimizers and loaders."""
        if stage != "fit" or trainer.fast_dev_run or is_tuning(trainer):
            return
        check(trainer)
        if any(isinstance(other, UnbrokenCheckpoint) and other is not self for other in trainer.callbacks):
            raise UsageError("give the Trainer one UnbrokenCheckpoint: a run has one directory")
        refuse(trainer, pl_module)
        self._trainer = trainer
        self._loaders = []
        self._random = contextlib.ExitStack()
        self.resumed = self._asked = False
        trainer._data_connector._prepare_dataloader = self._prepare_dataloader
        loops.install(trainer, self)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Keep the loss for the ledger."""
        self._loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Give the Trainer back as it was."""
        self._uninstall()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The same: `teardown` is not called then."""
        self._uninstall()

    def _uninstall(self) -> None:
        if self._trainer is not None:
            loops.uninstall(self._trainer)
            vars(self._trainer._data_connector).pop("_prepare_dataloader", None)
            self._trainer = None

    # Loaders.

    def _prepare_dataloader(self, dataloader: Any, shuffle: bool, mode: Any) -> Any:
        """In place of Lightning's: what it deals to the ranks, with a position if it is trained from."""
        connector = self._trainer._data_connector
        original = type(connector)._prepare_dataloader
        if mode != RunningStage.TRAINING:
            return ending_with_each_pass(original(connector, dataloader, shuffle, mode))
        given = unwrapped(dataloader)
        if type(given.sampler) is RandomSampler and self._trainer.world_size == 1:
            # Lightning leaves it alone; dealt to one rank, its order holds for several too.
            seed = int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed()))
            given = (
                deal(given, 0, 1, seed) if connector.trainer._accelerator_connector.use_distributed_sampler else given
            )
        loader = epoch_loader(dataloader, original(connector, given, shuffle, mode))
        self._loaders.append(loader)
        for name in ("loader", "loader0") if len(self._loaders) == 1 else (f"loader{len(self._loaders) - 1}",):
            size_as_saved(loader, self._path, self._trainer.world_size, name)
        return loader

    # What the loops ask.

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Restore; end the saves in the end."""
        trainer = self._trainer
        refuse_ckpt_path(trainer)
        trainer._signal_connector.teardown()  # a notice of preemption is ours: Lightning's would leave without a save
        progress, metrics, files = Progress(trainer), Metrics(trainer), Files(trainer)
        self._progress = progress
        state = {**self._parts(), "trainer": progress, "metrics": metrics, "files": files}
        twice = sorted(state.keys() & self._state.keys())
        if twice:
            raise UsageError(f"state={{{twice[0]!r}: …}}: the Trainer's own {twice[0]} is saved by that name")
        options = dict(self._options)
        if averages(trainer):
            options.setdefault("snapshot", "block")  # validation swaps the weights with their averages
        with self._random, Checkpointer(self._path, {**state, **self._state}, **options) as self._checkpointer:
            restored = self._checkpointer.restore()
            if restored is not None:
                # Hooks of the start come between this and the next batch, and may draw.
                self._random.enter_context(undisturbed({}))
                progress.apply()
                metrics.apply()
                files.apply()
                self.resumed = True
                if trainer.is_global_zero:
                    print(restored, flush=True)  # noqa: T201  # what the loop of a script would do
            self._counted = trainer.fit_loop.epoch_loop.global_step
            yield
        self._checkpointer = None

    def going_on(self) -> None:
        """The restored epoch goes on."""
        self.resumed = False
        assert self._progress is not None
        self._progress.go_on()
        self._random.close()

    def batch_over(self) -> None:
        """Count the batch, and save if that is due."""
        assert self._checkpointer is not None
        trainer = self._trainer
        stepped = trainer.fit_loop.epoch_loop.global_step > self._counted
        self._counted = trainer.fit_loop.epoch_loop.global_step
        # One optimizer may be adding up gradients while another steps; which one does, only the script knows.
        by_hand = not trainer.lightning_module.automatic_optimization
        self._checkpointer.step(loss=self._loss, accumulating=not stepped, gradients=by_hand)
        is_over = stepped and loops.is_over(trainer)
        if self._asked or is_over:
            self._checkpointer.save()
        self._asked = False
        if is_over:
            # What comes now may write weights, as an average of them. A save that failed was told already.
            with (
                contextlib.nullcontext()
                if self._options.get("on_error") == "raise"
                else contextlib.suppress(UnbrokenError)
            ):
                self._checkpointer.wait()

    def epoch_over(self) -> None:
        """The next pass over the data is the next epoch's."""
        for loader in self._loaders:
            loader.end_epoch()

    def _parts(self) -> dict[str, object]:
        trainer = self._trainer
        parts: dict[str, object] = {"model": trainer.strategy.model, **averages(trainer)}
        parts |= _numbered("optimizer", trainer.optimizers)
        parts |= _numbered("scheduler", [config.scheduler for config in trainer.lr_scheduler_configs])
        parts |= _numbered("loader", self._loaders)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        return {**parts, "scaler": scaler} if scaler is not None else parts


def _numbered(name: str, objects: Sequence[object]) -> dict[str, object]:
    """Objects by name; one alone without a number."""
    return {name if len(objects) == 1 else f"{name}{at}": value for at, value in enumerate(objects)}
