"""Do the ranks mean the same by a name, and do those that hold the same tensor hold the same values?

Asked when the structure of the state is new: each rank sends a digest of its shared tensors (names, dtypes, and how
they lie on the ranks) and one of the values of each group of replicas. If all are alike, that was all. If not, one
rank of each kind tells its tensors in detail, and the coordinator finds

- what only some of the ranks of a mesh have, or what replicas have with other values: each holder stores its own
  (`apart`); a shard, which nobody has whole, cannot be stored so, and is an error;
- names that two meshes use (two pipeline stages that both register `model`): all who hold such a tensor tell which
  boxes, and then a digest of each part that boxes of the meshes have in common, however each cuts it. Equal bytes are
  replicas, and one mesh writes them; other bytes are an error. None is picked (invariant 8).

Pure functions of messages; who sends them is told in `commit` and `session`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeAlias

import msgspec
import xxhash

from unbroken.elements import as_bytes
from unbroken.image.digest import digest_text
from unbroken.layout.boxes import Box, intersect
from unbroken.layout.spread import Cuts, holding
from unbroken.planning import structure_of
from unbroken.replicas import digest_replicas
from unbroken.snapshot import held_boxes
from unbroken.state.captured import Captured

Range: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""A box as it travels: where it begins and ends."""


class Entered(msgspec.Struct):
    """A rank has come to a save."""

    changed: bool = False
    """True if its structure is new to it: it waits for the common plan before it copies."""
    structure: str = ""
    """Digest of its shared tensors: names, dtypes, and how they lie on the ranks; only given when `changed`."""
    replicas: dict[str, str] = {}
    """Digest of names and values of what it shares with each group of ranks; only given when `changed`."""
    error: str = ""
    """Why it cannot take part in this save."""
    mistake: bool = False
    """True if it never could: what is registered cannot be stored."""


class Claim(msgspec.Struct, array_like=True, frozen=True):
    """One shared tensor, as one rank has it."""

    dtype: str
    spread: str
    """How it lies on the ranks, `Spread.describe()`."""
    mesh: str
    """Key of its mesh in `Details.meshes`."""
    whole: bool
    """True if every rank of the mesh holds it whole."""
    holders: str = ""
    """The ranks that hold the same part; empty if it is this rank only."""
    digest: str = ""
    """Of the values of that part."""


class Details(msgspec.Struct):
    """Every shared tensor of one rank; asked for only when ranks do not agree."""

    tensors: dict[str, Claim] = {}
    """By full name."""
    meshes: dict[str, list[int]] = {}
    """Ranks by the key of a mesh."""


class Held(msgspec.Struct):
    """What one rank holds of contested tensors."""

    tensors: dict[str, tuple[str, list[Range]]] = {}
    """By full name: dtype and whole shape, and the boxes."""


class Values(msgspec.Struct):
    """Digests of what one rank holds of contested tensors, by `part_key`."""

    parts: dict[str, str] = {}


class CommonPlan(msgspec.Struct):
    """The coordinator's answer to ranks whose structure changed."""

    ask: list[int] = []
    """These ranks are to send their `Details`; then the answer comes."""
    contested: list[str] = []
    """All ranks are to send which boxes they hold of these; then `parts` come."""
    parts: dict[str, list[Range]] = {}
    """Contested names -> boxes whose digests all holders are to send; then the answer comes."""
    apart: list[str] = []
    """Tensors that only some ranks hold or that differ; each holder stores its own."""
    ceded: dict[str, str] = {}
    """Names that several meshes hold alike -> key of the mesh whose ranks write them."""
    differing: list[str] = []
    """One line for each tensor that ought to be equal and is not."""
    error: str = ""
    """Why this save cannot be."""
    mistake: bool = False
    """True if no later save could be either: the script names two things alike, or registers what no rank can store."""


def entry_of(captured: Captured, rank: int, check_values: bool) -> Entered:
    """What a rank says when its structure is new."""
    replicas = digest_replicas(captured, rank, captured.tensors) if check_values else {}
    return Entered(True, structure_of(captured, shared_only=True), fold(replicas))


def fold(replicas: Mapping[tuple[int, ...], Mapping[str, str]]) -> dict[str, str]:
    """One digest for each group of ranks instead of one for each tensor."""
    return {
        spell(holders): digest_text(msgspec.json.encode(sorted(names.items()))) for holders, names in replicas.items()
    }


def details_of(captured: Captured, rank: int, check_values: bool) -> Details:
    """Every shared tensor of this rank."""
    replicas = digest_replicas(captured, rank, captured.tensors) if check_values else {}
    digests = {name: (spell(holders), d) for holders, names in replicas.items() for name, d in names.items()}
    details = Details()
    for name, live in captured.tensors.items():
        if live.spread is None:
            continue
        mesh = holding(live.spread)
        details.meshes[mesh.key] = list(mesh.ranks)
        whole = isinstance(live.spread, Cuts) and not live.spread.order
        claim = (str(live.tensor.dtype), live.spread.describe(), mesh.key, whole)
        details.tensors[name] = Claim(*claim, *digests.get(name, ("", "")))
    return details


def held_of(captured: Captured, rank: int, contested: Collection[str]) -> Held:
    """Which boxes this rank holds of contested tensors."""
    held = Held()
    for name in contested:
        live = captured.tensors.get(name)
        if live is not None and live.spread is not None:
            boxes = [(box.begin, box.end) for box in live.spread.boxes_of(rank)]
            held.tensors[name] = (f"{live.tensor.dtype} {live.shape}", boxes)
    return held


def values_of(captured: Captured, rank: int, parts: Mapping[str, Sequence[Range]]) -> Values:
    """Digests of those parts that this rank holds."""
    values = Values()
    for name, ranges in parts.items():
        live = captured.tensors.get(name)
        if live is None or live.spread is None:
            continue
        for box, tensor in held_boxes(live.tensor.detach(), live.spread, rank):
            for part in (Box(*each) for each in ranges):
                if intersect(part, box) == part:
                    data = as_bytes(tensor[part.slices(box)]).cpu().numpy().data
                    values.parts[part_key(name, part)] = xxhash.xxh3_128_hexdigest(data)
    return values


def part_key(name: str, part: Box) -> str:
    """What a part of a contested tensor is called in messages."""
    return f"{name} {part.begin}-{part.end}"


def ranks_to_ask(entries: Sequence[Entered]) -> list[int]:
    """Who must tell details: nobody if all are alike, else one rank of each kind and all whose replicas differ."""
    first_of: dict[str, int] = {}
    groups: dict[str, dict[str, list[int]]] = {}
    for rank, entry in enumerate(entries):
        first_of.setdefault(entry.structure, rank)
        for holders, digest in entry.replicas.items():
            groups.setdefault(holders, {}).setdefault(digest, []).append(rank)
    asked = set(first_of.values()) if len(first_of) > 1 else set()
    for by_digest in groups.values():
        if len(by_digest) > 1:
            asked.update(rank for ranks in by_digest.values() for rank in ranks)
    return sorted(asked)


def compare_details(structures: Sequence[str], details: Mapping[int, Details]) -> CommonPlan:
    """What the ranks that were asked told.

    structures  digest of each rank's shared tensors; details  by rank, at least one rank of each structure
    """
    plan = CommonPlan()
    by_structure = {structures[rank]: details[rank] for rank in sorted(details, reverse=True)}
    meshes_told = {key: ranks for told in by_structure.values() for key, ranks in told.meshes.items()}
    kinds_of_mesh = {key: {structures[rank] for rank in ranks} for key, ranks in meshes_told.items()}
    contested: dict[str, set[str]] = {}
    for name in sorted(set().union(*(told.tensors for told in by_structure.values()))):
        claims = {kind: told.tensors[name] for kind, told in by_structure.items() if name in told.tensors}
        broken = {
            claim.mesh
            for claim in claims.values()
            for kind in kinds_of_mesh[claim.mesh]
            if kind not in claims or _form(claims[kind]) != _form(claim)
        }
        meshes = {claim.mesh for claim in claims.values()}
        if broken and all(claim.whole for claim in claims.values()):
            plan.apart.append(name)
        elif broken:
            plan.error = plan.error or _uneven(
                name, claims, structures, {rank for mesh in broken for rank in meshes_told[mesh]}
            )
        elif len(meshes) > 1:
            contested[name] = meshes
    plan.contested = sorted(contested)
    _compare_values(plan, details)
    plan.apart.sort()
    return plan


def _uneven(name: str, claims: Mapping[str, Claim], structures: Sequence[str], ranks: set[int]) -> str:
    """What is wrong with a shard that the ranks of its mesh do not all have alike."""
    lacking = [rank for rank in sorted(ranks) if structures[rank] not in claims]
    if lacking:
        return f"{name} is sharded over ranks {spell(sorted(ranks))}, and not registered on rank(s) {spell(lacking)}"
    forms = {rank: _form(claims[structures[rank]]) for rank in ranks}
    odd = minority({rank: str(form) for rank, form in sorted(forms.items())})
    dtypes = sorted({dtype for dtype, _ in forms.values()})
    kind = " and ".join(dtypes) if len(dtypes) > 1 else "another shape or other cuts"
    return f"{name} is sharded over ranks {spell(sorted(ranks))}, and rank(s) {spell(odd)} have it otherwise: {kind}"


def _form(claim: Claim) -> tuple[str, str]:
    return claim.dtype, claim.spread


def _compare_values(plan: CommonPlan, details: Mapping[int, Details]) -> None:
    told: dict[tuple[str, str], dict[int, Claim]] = {}
    for rank, detail in sorted(details.items()):
        for name, claim in detail.tensors.items():
            if claim.digest:
                told.setdefault((name, claim.holders), {})[rank] = claim
    for (name, holders), claims in sorted(told.items()):
        odd = minority({rank: claim.digest for rank, claim in claims.items()})
        if not odd or name in plan.apart or name in plan.contested:  # `settle` tells of the latter
            continue
        line = f"{name} on rank(s) {spell(odd)}"
        if all(claim.whole for claim in claims.values()):
            plan.apart.append(name)
            plan.differing.append(line)
        else:
            plan.error = plan.error or f"ranks {holders} hold the same shard and other values: {line}"


def divide(contested: Sequence[str], details: Mapping[int, Details], held: Sequence[Held]) -> CommonPlan:
    """The parts by which holders of contested tensors compare values, or an error if shapes or dtypes differ.

    held  by rank
    """
    plan = CommonPlan()
    for name in contested:
        meshes = _meshes_of(name, details)
        kinds = {held[rank].tensors[name][0] for ranks in meshes.values() for rank in ranks}
        if len(kinds) > 1:
            return _two_things(name, meshes.values())
        cuts = [{box for rank in ranks for box in held[rank].tensors[name][1]} for ranks in meshes.values()]
        plan.parts[name] = _common_parts(cuts)
    return plan


def _common_parts(cuts: Sequence[set[Range]]) -> list[Range]:
    """The boxes that every given set of boxes is made of; each set covers one whole tensor."""
    first, *others = cuts
    parts = {Box(*each) for each in first}
    for other in others:
        boxes = {Box(*each) for each in other}
        if boxes != parts:
            parts = {shared for box in boxes for part in parts if (shared := intersect(box, part)) is not None}
    return sorted((part.begin, part.end) for part in parts if part.numel)


def settle(parts: Mapping[str, list[Range]], details: Mapping[int, Details], values: Sequence[Values]) -> CommonPlan:
    """Who writes tensors whose name several meshes use, or an error if they are not the same.

    parts  as `divide` made them; values  by rank
    """
    plan = CommonPlan(parts=dict(parts))
    for name, ranges in parts.items():
        meshes = _meshes_of(name, details)
        for part in (Box(*each) for each in ranges):
            if len({told.parts[part_key(name, part)] for told in values if part_key(name, part) in told.parts}) > 1:
                return _two_things(name, meshes.values())
        plan.ceded[name] = min(meshes, key=lambda mesh: min(meshes[mesh]))
    return plan


def _meshes_of(name: str, details: Mapping[int, Details]) -> dict[str, list[int]]:
    """The ranks of each mesh that a tensor lies on, by the key of the mesh."""
    claims = ((told, told.tensors[name]) for told in details.values() if name in told.tensors)
    return {claim.mesh: told.meshes[claim.mesh] for told, claim in claims}


def _two_things(name: str, meshes: Iterable[list[int]]) -> CommonPlan:
    holders = " and another on ranks ".join(spell(ranks) for ranks in sorted(meshes))
    error = (
        f"{name} is one thing on ranks {holders}; give the parts of the model names of their own (a pipeline stage "
        "keeps the layers' names of the whole model), or keep what is meant to be one thing equal on all of them"
    )
    return CommonPlan(error=error, mistake=True)


def odd_ranks(votes: Sequence[Mapping[str, str]]) -> list[int]:
    """Ranks whose digest of something is not that of most who tell of it. votes: by rank, then by subject."""
    told: dict[str, dict[int, str]] = {}
    for rank, vote in enumerate(votes):
        for subject, digest in vote.items():
            told.setdefault(subject, {})[rank] = digest
    return sorted({rank for digests in told.values() for rank in minority(digests)})


def minority(values: Mapping[int, str]) -> list[int]:
    """The ranks that do not have the most frequent value."""
    counted = list(values.values())
    common = max(counted, key=counted.count)
    return [rank for rank, value in values.items() if value != common]


def spell(ranks: Sequence[int]) -> str:
    """Ranks as ranges: `0-3, 8`."""
    ranges: list[list[int]] = []
    for rank in sorted(ranks):
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in ranges)
