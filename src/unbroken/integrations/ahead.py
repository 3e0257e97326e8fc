"""The position of a loader whose batches are asked for one ahead of the loop, as the loop sees it.

What the loop has had is what there was before the newest batch was asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from unbroken.data.loader import ResumableLoader

_BATCHES_REMEMBERED = 1024
"""Batches whose sample ids wait for `drain_samples`; older ones are forgotten."""


class Ahead:
    """A resumable loader that somebody else reads ahead of the loop, by one batch."""

    def __init__(self, loader: ResumableLoader) -> None:
        self.loader = loader
        self._had: Mapping[str, Any] | None = None
        self._samples: deque[list[Any]] = deque(maxlen=_BATCHES_REMEMBERED)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        self.loader.drain_samples()
        while True:
            self._had = self.loader.state_dict()
            self._samples.append(self.loader.drain_samples())
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch

    def pass_is_over(self) -> None:
        """The loop has ended, too: the next epoch comes next."""
        self._had = None

    def state_dict(self) -> dict[str, Any]:
        """Of what the loop has had."""
        return self.loader.state_dict() if self._had is None else dict(self._had)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there at the next iter()."""
        self.loader.load_state_dict(state)
        self._had = None
        self._samples.clear()

    def drain_samples(self) -> list[Any]:
        """For the ledger: samples that the loop had since the last call."""
        samples = [sample for batch in self._samples for sample in batch]
        self._samples.clear()
        return samples
