"""B114: the world size was in the file names, and a job of another size found nothing. B115: new ranks had no state.
B021 at the level of a whole job: samples were lost and the global batch changed when ranks left. B045: the schedule
depended on the number of processes.

Right: the manifest drives the restore. Every restored value is equal, each sample of the epoch comes once in the same
global order, the global batch stays, the schedule counts optimizer steps, and one warning says what is not exact. B032:
what is each rank's own comes back to that rank, never another's.
"""

from __future__ import annotations

import torch

import unbroken
from toy import SAMPLES, make_job, train

MODULE = "cases.test_b114_other_world_size"


def part(rank, world_size, path, until):
    job = make_job(path, rank, world_size, seed=until, elastic=True, every=unbroken.Every(steps=1))
    restored = job.ckpt.restore()
    at_restore = job.weights()
    begun = job.ckpt.global_step
    train(job, until).ckpt.close()
    return {
        "restored": restored.step if restored else None,
        "begun": begun,
        "weights before": at_restore,
        "weights": job.weights(),
        "rate": job.optimizer.param_groups[0]["lr"],
        "samples": job.samples,
    }


def test_four_ranks_then_two_then_one_then_four_again(ranks, tmp_path):
    plan = [(4, 2), (2, 4), (1, 5), (4, 9)]
    seen: dict[int, list[int]] = {}
    before = None
    for world_size, until in plan:
        results = ranks.run_all_well(f"{MODULE}:part", world_size, str(tmp_path), until)
        if before is not None:
            assert results[0]["restored"] == before["until"]
            for rank, result in enumerate(results):
                # Batch norm's statistics are each rank's own; a rank that is new takes rank 0's.
                source = rank if rank < len(before["weights"]) else 0
                assert result["weights before"] == before["weights"][source], "every value is equal"
        for step in results[0]["samples"]:
            batch = [result["samples"][step] for result in results]
            # A DistributedSampler deals samples out in turn: reading across the ranks gives the global order.
            seen[step] = [sample for turn in zip(*batch, strict=True) for sample in turn]
        before = {"weights": [result["weights"] for result in results], "until": until}
        assert results[0]["rate"] == 0.05 * 0.5 ** (until // 7), "the schedule counts optimizer steps"
    assert {len(batch) for batch in seen.values()} == {16}, "the global batch is kept"
    first_epoch = [sample for step in range(1, 7) for sample in seen[step]]
    assert sorted(first_epoch) == list(range(SAMPLES)), "each sample once"
    expected = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(3)).tolist()
    assert first_epoch == expected, "in the order that a DistributedSampler of seed 3 gives"


def own_streams(rank, world_size, path, second):
    generator = torch.Generator().manual_seed(1000 + rank)
    torch.manual_seed(rank)
    ckpt = unbroken.Checkpointer(path, {"experts": generator})
    if second:
        torch.manual_seed(77)
        generator.manual_seed(5)
    ckpt.restore()
    if not second:
        torch.rand(3)
        torch.rand(2, generator=generator)
        ckpt.save()
    ckpt.close()
    return torch.rand(2).tolist(), torch.rand(2, generator=generator).tolist()


def test_b032_each_rank_gets_its_own_random_streams_back(ranks, tmp_path):
    """One rank's generator was stored as if all were equal, and 252 of 256 ranks got another's."""
    first = ranks.run_all_well(f"{MODULE}:own_streams", 4, str(tmp_path), False)
    second = ranks.run_all_well(f"{MODULE}:own_streams", 4, str(tmp_path), True)
    assert first == second
    assert len({tuple(own) for _, own in first}) == 4


def test_ranks_that_are_new_do_not_draw_what_another_draws(ranks, tmp_path):
    ranks.run_all_well(f"{MODULE}:own_streams", 2, str(tmp_path), False)
    grown = ranks.run_all_well(f"{MODULE}:own_streams", 4, str(tmp_path), True)
    assert grown[0][0] != grown[1][0]
    assert grown[2][0] not in (grown[0][0], grown[1][0])
