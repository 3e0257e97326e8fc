"""B007: a job resumed in epoch 1 or later replayed epoch 0's order.

DistributedSampler orders by (seed, epoch), and a new process's sampler has epoch 0 until someone calls set_epoch. Jobs
that restored only a step number went on in epoch 1 with epoch 0's permutation; a resume at an epoch's edge looked fine.
"""

from loaders import rank_loaders, read_steps, same_state


def test_ids_after_a_resume_in_epoch_1_are_those_of_the_straight_run() -> None:
    straight = rank_loaders(500, 2, 2)
    read_steps(straight)
    epoch_1 = read_steps(straight)
    assert len(epoch_1) == 125

    killed = rank_loaders(500, 2, 2)
    read_steps(killed)
    assert read_steps(killed, 75) == epoch_1[:75]  # step 200
    resumed = rank_loaders(500, 2, 2)
    for loader in resumed:
        loader.load_state_dict(same_state(killed))
    assert read_steps(resumed) == epoch_1[75:]
