"""Where in an epoch a job is, counted so that any number of ranks can go on from there.

The cursor is global: samples that all ranks together have consumed of the epoch's one order. A rank that starts at
cursor `c` as rank `r` of `w` reads positions c + r, c + r + w, c + r + 2w, …. While the world size stays, that is what
torch's DistributedSampler deals out; when it changes, the rest of the same order is dealt anew, each sample once.
Pure arithmetic: no samplers, no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from unbroken.errors import StateMismatch


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank still has to read of an epoch."""

    begin: int
    """The global cursor it starts from."""
    rank: int
    world: int
    count: int
    """Samples this rank reads; the same on every rank. Positions past the order's end repeat it from its start."""

    def positions(self, first: int, last: int) -> range:
        """Global positions of this rank's samples `first` to `last` (half open, counted from `begin`)."""
        offset = self.begin + self.rank
        return range(offset + first * self.world, offset + last * self.world, self.world)

    def cursor_after(self, samples: int) -> int:
        """The global cursor once every rank has read `samples` of its share."""
        return self.begin + samples * self.world


def share_of(length: int, cursor: int, rank: int, world: int, *, drop_last: bool) -> Share:
    """What `rank` reads of an order of `length` samples from `cursor` on.

    drop_last  leave out the samples that do not fill a round of all ranks, instead of repeating the first of the order
    """
    left = max(length - cursor, 0)
    return Share(cursor, rank, world, left // world if drop_last else -(-left // world))


def batch_spans(count: int, batch_size: int, *, drop_last: bool) -> Iterator[tuple[int, int]]:
    """Half-open spans of `batch_size` samples over `count`; the last may be shorter, or is left out."""
    for first in range(0, count - batch_size + 1 if drop_last else count, batch_size):
        yield first, min(first + batch_size, count)


def count_batches(count: int, batch_size: int, *, drop_last: bool) -> int:
    """How many spans `batch_spans` gives."""
    return count // batch_size if drop_last else -(-count // batch_size)


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """The batch sizes that a checkpoint was saved with, in samples."""

    configured: int
    """What the script asked for, per rank."""
    world: int
    total: int
    """The global batch: what all ranks together read in one step."""


WhenRanksChange: TypeAlias = Literal["batch", "accumulate", "refuse"]
"""How another number of ranks keeps the global batch: by larger or smaller batches, by another number of batches in an
optimizer step, or not at all."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """How the global batch is kept."""

    size: int
    """Samples per batch and rank."""
    micro_batches: int = 1
    """Batches that together are one global batch."""
    warning: str = ""
    """What to tell the user; empty if nothing."""


def fit_batch_size(saved: BatchSizes, configured: int, world: int, choice: WhenRanksChange = "batch") -> Fitted:
    """The batches to go on with. The global batch stays what it was.

    Only a batch size that the user changed, to something that does not give the saved global batch, takes precedence.

    Raises StateMismatch if the saved global batch cannot be kept in the chosen way.
    """
    if configured * world == saved.total:
        return Fitted(configured)
    if configured != saved.configured:
        return Fitted(
            configured,
            1,
            f"the global batch changes from {saved.total} to {configured * world} samples: batch_size is now "
            f"{configured} on {world} ranks (it was {saved.configured} on {saved.world}); losses "
            "will not match the earlier run's",
        )
    if choice == "refuse":
        raise StateMismatch(
            f"the checkpoint was saved by {saved.world} ranks and this job has {world}, which when_ranks_change="
            '"refuse" forbids; start as many ranks, or choose "batch" or "accumulate"'
        )
    return _accumulate(saved, configured, world) if choice == "accumulate" else _resize(saved, configured, world)


def _accumulate(saved: BatchSizes, configured: int, world: int) -> Fitted:
    together = configured * world
    if saved.total % together:
        fitting = [
            ranks for ranks in range(1, saved.total // configured + 1) if saved.total % (ranks * configured) == 0
        ]
        raise StateMismatch(
            f"the checkpoint's global batch of {saved.total} samples is no multiple of the {together} that {world} "
            f"ranks read at once; start on one of {', '.join(map(str, fitting))} ranks"
        )
    count = saved.total // together
    return Fitted(
        configured,
        count,
        f"{count} batches of {together} samples make up the global batch of {saved.total} that the checkpoint was "
        "saved with: accumulate loader.micro_batches of them in an optimizer step",
    )


def _resize(saved: BatchSizes, configured: int, world: int) -> Fitted:
    if saved.total % world:
        fitting = ", ".join(str(size) for size in range(1, saved.total + 1) if saved.total % size == 0)
        raise StateMismatch(
            f"the checkpoint's global batch of {saved.total} samples cannot be divided among {world} ranks; start on "
            f"one of {fitting} ranks, or set another batch_size than {configured} to choose a new global batch"
        )
    each = saved.total // world
    return Fitted(
        each,
        1,
        f"batch_size is {each} instead of {configured} on each of {world} ranks, which keeps the global batch of "
        f"{saved.total} samples that the checkpoint was saved with",
    )
