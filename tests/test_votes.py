"""What a rank stored is told once, and known until its structure changes."""

import msgspec
import pytest

from unbroken.errors import SaveFailed
from unbroken.image.image import lay_out
from unbroken.manifest import FileRecord, PieceRecord, TensorRecord
from unbroken.planning import Plan
from unbroken.votes import Listing, Merger, Teller, Vote


def plan_of(**shared: int) -> Plan:
    """A plan that stores tensors of so many bytes."""
    records = {name: TensorRecord("uint8", [size], [PieceRecord(0, 0, size)]) for name, size in shared.items()}
    return Plan("structure", (), lay_out([]), records, ({}, []), {})


def vote_of(rank: int, told: tuple[Listing | None, str], size: int = 10) -> Vote:
    listing, listed = told
    file = FileRecord(f"g0001-rank-{rank:05d}.safetensors", size, 1, "")
    vote = Vote(files=[file], listing=listing, listed=listed)
    return msgspec.json.decode(msgspec.json.encode(vote), type=Vote)


def test_a_listing_is_told_once_and_again_after_a_save_that_was_not_committed():
    teller, plan = Teller(), plan_of(a=4)
    listing, digest = teller.tell(plan)
    assert listing is not None
    teller.learn(False)
    assert teller.tell(plan) == (listing, digest)
    teller.learn(True)
    assert teller.tell(plan) == (None, digest)
    other = teller.tell(plan_of(a=5))
    assert other[0] is not None
    assert other[1] != digest
    teller.learn(True)
    assert teller.tell(plan)[0] is not None, "only the newest is known"


def test_listings_of_all_ranks_are_merged_once_while_they_stay():
    tellers, merger, plans = [Teller(), Teller()], Merger(), [plan_of(a=4), plan_of(b=6)]
    merged = []
    for _ in range(3):
        votes = [
            vote_of(rank, teller.tell(plan)) for rank, (teller, plan) in enumerate(zip(tellers, plans, strict=True))
        ]
        merged.append(merger.merge(votes))
        merger.commit()
        for teller in tellers:
            teller.learn(True)
    (first, checked), *later = merged
    assert not checked
    assert all(again is first and known for again, known in later)
    assert {name: record.pieces[0].file for name, record in first.tensors.items()} == {"a": 0, "b": 1}


def test_one_rank_with_a_new_structure_is_merged_with_what_the_others_had():
    tellers, merger = [Teller(), Teller()], Merger()
    merger.merge([vote_of(rank, teller.tell(plan_of(a=4))) for rank, teller in enumerate(tellers)])
    merger.commit()
    plan = plan_of(a=4)
    tellers[0].tell(plan), tellers[0].learn(True)
    merger.merge([vote_of(0, tellers[0].tell(plan)), vote_of(1, tellers[1].tell(plan_of(c=1)))])
    merged, checked = merger.merge([vote_of(0, tellers[0].tell(plan)), vote_of(1, tellers[1].tell(plan_of(d=2)))])
    assert sorted(merged.tensors) == ["a", "d"]
    assert not checked


def test_a_file_of_another_size_is_checked_anew():
    """Pieces were found to lie inside a file of the size that it had."""
    teller, merger, plan = Teller(), Merger(), plan_of(a=4)
    merger.merge([vote_of(0, teller.tell(plan))])
    merger.commit()
    teller.learn(True)
    assert merger.merge([vote_of(0, teller.tell(plan), size=3)])[1] is False


def test_what_was_merged_and_not_committed_is_checked_again():
    teller, merger, plan = Teller(), Merger(), plan_of(a=4)
    for _ in range(2):
        assert merger.merge([vote_of(0, teller.tell(plan))])[1] is False


def test_a_digest_that_is_not_known_is_refused():
    merger = Merger()
    with pytest.raises(SaveFailed, match="rank 0 refers to what it stored before"):
        merger.merge([vote_of(0, (None, "0" * 32))])
    merger.merge([vote_of(0, Teller().tell(plan_of(a=4)))])
    with pytest.raises(SaveFailed, match="rank 0 refers to what it stored before"):
        merger.merge([vote_of(0, (None, "0" * 32))])
