"""Every error that `unbroken` raises, with its exit code.

One family, `UnbrokenError`. Each error also derives from the builtin a caller would catch, and its text says in one or
two lines what happened, where (rank, step, file, tensor), and what to do. Exit codes: 1 a fault was found, 2 wrong use.
"""

from __future__ import annotations


class UnbrokenError(Exception):
    """The family. Catch this to catch whatever `unbroken` itself raises."""

    exit_code = 1


class UsageError(UnbrokenError, ValueError):
    """The caller asked for something that cannot be: a wrong argument, or a call at the wrong time."""

    exit_code = 2


class UnsupportedValue(UnbrokenError, TypeError):
    """A value in the state has a type that cannot be stored without pickle; the text names it by its path."""

    exit_code = 2


class StateMismatch(UnbrokenError, ValueError):
    """The checkpoint does not fit the live objects: names, shapes or dtypes differ. Nothing was changed."""

    exit_code = 2


class HistoryExists(UsageError):
    """The directory holds checkpoints and the job never called `restore()`: saving would start a second history."""


class NotCovered(UsageError):
    """With `strict=True`: something looks like training state and is not registered, so no checkpoint would have it."""

    def __init__(self, text: str, names: tuple[str, ...] = ()) -> None:
        super().__init__(text)
        self.names = names
        """What it is, each as in the text; there they may be cut short."""


class DirectoryProblem(UnbrokenError, OSError):
    """The run directory cannot be used: not writable, not a directory, or not the same one on every rank."""

    exit_code = 2


class NewerFormat(UnbrokenError, ValueError):
    """The run directory was written by a newer version of `unbroken` than this one."""

    exit_code = 2


class DamagedCheckpoint(UnbrokenError, ValueError):
    """A checkpoint's file is missing, cut, or does not match its digest."""


class NoUsableCheckpoint(UnbrokenError, FileNotFoundError):
    """Checkpoints exist, but none of them can be used; the text lists each with its reason."""


class SaveFailed(UnbrokenError, OSError):
    """A save did not commit. Every older checkpoint is intact; the next save tries again."""


class ReplicasDiffer(UnbrokenError, ValueError):
    """Values that must be equal on all ranks are not; the text names them and the ranks."""


class TakenOver(UnbrokenError, RuntimeError):
    """A newer start of the job owns the run directory; this one may not save any more."""


class DeadlineExceeded(UnbrokenError, TimeoutError):
    """A wait ended at its deadline; the text names the rank, the phase and what was waited for."""


class PeerFailed(UnbrokenError, ConnectionError):
    """Another rank reported an error or went away while this one was working with it."""


class Preempted(SystemExit):
    """Raised by `Checkpointer.step` on every rank once a preempted job has saved and its checkpoint is durable.

    A `SystemExit`, so that a script ends without a traceback and `finally` blocks run. Its code is 75 (EX_TEMPFAIL of
    sysexits.h): the job is not done, and a scheduler that requeues failed jobs starts it again.
    """

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(75)
        self.step = step
        self.reason = reason

    def __str__(self) -> str:
        return f"preempted ({self.reason}) at step {self.step}, which is saved; start the job again to go on"
