"""B021: when replicas left, part of the data was never read and the summed batch shrank.

With the dead replica's share went its samples, and two thirds of the batch size made another training run. Here the
global batch is kept: 3 ranks x 4 samples go on as 2 ranks x 6.
"""

from loaders import rank_loaders, read_steps, same_state


def test_no_sample_is_lost_or_doubled_and_the_global_batch_is_kept() -> None:
    straight = read_steps(rank_loaders(96, 3, 4))
    three = rank_loaders(96, 3, 4)
    before = read_steps(three, 3)
    two = rank_loaders(96, 2, 4)
    for loader in two:
        loader.load_state_dict(same_state(three))
    after = read_steps(two)
    assert before + after == straight
    assert {len(step) for step in after} == {12}
    assert sorted(index for step in before + after for index in step) == list(range(96))
