"""B028: skipping 500,000 batches to the position took 12 hours, and the other ranks' collectives timed out.

The skipped samples were loaded and thrown away. Here nothing before the position is fetched, and nothing is counted up.
"""

from torch.utils.data import DataLoader

from loaders import Augmented, ids
from unbroken.data import ResumableLoader, resumable

LENGTH = 50_000


def job() -> tuple[Augmented, ResumableLoader]:
    dataset = Augmented(LENGTH)
    return dataset, resumable(DataLoader(dataset, batch_size=5, shuffle=True), seed=1)


def test_no_sample_before_the_position_is_fetched() -> None:
    _, straight = job()
    state = {**straight.state_dict(), "position": LENGTH - 50}
    dataset, resumed = job()
    resumed.load_state_dict(state)
    rest = list(ids(resumed))
    assert len(rest) == 10
    assert dataset.fetched == [index for batch in rest for index in batch]
    assert rest == list(ids(straight))[-10:]
