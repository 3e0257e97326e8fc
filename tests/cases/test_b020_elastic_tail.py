"""B020: after an elastic restart the remaining samples were not the remaining part of the same permutation.

The elastic sampler began at a start index but shuffled only what lay behind it, anew; with another world size the tail
was another set of samples.
"""

from loaders import rank_loaders, read_steps, same_state


def test_consumed_and_remaining_make_one_permutation() -> None:
    whole = [index for step in read_steps(rank_loaders(32, 1, 2)) for index in step]
    assert sorted(whole) == list(range(32))
    killed = rank_loaders(32, 2, 1)
    consumed = [index for step in read_steps(killed, 5) for index in step]
    assert len(consumed) == 10
    for world, batch_size in [(1, 2), (2, 1)]:
        resumed = rank_loaders(32, world, batch_size)
        for loader in resumed:
            loader.load_state_dict(same_state(killed))
        remaining = [index for step in read_steps(resumed) for index in step]
        assert consumed + remaining == whole
