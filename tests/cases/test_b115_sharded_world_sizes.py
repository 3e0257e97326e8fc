"""B115: an FSDP checkpoint did not load on more GPUs: the plan asked for keys of ranks that had not been there. B117:
the optimizer's shards failed to reshard, or came out unequal, where the new number of ranks did not divide a size.

Right: any number of ranks restores it, every gathered value is equal; what was each rank's own comes back to that rank,
and a rank that is new takes rank 0's and says so, by name.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import unbroken
from sharded.models import Job

MODULE = "cases.test_b115_sharded_world_sizes"
SIZES = (7, 5, 3, 1)
"""Of parameters, none of them divisible by 2, 3 or 4; of the last only one rank has anything."""


class Counter:
    """What a rank knows alone: the rows it has read, say."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def state_dict(self) -> dict[str, int]:
        return {"rows": self.rows}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.rows = state["rows"]


class Uneven(nn.Module):
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, rows) for rows in SIZES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([layer(x) for layer in self.layers], dim=1)


def make_job(world_size: int, seed: int) -> Job:
    model: nn.Module = Uneven(seed)
    if world_size > 1:
        fully_shard(model.layers[0])
        model = fully_shard(model)
    return Job(model, torch.optim.Adam(model.parameters(), lr=0.1, amsgrad=True))


@dataclass(frozen=True)
class Part:
    """What one rank of one start tells."""

    restored: object
    """Step, every gathered value, and the counter."""
    draw: float
    """The generator's next number after the restore."""
    told: str
    """Warnings."""
    saved: object
    next_draw: float
    """The number that the generator would have drawn after the save."""


def part(rank, world_size, directory, until, rows_of_each_rank):
    """Restore, train up to a step, save."""
    job = make_job(world_size, seed=10 + until)
    counter = Counter(100 * (rank + 1) if rows_of_each_rank else 100)
    generator = torch.Generator().manual_seed(rank)
    state = {**job.state, "counter": counter, "generator": generator}
    with unbroken.Checkpointer(directory, state, on_error="raise") as ckpt, heard("unbroken.checkpointer") as told:
        restored = ckpt.restore()
        found = None if restored is None else (restored.step, job.content(), counter.rows)
        draw = torch.rand(1, generator=generator).item()
        while ckpt.global_step < until:
            job.step(ckpt.global_step)
            counter.rows += 1
            ckpt.step()
        ckpt.save()
    next_draw = torch.rand(1, generator=generator).item()
    return Part(found, draw, "; ".join(told), (ckpt.global_step, job.content(), counter.rows), next_draw)


@contextlib.contextmanager
def heard(logger):
    """The messages of a logger, as they come."""
    told = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger(logger).addHandler(handler)
    try:
        yield told
    finally:
        logging.getLogger(logger).removeHandler(handler)


def test_values_of_uneven_shards_are_equal_after_each_change_of_the_number_of_ranks(ranks, tmp_path):
    before = []
    for world_size, until in [(2, 1), (4, 2), (1, 3), (3, 4)]:
        parts = ranks.run_all_well(f"{MODULE}:part", world_size, str(tmp_path), until, False)
        for rank, part in enumerate(parts):
            assert not before or part.restored == before[0].saved, "every gathered value, also on ranks that are new"
            borrows = "nothing of this rank's own; it takes rank 0's 1 (generator)" in part.told
            assert borrows == (0 < len(before) <= rank), part.told
            if rank < len(before):
                assert part.draw == before[rank].next_draw, "each rank's own generator goes on"
        assert len(parts[0].saved[1]) == 5 * 2 * len(SIZES), "weights, and four tensors of state for each"
        before = parts


def test_what_each_rank_had_of_its_own_comes_back_to_it_and_a_rank_that_is_new_is_told_what_it_gets(ranks, tmp_path):
    ranks.run_all_well(f"{MODULE}:part", 2, str(tmp_path), 1, True)
    parts = ranks.run_all_well(f"{MODULE}:part", 4, str(tmp_path), 2, True)
    assert [part.restored[2] for part in parts] == [101, 201, 101, 101]
    assert ["rank 0's 2 (counter, generator)" in part.told for part in parts] == [False, False, True, True]
