"""Training jobs that lose processes or nodes and go on as if nothing had happened, bit for bit.

`Checkpointer` saves and restores the whole state of a run; `resumable` makes a DataLoader resume exactly.
"""

from unbroken.checkpointer import Checkpointer
from unbroken.data.loader import ResumableLoader, resumable
from unbroken.errors import (
    DamagedCheckpoint,
    DeadlineExceeded,
    DirectoryProblem,
    HistoryExists,
    NewerFormat,
    NotCovered,
    NoUsableCheckpoint,
    PeerFailed,
    Preempted,
    SaveFailed,
    StateMismatch,
    TakenOver,
    UnbrokenError,
    UnsupportedValue,
    UsageError,
)
from unbroken.policy import Every, Keep
from unbroken.restored import Restored

__all__ = [
    "Checkpointer",
    "DamagedCheckpoint",
    "DeadlineExceeded",
    "DirectoryProblem",
    "Every",
    "HistoryExists",
    "Keep",
    "NewerFormat",
    "NoUsableCheckpoint",
    "NotCovered",
    "PeerFailed",
    "Preempted",
    "Restored",
    "ResumableLoader",
    "SaveFailed",
    "StateMismatch",
    "TakenOver",
    "UnbrokenError",
    "UnsupportedValue",
    "UsageError",
    "resumable",
]
