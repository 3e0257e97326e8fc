"""What a failed proof tells people to do."""

import pytest

from unbroken.prove.report import _what_to_do
from unbroken.prove.verdict import Difference


@pytest.mark.parametrize(
    ("parts", "not_restored", "hint"),
    [
        (("optimizer",), ("unregistered scheduler `s` (StepLR)",), "add it to the state"),
        (("accumulation", "samples"), (), r"step(accumulating=True)"),
        (("samples", "loss"), (), "unbroken.resumable(loader)"),
        (("rng", "loss"), (), "between restore() and the next step"),
        (("loss", "model"), (), "a counter or an average in a plain variable"),
        (("missing",), (), ""),
        (("final",), (), "a counter or an average in a plain variable"),
    ],
)
def test_the_likeliest_cause_comes_with_what_to_do(parts, not_restored, hint):
    told = _what_to_do(Difference(13, parts, (0,), not_restored=not_restored, restored_step=12))
    assert hint in told
    assert bool(told) == bool(hint)


def test_nothing_is_claimed_of_a_restore_that_was_not_seen():
    assert _what_to_do(Difference(13, ("loss",), (0,))) == ""
