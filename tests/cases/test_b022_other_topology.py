"""B022: resuming in mid-epoch with other workers or ranks was not supported, and then only in parts.

A position that says "worker 3 has read 40" means nothing to 8 workers. The position here is one number over all.
"""

from loaders import rank_loaders, read_steps, same_state


def test_other_workers_keep_the_order_and_fewer_ranks_read_the_rest_once() -> None:
    straight = read_steps(rank_loaders(40, 2, 2))
    killed = rank_loaders(40, 2, 2, num_workers=1)
    assert read_steps(killed, 4) == straight[:4]

    more_workers = rank_loaders(40, 2, 2, num_workers=2)
    for loader in more_workers:
        loader.load_state_dict(same_state(killed))
    assert read_steps(more_workers) == straight[4:]

    one_rank = rank_loaders(40, 1, 2)
    one_rank[0].load_state_dict(same_state(killed))
    rest = [index for step in read_steps(one_rank) for index in step]
    assert rest == [index for step in straight[4:] for index in step]
