"""What a rank says of the part that it wrote, and how the votes of all ranks become one manifest.

What a rank has stored of which tensors is the same from save to save as long as the structure of its state is. It is
sent once, and then only its digest: a model of 20,000 tensors has 2.6 MB of it, whose decoding and checking take longer
than the writing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from unbroken.errors import SaveFailed
from unbroken.image.digest import digest_text
from unbroken.manifest import CutsRecord, FileRecord, MeshRecord, PieceRecord, TensorRecord, ValueRecord
from unbroken.planning import Plan


class Listing(msgspec.Struct, frozen=True):
    """What one rank has stored of which tensors; files are counted from its first."""

    shared: dict[str, TensorRecord] = {}
    cut: dict[str, TensorRecord] = {}
    """Tensors in too many pieces to be listed, from the first rank of their mesh."""
    meshes: list[MeshRecord] = []
    """What they are cut by."""
    own: dict[str, TensorRecord] = {}


class Vote(msgspec.Struct):
    """How one rank's part of a save went."""

    error: str = ""
    files: list[FileRecord] = []
    """None if the rank owns no bytes; the last is that of what does not change, if there is any."""
    listing: Listing | None = None
    """None if it is that of the rank's newest vote that was committed."""
    listed: str = ""
    """Its digest."""
    values: dict[str, msgspec.Raw] = {}
    as_rank_0: list[str] = []
    """Further names, whose values are those of rank 0."""
    plan: str = ""
    """Digest of the common plan that it went by."""
    replicas: dict[str, str] = {}
    """Digest of the values of what it shares with each group of ranks (`agreement.fold`)."""
    seconds: float = 0.0


@dataclass(slots=True)
class Teller:
    """One rank's side: what the coordinator knows already."""

    _plan: Plan | None = None
    _digest: str = ""
    _known: bool = False

    def tell(self, plan: Plan) -> tuple[Listing | None, str]:
        """What a plan stores, if the coordinator does not know it yet, and its digest."""
        if plan is self._plan and self._known:
            return None, self._digest
        listing = Listing(plan.shared, plan.cut[0], plan.cut[1], plan.own)
        self._plan, self._known, self._digest = plan, False, digest_text(msgspec.json.encode(listing))
        return listing, self._digest

    def learn(self, committed: bool) -> None:
        """Note the outcome of the vote that was told last."""
        self._known = committed


class Merged(msgspec.Struct, frozen=True):
    """What all ranks together have stored of which tensors: the part of a manifest that stays from save to save."""

    tensors: dict[str, TensorRecord]
    rank_tensors: list[dict[str, TensorRecord]]
    meshes: list[MeshRecord]


@dataclass(slots=True)
class Merger:
    """The coordinator's side."""

    _listings: dict[int, tuple[str, Listing]] = field(default_factory=dict)
    """By rank: the newest, and its digest."""
    _key: list[tuple[str, list[int]]] = field(default_factory=list)
    _merged: Merged | None = None
    _committed: bool = False

    def merge(self, votes: Sequence[Vote]) -> tuple[Merged, bool]:
        """The listings of all ranks as one; True if it is that of the newest committed save.

        Raises SaveFailed for a digest that is not known, which no rank sends that learnt all outcomes.
        """
        for rank, vote in enumerate(votes):
            if vote.listing is not None:
                self._listings[rank] = vote.listed, vote.listing
            elif rank not in self._listings or self._listings[rank][0] != vote.listed:
                raise SaveFailed(f"rank {rank} refers to what it stored before, which rank 0 does not know")
        # Sizes, too: pieces were found to lie inside files of these.
        key = [(vote.listed, [file.size for file in vote.files]) for vote in votes]
        if self._merged is None or key != self._key:
            self._key, self._committed = key, False
            self._merged = _merge([self._listings[rank][1] for rank in range(len(votes))], votes)
        return self._merged, self._committed

    def commit(self) -> None:
        """Note that what was merged last is in a manifest."""
        self._committed = True


def _merge(listings: Sequence[Listing], votes: Sequence[Vote]) -> Merged:
    tensors: dict[str, TensorRecord] = {}
    rank_tensors: list[dict[str, TensorRecord]] = []
    meshes: list[MeshRecord] = []
    index = 0
    for listing, vote in zip(listings, votes, strict=True):
        for name, record in _in_file(listing.shared, index).items():
            known = tensors.get(name)
            pieces = [*known.pieces, *record.pieces] if known else record.pieces
            tensors[name] = TensorRecord(record.dtype, record.shape, pieces)
        rank_tensors.append(_in_file(listing.own, index))
        for name, record in listing.cut.items():
            assert record.cuts is not None
            cuts = CutsRecord(record.cuts.mesh + len(meshes), record.cuts.order)
            tensors[name] = TensorRecord(record.dtype, record.shape, [], cuts)
        meshes += listing.meshes
        index += len(vote.files)
    return Merged(tensors, rank_tensors, meshes)


def _in_file(records: dict[str, TensorRecord], index: int) -> dict[str, TensorRecord]:
    """The same records with the rank's files counted from `index`."""
    return {
        name: TensorRecord(
            record.dtype, record.shape, [PieceRecord(index + p.file, p.begin, p.end, p.box) for p in record.pieces]
        )
        for name, record in records.items()
    }


def merge_values(votes: Sequence[Vote]) -> dict[str, list[ValueRecord]]:
    """Values by name, each distinct value once with the ranks that have it; never merged, never picked."""
    merged: dict[str, dict[bytes, list[tuple[int, int]]]] = {}
    of_rank_0 = {name: bytes(raw) for name, raw in votes[0].values.items()}
    for rank, vote in enumerate(votes):
        own = {name: bytes(raw) for name, raw in vote.values.items()} if rank else of_rank_0
        for name, raw in {**own, **{name: of_rank_0[name] for name in vote.as_rank_0}}.items():
            ranges = merged.setdefault(name, {}).setdefault(raw, [])
            if ranges and ranges[-1][1] == rank - 1:
                ranges[-1] = (ranges[-1][0], rank)
            else:
                ranges.append((rank, rank))
    return {
        name: [ValueRecord(ranges, msgspec.Raw(raw)) for raw, ranges in distinct.items()]
        for name, distinct in merged.items()
    }
