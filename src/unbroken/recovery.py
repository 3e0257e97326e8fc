"""Which checkpoint all ranks go on from, and the way of its bytes into the live state.

Read order follows from the write order of `commit`: generations tell the lineage, manifests on it are the candidates,
newest first; the bytes of a candidate are verified while they are read. All ranks restore the same step of the same
generation or none does (invariant 3); a damaged candidate costs its own steps, never the run (invariant 4).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import msgspec
import torch
import xxhash

from unbroken import faultpoints
from unbroken.agreement import spell
from unbroken.candidates import Candidate, Saved, candidates, find_tip, first_manifest, saved_for, saved_tensors
from unbroken.cluster import Channel, Message
from unbroken.elements import as_bytes
from unbroken.errors import (
    DamagedCheckpoint,
    DirectoryProblem,
    NoUsableCheckpoint,
    StateMismatch,
    UnbrokenError,
    UsageError,
)
from unbroken.image.digest import digest_text
from unbroken.layout.spread import holding
from unbroken.manifest import MOST_BYTES, Manifest, TensorRecord, decode
from unbroken.reading import read_tensors, targets_of
from unbroken.state.captured import Restoration
from unbroken.state.draft import count_and_name, only_saved
from unbroken.state.registry import State
from unbroken.store.local import LocalStore

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Recovered:
    """What all ranks went on from."""

    manifest: Manifest | None
    """None on a fresh start: the directory holds no checkpoint."""
    directory: str
    skipped: tuple[str, ...]
    """Newer checkpoints that were passed over, with reasons, newest first."""
    warnings: tuple[str, ...]
    """What is not exactly as it was, on this rank."""


class _Announcement(msgspec.Struct):
    """Rank 0's choice, for all ranks to try."""

    directory: str = ""
    """Empty: there is nothing to restore."""
    name: str = ""
    """Of the manifest in it. Each rank reads it for itself: thousands would wait for one that sends it to all."""
    digest: str = ""
    """Of the manifest's bytes."""
    skipped: list[str] = []


_FILLED = "build the objects anew first, since tensors of a damaged checkpoint were read into them"


@dataclass(frozen=True, slots=True)
class _Problem:
    """Why a candidate cannot be used."""

    text: str
    filled: bool = False
    """True if bytes of it are in live tensors."""


@dataclass(slots=True)
class _Search:
    """Rank 0's walk from the newest candidate to older ones."""

    store: LocalStore
    place: str
    """The run directory, for people."""
    remaining: Iterator[Candidate] | None = None
    skipped: list[str] = field(default_factory=list)
    filled: bool = False
    """True when bytes of a damaged checkpoint are in live tensors."""
    manifest: Manifest | None = None
    """Of the candidate that was announced last; None on all ranks but 0."""

    def next(self) -> bytes:
        """The next candidate that looks whole, or an empty announcement on a fresh start.

        Raises NoUsableCheckpoint if there were checkpoints and all have been passed over; NewerFormat.
        """
        if self.remaining is None:
            tip, damaged = find_tip(self.store)
            self.skipped += damaged
            self.remaining = candidates(self.store, tip)
        for candidate in self.remaining:
            if candidate.manifest is not None:
                self.manifest = candidate.manifest
                digest = digest_text(candidate.data)
                return msgspec.json.encode(_Announcement(candidate.directory, candidate.name, digest, self.skipped))
            self.reject(candidate.directory, _Problem(candidate.problem))
        abandoned = first_manifest(self.store)
        if abandoned is not None and not self.skipped:
            self.skipped.append(f"{abandoned} and what is older belong to an abandoned history")
        if abandoned is not None:
            raise NoUsableCheckpoint(
                f"{self.place} holds checkpoints but none can be used: {_list(self.skipped)}. "
                f"To start over, give a new directory; {'nothing was changed' if not self.filled else _FILLED}"
            )
        return msgspec.json.encode(_Announcement())

    def reject(self, directory: str, problem: _Problem) -> None:
        """Pass a candidate over and remember why."""
        self.filled |= problem.filled
        self.skipped.append(f"{directory} cannot be used: {problem.text}")
        log.warning("%s", self.skipped[-1])


def restore_together(
    channel: Channel, store: LocalStore, state: State, deadline_s: float, read_deadline_s: float, strict: bool
) -> Recovered:
    """Restore the newest usable checkpoint on all ranks, or find that there is none.

    Collective over the control channel. The live state changes only after every rank found that the checkpoint fits;
    if a block is damaged on any rank, all go to the next candidate together.
    Raises StateMismatch, NoUsableCheckpoint, NewerFormat, DeadlineExceeded, PeerFailed, the same on every rank.
    """
    search = _Search(store, str(store.root))
    attempt = 0
    while True:
        phase = f"restore/{attempt}"
        found = msgspec.json.decode(channel.decide(f"{phase}/candidate", search.next, deadline_s), type=_Announcement)
        if not found.directory:
            return Recovered(None, "", (), ())
        read = partial(_read_announced, store, found, search.manifest)
        manifest = channel.agree(f"{phase}/manifest", read, deadline_s)
        problem = _try(channel, store, state, found.directory, manifest, phase, (deadline_s, read_deadline_s), strict)
        if isinstance(problem, Restoration):
            return Recovered(manifest, found.directory, tuple(found.skipped), tuple(problem.warnings))
        if channel.rank == 0:
            search.reject(found.directory, problem)
        attempt += 1


def _read_announced(store: LocalStore, found: _Announcement, known: Manifest | None) -> Manifest:
    """The manifest that rank 0 announced, as this rank sees it. Raises DirectoryProblem if it is another one.

    known  the same on rank 0, which has read it to announce it
    """
    if known is not None:
        return known
    path = f"{found.directory}/{found.name}"
    try:
        data = store.read(path, MOST_BYTES)
    except (OSError, ValueError, EOFError) as error:
        raise DirectoryProblem(
            f"{store.root}/{path}, which rank 0 reads, cannot be read by another rank: {error}"
        ) from error
    if digest_text(data) != found.digest:
        raise DirectoryProblem(f"ranks read different bytes of {store.root}/{path}: is it one directory for all?")
    return decode(data, path)


def _try(
    channel: Channel,
    store: LocalStore,
    state: State,
    directory: str,
    manifest: Manifest,
    phase: str,
    deadlines_s: tuple[float, float],
    strict: bool,
) -> Restoration | _Problem:
    """Restore one candidate on all ranks; the reason if it cannot be, or if its bytes are damaged for any of them."""
    rank = channel.rank
    divided = _divided_window(manifest, channel.world_size)
    if divided:
        return _Problem(divided)
    saved = saved_for(manifest, rank, channel.world_size)
    restoration = channel.agree(
        f"{phase}/fits",
        lambda: state.prepare(
            saved_tensors(saved.records, saved.own), saved.values, strict=strict, seed=_seed_of(manifest, rank)
        ),
        deadlines_s[0],
    )
    _refuse_leftovers(channel, phase, saved, restoration, deadlines_s[0], strict)
    if saved.borrowed:  # invariant 9
        restoration.warnings.append(
            f"the checkpoint has nothing of this rank's own; it takes rank 0's {count_and_name(saved.borrowed)}: "
            "seed a generator anew if ranks must not draw the same numbers"
        )
    faultpoints.reach("announced")
    mismatch: list[str] = []
    problem = _together(
        channel,
        f"{phase}/compared",
        lambda: mismatch.append(_compare_holders(store, directory, manifest, saved, restoration, rank)),
        deadlines_s[1],
    )
    if problem:
        return _Problem(problem)
    channel.agree(f"{phase}/holders", lambda: _settle_holders(mismatch[0], restoration, strict), deadlines_s[0])
    targets = {
        name: targets_of(target, restoration.spreads.get(name), rank) for name, target in restoration.targets.items()
    }
    before = {name: restoration.targets[name].detach().clone() for name in restoration.transient}
    problem = _together(
        channel,
        f"{phase}/read",
        lambda: read_tensors(store, directory, manifest, saved.records, targets),
        deadlines_s[1],
    )
    faultpoints.reach("read")
    if problem:
        with torch.no_grad():
            for name, value in before.items():
                restoration.targets[name].copy_(value)
        return _Problem(problem, filled=True)
    channel.agree(f"{phase}/filled", _guarded(restoration.finish), deadlines_s[1])
    faultpoints.reach("filled")
    return restoration


def _divided_window(manifest: Manifest, world_size: int) -> str:
    """Why partial gradients cannot be restored by another number of ranks; empty if they can, or there are none."""
    partial = any(name.startswith("gradients/") for own in manifest.rank_tensors for name in own)
    if world_size == manifest.world_size or not partial:
        return ""
    return (
        f"it was saved inside an accumulation window by {manifest.world_size} ranks, whose partial gradients "
        f"{world_size} ranks cannot take over"
    )


def _seed_of(manifest: Manifest, rank: int) -> int:
    """Where the random numbers of a rank begin that the checkpoint has none of; the same at every try."""
    return xxhash.xxh3_64_intdigest(f"{manifest.generation}/{manifest.step}/{manifest.micro_step}/{rank}".encode())


def _together(channel: Channel, phase: str, read: Callable[[], None], deadline_s: float) -> str:
    """Read on every rank; what is damaged for any of them, empty if nothing is."""
    own, mistake = "", None
    try:
        read()
    except DamagedCheckpoint as error:
        own = str(error)
    except UsageError as error:
        own, mistake = str(error), error
    answers = channel.exchange(phase, Message(error=own), deadline_s)
    if mistake is not None:
        raise mistake
    return _list(list(dict.fromkeys(answer.error for answer in answers if answer.error)))


class _Leftovers(msgspec.Struct):
    """What one rank does not restore of a checkpoint."""

    unexpected: list[str]
    untouched: list[str]
    """Tensors that it could have, by full name."""


def _refuse_leftovers(
    channel: Channel, phase: str, saved: Saved, restoration: Restoration, deadline_s: float, strict: bool
) -> None:
    """Raise StateMismatch for what the checkpoint has and no rank restores, or not all that hold a part of it.

    Pipeline stages restore a part each.
    """
    own = _Leftovers(sorted(set(restoration.unexpected)), sorted(saved.records.keys() - restoration.targets.keys()))
    answers = channel.exchange(f"{phase}/leftovers", Message(msgspec.json.encode(own)), deadline_s)
    told = [msgspec.json.decode(answer.payload, type=_Leftovers) for answer in answers]
    only_saved(restoration, sorted(set.intersection(*(set(each.unexpected) for each in told))), strict=strict)
    channel.agree(f"{phase}/everywhere", lambda: _refuse_gaps(told, restoration, strict), deadline_s)


def _refuse_gaps(told: list[_Leftovers], restoration: Restoration, strict: bool) -> None:
    """Raise StateMismatch if ranks that hold a part of what is restored here have not registered it; else warn."""
    gaps: dict[str, list[int]] = {}
    for rank, each in enumerate(told):
        for name in restoration.spreads.keys() & each.untouched:
            if rank in holding(restoration.spreads[name]):
                gaps.setdefault(name, []).append(rank)
    if gaps:
        name = min(gaps)
        more = f" (and {len(gaps) - 1} more)" if len(gaps) > 1 else ""
        ranks = spell(holding(restoration.spreads[name]).ranks)
        text = f"{name}{more} lies on ranks {ranks}, and is not registered on rank(s) {spell(gaps[name])}"
        if strict:
            raise StateMismatch(f"{text}; nothing was changed, register the same objects on all of them")
        restoration.warnings.append(f"not restored everywhere: {text}")


@torch.no_grad()
def _compare_holders(
    store: LocalStore, directory: str, manifest: Manifest, saved: Saved, restoration: Restoration, rank: int
) -> str:
    """Several ranks had a tensor as their own: name the first that is not the same for all of them. Touches nothing."""

    def held_in(name: str, record: TensorRecord) -> torch.Tensor:
        found = torch.empty_like(restoration.targets[name], device="cpu")
        places = targets_of(found, restoration.spreads.get(name), rank)
        read_tensors(store, directory, manifest, {name: record}, {name: places})
        return as_bytes(found)

    for name in sorted(set(saved.contested) & set(restoration.targets)):
        chosen = next(holder for holder, record in saved.contested[name] if record is saved.records[name])
        expected = held_in(name, saved.records[name])
        for holder, record in saved.contested[name]:
            if record is not saved.records[name] and not torch.equal(held_in(name, record), expected):
                ranks = spell([own for own, _ in saved.contested[name]])
                pair = f"ranks {min(holder, chosen)} and {max(holder, chosen)}"
                return f"{name} was each rank's own on ranks {ranks}, and {pair} did not have the same values"
    return ""


def _settle_holders(mismatch: str, restoration: Restoration, strict: bool) -> None:
    if mismatch and strict:
        raise StateMismatch(
            f"{mismatch}: which of them another layout shall have cannot be told. Restore with as many ranks as saved "
            "it, or with restore(strict=False): then each rank takes what it had, and a new one what the first had. "
            "Nothing was changed"
        )
    if mismatch:
        restoration.warnings.append(f"{mismatch}: each rank takes what it had, a new one what the first had")


def _guarded(finish: Callable[[], None]) -> Callable[[], None]:
    """A user's load_state_dict may raise anything; the other ranks must hear of it."""

    def run() -> None:
        try:
            finish()
        except UnbrokenError:
            raise
        except Exception as error:
            raise StateMismatch(f"loading the state raised {type(error).__name__}: {error}") from error

    return run


def _list(lines: list[str]) -> str:
    shown = "; ".join(lines[:4])
    return shown + (f"; and {len(lines) - 4} more" if len(lines) > 4 else "")
