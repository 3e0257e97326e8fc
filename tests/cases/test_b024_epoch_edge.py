"""B024: a state saved right at an epoch's end moved the epoch twice on resume: the epoch after next's order.

The saved epoch number had been advanced already, and the resumed job advanced it again. Draws from the global stream
between epochs (a validation run, say) must not matter either.
"""

import pytest
import torch

from loaders import rank_loaders, read_steps, same_state


def reference() -> list[list[int]]:
    loaders = rank_loaders(48, 2, 4)
    return [step for _ in range(3) for step in read_steps(loaders)]


@pytest.mark.parametrize("kill", [2, 6, 8, 12], ids=["mid-epoch 0", "epoch edge", "mid-epoch 1", "second edge"])
@pytest.mark.parametrize("draws", [0, 7])
def test_the_stream_over_a_kill_is_the_reference(kill: int, draws: int) -> None:
    expected = reference()
    killed, read = rank_loaders(48, 2, 4), []
    while len(read) < kill:
        read += read_steps(killed, min(6, kill - len(read)))
    torch.rand(draws)
    resumed = rank_loaders(48, 2, 4)
    for loader in resumed:
        loader.load_state_dict(same_state(killed))
    while len(read) < len(expected):
        read += read_steps(resumed)
        torch.rand(draws)
    assert read == expected
