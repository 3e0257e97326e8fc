"""B052: with gradient accumulation, resume skipped optimizer steps instead of batches, a quarter of what it should.

Five optimizer steps of four micro-batches are twenty batches; the resumed job skipped five, and trained on fifteen
again. The position counts what the loop had, whatever it does with it.
"""

from torch.utils.data import DataLoader

from loaders import Augmented, ids
from unbroken.data import resumable

ACCUMULATE = 4


def test_after_five_steps_of_four_micro_batches_the_next_sample_is_20() -> None:
    killed, optimizer_steps = resumable(DataLoader(Augmented(40), batch_size=1)), 0
    for micro_step, _batch in enumerate(killed, start=1):
        optimizer_steps += micro_step % ACCUMULATE == 0
        if optimizer_steps == 5:
            break
    resumed = resumable(DataLoader(Augmented(40), batch_size=1))
    resumed.load_state_dict(killed.state_dict())
    assert next(ids(resumed)) == [20]


def test_a_kill_inside_an_accumulation_window_resumes_inside_it() -> None:
    killed = resumable(DataLoader(Augmented(40), batch_size=1))
    list(ids(killed, 22))
    resumed = resumable(DataLoader(Augmented(40), batch_size=1))
    resumed.load_state_dict(killed.state_dict())
    assert next(ids(resumed)) == [22]
