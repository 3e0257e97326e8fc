"""A checkpointer of a DeepSpeed engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unbroken.checkpointer import Checkpointer
from unbroken.errors import UsageError
from unbroken.integrations.deepspeed.counters import Counters
from unbroken.integrations.deepspeed.masters import Masters, Module, masters_of, stepped
from unbroken.integrations.deepspeed.private import OF_AN_ENGINE, check
from unbroken.integrations.deepspeed.settings import refuse
from unbroken.integrations.deepspeed.window import Window
from unbroken.restored import Restored


def checkpointer(
    engine: Any, path: str | Path, state: Mapping[str, object] | None = None, **options: Any
) -> EngineCheckpointer:
    """A Checkpointer of an engine of any ZeRO stage, and of anything else.

        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        ckpt = checkpointer(engine, "runs/x", {"loader": loader}, every=unbroken.Every(steps=100))
        ckpt.restore()

    engine   from `deepspeed.initialize`
    path     the run directory, shared by all nodes
    state    names -> objects, as for `Checkpointer`: the loader, and what the engine does not know of
    options  the Checkpointer's: `every`, `keep`, `on_error`, …

    Saved as `model` and `optimizer` are the masters (the weights that the optimizer steps, float32) and its state, each
    under the names of the module's parameters, whatever the stage made of them: so any stage on any number of ranks
    may go on with it, and plain PyTorch too. As `scheduler`, `engine` and `window`: the engine's learning rates,
    counters and loss scale, and gradients of an accumulation window.

    Raises UsageError for what cannot be resumed exactly, naming the setting.
    """
    check(engine, OF_AN_ENGINE)
    refuse(engine)
    masters = masters_of(engine)
    window = Window(masters)
    parts: dict[str, object] = {"model": Module(masters), "optimizer": stepped(masters)}
    parts |= {"engine": Counters(engine), "window": window}
    if engine.lr_scheduler is not None:
        parts["scheduler"] = engine.lr_scheduler
    twice = sorted(parts.keys() & (state or {}).keys())
    if twice:
        raise UsageError(f"state={{{twice[0]!r}: …}}: the engine's own {twice[0]} is saved by that name")
    return EngineCheckpointer(masters, window, path, {**parts, **(state or {})}, **options)


class EngineCheckpointer(Checkpointer):
    """A Checkpointer that knows from the engine whether gradients are being accumulated."""

    def __init__(
        self, masters: Masters, window: Window, path: str | Path, state: Mapping[str, object], **options: Any
    ) -> None:
        """See `checkpointer`."""
        super().__init__(path, state, **options)
        self._masters = masters
        self._window = window
        self._counted = masters.engine.global_steps

    def restore(self, *args: Any, **kwargs: Any) -> Restored | None:
        """As `Checkpointer.restore`; the engine's parameters become copies of the restored masters."""
        restored = super().restore(*args, **kwargs)
        if restored is not None:
            self._masters.publish()
            self._window.go_on()
        self._counted = self._masters.engine.global_steps
        return restored

    def step(self, *, loss: Any = None, accumulating: bool | None = None, gradients: bool = False) -> None:
        """As `Checkpointer.step`; to be called after each `engine.step()`.

        accumulating  whether the engine took no step, if it is not given
        """
        taken = self._masters.engine.global_steps
        stepped_now, self._counted = taken > self._counted, taken
        super().step(
            loss=loss, accumulating=not stepped_now if accumulating is None else accumulating, gradients=gradients
        )
