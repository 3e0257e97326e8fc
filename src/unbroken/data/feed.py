"""What the public loader asks of the part that fetches: batches from a position on, and what the state says of it.

`mapstyle.py` and `iterable.py` are the two kinds. The loader owns the epoch, the position and the seed; a feed owns the
inner DataLoader and what only its kind of data set needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol


class Delivered:
    """A batch on its way to the loop. The batch can be taken once, so that no frame keeps it alive beside the loop."""

    __slots__ = ("_batch", "ids", "position")

    def __init__(self, batch: Any, position: int, ids: list[Any]) -> None:
        self._batch = [batch]
        self.position = position
        """The position once the loop has this batch."""
        self.ids = ids
        """Indices of its samples, for the ledger."""

    def take(self) -> Any:
        return self._batch.pop()


class Feed(Protocol):
    """Batches of one loader. One iteration at a time, on the training thread."""

    def describe(self) -> dict[str, Any]:
        """What must be known to go on elsewhere, beside seed, epoch and position. Plain values only."""

    def adopt(self, state: Mapping[str, Any]) -> list[str]:
        """Take what `describe` gave in an earlier process; gives warnings, for one rank of the job to say.

        Raises StateMismatch, having changed nothing, if the live loader cannot go on from there.
        """

    def start(self, seed: int, epoch: int, position: int) -> Iterator[Delivered]:
        """The batches of `epoch` from `position` on. Starts workers, if any; never moves a global random stream."""

    def finished(self, epoch: int) -> None:
        """The loop saw the end of `epoch`."""

    def abandoned(self, epoch: int, *, moved_on: bool) -> None:
        """The loop left `epoch` before its end; `moved_on` if the next iteration is of the next epoch."""

    def rank(self) -> int:
        """Which of the ranks that share an epoch this is; 0 speaks for all."""

    def batches(self) -> int:
        """Batches in a whole epoch, on this rank."""

    def micro_batches(self) -> int:
        """How many batches make up one of the run as it began; 1 unless ranks changed and the script accumulates."""

    def batch_size(self) -> int | None:
        """Samples per batch on this rank, as it is now; None where batches are not the loader's."""
