"""B013: a state saved at an epoch's end and loaded again was another state, and an epoch was repeated or lost.

At the edge a loader must decide whether its position is "all of this epoch" or "none of the next". Loaders that changed
their mind on loading counted the epoch twice or not at all.
"""

import json

import pytest
from torch.utils.data import DataLoader

from loaders import Augmented, ids
from unbroken.data import ResumableLoader, resumable


def job(workers: int) -> ResumableLoader:
    return resumable(DataLoader(Augmented(100), batch_size=10, shuffle=True, num_workers=workers), seed=1)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_stream_of_four_epochs_goes_through_a_save_at_the_edge(workers: int) -> None:
    straight = job(0)
    stream = [batch for _ in range(4) for batch in ids(straight)]
    loader = job(workers)
    first = [batch for _ in range(2) for batch in ids(loader)]
    saved = json.loads(json.dumps(loader.state_dict()))
    loader.load_state_dict(saved)  # into the loader itself
    assert loader.state_dict() == saved
    third = list(ids(loader))
    fresh = job(workers)
    fresh.load_state_dict(saved)
    assert fresh.state_dict() == saved
    assert list(ids(fresh)) == third
    assert first + third + list(ids(fresh)) == stream


def test_a_save_inside_the_last_step_leaves_the_end_of_the_epoch_to_do() -> None:
    loader = job(0)
    for _batch in loader:
        state = loader.state_dict()
    resumed = job(0)
    resumed.load_state_dict(state)
    assert (list(resumed), resumed.epoch) == ([], 1)
    assert list(ids(resumed)) == list(ids(loader))
