"""Notice of preemption: SIGTERM and SIGUSR1 set a flag, and nothing else.

A signal may come in the middle of a backward pass, where nothing can be saved; `Checkpointer.step` looks at the flag
at the end of a step, and all ranks then agree on one step to save and leave at (meeting.py).
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

log = logging.getLogger(__name__)

NOTICES = (signal.SIGTERM, signal.SIGUSR1)


@dataclass(slots=True)
class Notice:
    """Whether this process was told to leave. `install` and `uninstall` on the main thread."""

    received: str = ""
    _pid: int = 0
    """Name of the signal; empty until one came."""
    # signal.signal prints its handler when it looks it up: a chain of handlers must not print each other.
    _before: dict[signal.Signals, Any] = field(default_factory=dict, repr=False)

    def install(self) -> None:
        """Take over the signals. Handlers that were there are put back by `uninstall`."""
        if threading.current_thread() is not threading.main_thread():
            log.warning("preemption notices are not handled: signals can only be taken over by the main thread")
            return
        self._pid = os.getpid()
        for number in NOTICES:
            before = self._before[number] = signal.signal(number, self._on_signal)
            if callable(before) and not isinstance(getattr(before, "__self__", None), Notice):
                log.warning(
                    "the script's own handler of %s is not called until close(): it means preemption", number.name
                )

    def uninstall(self) -> None:
        """Give the signals back, unless somebody else has taken them over since."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._before.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, before if before is not None else signal.SIG_DFL)
        self._before.clear()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A process forked from this one (a pool's worker) inherits the handler, and must end as it would have.
            before = self._before.get(signal.Signals(number))
            signal.signal(number, before if before is not None else signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        # Runs between any two bytecodes of the training loop: one assignment, no lock, no I/O.
        self.received = signal.Signals(number).name
