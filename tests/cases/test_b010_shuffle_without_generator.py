"""B010: a loader with shuffle=True and no generator reshuffled on resume, so skipping ahead dropped the wrong samples.

The permutation came from the global stream, which a new process has elsewhere; of 20 skipped samples 15 were wrong, so
15 were seen twice and 15 never.
"""

import random

import numpy as np
import torch
from torch.utils.data import DataLoader

from loaders import Augmented, ids
from unbroken.data import ResumableLoader, resumable


def job() -> ResumableLoader:
    return resumable(DataLoader(Augmented(64), batch_size=4, shuffle=True))


def test_no_sample_is_repeated_or_missing_and_the_order_is_the_same() -> None:
    torch.manual_seed(3)
    straight = list(ids(job()))
    torch.manual_seed(3)
    killed = job()
    before = list(ids(killed, 5))
    state = killed.state_dict()

    torch.manual_seed(99)  # the new process's streams are anywhere
    random.seed(99), np.random.seed(99)
    resumed = job()
    resumed.load_state_dict(state)
    after = list(ids(resumed))
    assert before + after == straight
    assert sorted(index for batch in before + after for index in batch) == list(range(64))
