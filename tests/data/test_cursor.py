"""Laws of the global cursor: whatever the world sizes on the way, each sample of the epoch is dealt once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.data.cursor import BatchSizes, Fitted, batch_spans, count_batches, fit_batch_size, share_of
from unbroken.errors import StateMismatch

worlds = st.integers(1, 7)


def dealt(length: int, cursor: int, world: int, samples: int, *, drop_last: bool) -> tuple[list[int], int]:
    """Positions that `world` ranks read together when each reads up to `samples`, and the cursor after."""
    shares = [share_of(length, cursor, rank, world, drop_last=drop_last) for rank in range(world)]
    samples = min(samples, shares[0].count)
    positions = [position for share in shares for position in share.positions(0, samples)]
    return positions, shares[0].cursor_after(samples)


@given(st.integers(0, 200), st.lists(st.tuples(worlds, st.integers(0, 30)), max_size=6), worlds)
def test_each_position_is_dealt_once_and_padding_comes_last(
    length: int, legs: list[tuple[int, int]], last_world: int
) -> None:
    cursor, seen = 0, []
    for world, samples in [*legs, (last_world, length + 1)]:
        positions, cursor = dealt(length, cursor, world, samples, drop_last=False)
        seen += positions
    assert sorted(seen) == list(range(len(seen)))
    assert length <= len(seen) < length + 7 or length == 0 == len(seen)


@given(st.integers(0, 200), worlds, st.integers(0, 50), worlds)
def test_dropping_loses_less_than_a_round_and_repeats_nothing(
    length: int, first: int, samples: int, second: int
) -> None:
    seen, cursor = dealt(length, 0, first, samples, drop_last=True)
    rest, _ = dealt(length, cursor, second, length, drop_last=True)
    assert sorted(seen + rest) == list(range(len(seen + rest)))
    assert length - second < len(seen + rest) <= length or len(seen) == len(seen + rest)


@given(st.integers(0, 100), worlds, st.integers(0, 40), st.booleans())
def test_at_one_world_size_a_restart_deals_what_was_left(length: int, world: int, samples: int, drop: bool) -> None:
    for rank in range(world):
        whole = share_of(length, 0, rank, world, drop_last=drop)
        done = min(samples, whole.count)
        rest = share_of(length, whole.cursor_after(done), rank, world, drop_last=drop)
        assert [*rest.positions(0, rest.count)] == [*whole.positions(done, whole.count)]


@given(st.integers(0, 100), st.integers(1, 12), st.booleans())
def test_batches_cover_the_share_in_order(count: int, size: int, drop: bool) -> None:
    spans = list(batch_spans(count, size, drop_last=drop))
    covered = [n for first, last in spans for n in range(first, last)]
    assert covered == list(range(count - count % size if drop else count))
    assert len(spans) == count_batches(count, size, drop_last=drop)
    assert all(last - first == size for first, last in spans[:-1])


@given(st.integers(1, 12), worlds, worlds)
def test_the_global_batch_is_kept_or_refused(size: int, before: int, after: int) -> None:
    saved = BatchSizes(size, before, size * before)
    if saved.total % after:
        with pytest.raises(StateMismatch, match=f"{saved.total} samples cannot be divided among {after} ranks"):
            fit_batch_size(saved, size, after)
    else:
        fitted = fit_batch_size(saved, size, after)
        assert fitted.size * after == saved.total and fitted.micro_batches == 1
        assert (fitted.warning == "") == (before == after)


@given(st.integers(1, 12), worlds, worlds)
def test_batches_are_accumulated_to_the_global_batch_or_refused(size: int, before: int, after: int) -> None:
    saved = BatchSizes(size, before, size * before)
    if saved.total % (size * after):
        with pytest.raises(StateMismatch, match=f"no multiple of the {size * after} that {after} ranks read at once"):
            fit_batch_size(saved, size, after, "accumulate")
    else:
        fitted = fit_batch_size(saved, size, after, "accumulate")
        assert fitted.size == size and fitted.micro_batches * size * after == saved.total


def test_another_number_of_ranks_is_refused_if_the_user_chose_so() -> None:
    assert fit_batch_size(BatchSizes(4, 3, 12), 4, 3, "refuse") == Fitted(4)
    with pytest.raises(StateMismatch, match='saved by 3 ranks and this job has 2, which when_ranks_change="refuse"'):
        fit_batch_size(BatchSizes(4, 3, 12), 4, 2, "refuse")


def test_a_batch_size_that_the_user_changed_holds() -> None:
    saved = BatchSizes(4, 3, 12)
    assert fit_batch_size(saved, 6, 2) == Fitted(6)
    fitted = fit_batch_size(saved, 5, 2)
    assert fitted.size == 5
    assert "global batch changes from 12 to 10" in fitted.warning


def test_a_refusal_names_the_world_sizes_that_fit() -> None:
    with pytest.raises(StateMismatch, match="one of 1, 2, 3, 4, 6, 12 ranks, or set another batch_size than 4"):
        fit_batch_size(BatchSizes(4, 3, 12), 4, 5)
