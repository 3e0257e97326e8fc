"""What planning, manifest and restore plan cost as ranks and tensors grow; simulated on one core, without sending.

A model of T tensors (a quarter each of weights, two moments, step counters) is cut by a mesh over R ranks. What one
rank does is measured as it is; the coordinator gets the encoded votes of all R ranks. The restore plan is that of a
rank in a job of 3/4 R ranks, with the real headers of the files that it needs.

    python benchmarks/planning.py                      # the table of docs/scaling.md
    python benchmarks/planning.py --ranks 1024 --tensors 1000 --mesh 2d
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import torch

from unbroken.candidates import saved_for
from unbroken.commit import Coordinator, SaveId
from unbroken.generations import Generation
from unbroken.image.digest import block_bytes_for, digest_blocks
from unbroken.image.image import Arena
from unbroken.layout.boxes import intersect, whole
from unbroken.layout.ownership import Extent, share_out
from unbroken.layout.spread import Cuts, Mesh, line, overlapping
from unbroken.manifest import FileRecord, Manifest, PieceRecord, TensorRecord, box_of, decode, encode
from unbroken.pieces import Pieces
from unbroken.planning import MOST_PIECES, Plan, plan_snapshot, structure_of
from unbroken.state.captured import Captured, LiveTensor
from unbroken.store.local import LocalStore
from unbroken.votes import Listing, Vote

ROWS, COLUMNS = 65536, 16
STEP = SaveId(1000, 0, 0)


def mesh_of(kind: str, ranks: int) -> Mesh:
    """`1d`: FSDP2; `2d`: FSDP2 over tensor parallel of 8; `hsdp`: 8 replicas of shards."""
    everyone = tuple(range(ranks))
    shapes = {"1d": (ranks,), "2d": (ranks // 8, 8), "hsdp": (8, ranks // 8)}
    return Mesh(shapes[kind], everyone)


def order_of(kind: str) -> tuple[tuple[int, int], ...]:
    """Which mesh dimension cuts which tensor dimension."""
    return {"1d": ((0, 0),), "2d": ((1, 1), (0, 0)), "hsdp": ((1, 0),)}[kind]


def state_of(rank: int, ranks: int, tensors: int, kind: str) -> Captured:
    """What a rank holds, by shape only."""
    mesh, order = mesh_of(kind, ranks), order_of(kind)
    cuts = Cuts((ROWS, COLUMNS), mesh, order)
    shard = torch.empty(cuts.boxes_of(rank)[0].shape, device="meta")
    counter = torch.empty((), device="meta")
    captured = Captured()
    names = [f"model/layers.{index}.weight" for index in range(tensors // 4)]
    for name in names:
        captured.tensors[name] = LiveTensor(shard, Cuts((ROWS, COLUMNS), mesh, order))
        for moment in ("exp_avg", "exp_avg_sq"):
            captured.tensors[f"optimizer/state/{name}/{moment}"] = LiveTensor(shard, Cuts((ROWS, COLUMNS), mesh, order))
        captured.tensors[f"optimizer/state/{name}/step"] = LiveTensor(counter, Cuts((), mesh))
    captured.tensors["rng/torch"] = LiveTensor(torch.empty(5056, dtype=torch.uint8, device="meta"))
    captured.values["optimizer"] = {
        "kind": "optimizer",
        "groups": [{"params": names}],
        "state": {name: {} for name in names},
    }
    return captured


def vote_of(plan: Plan, rank: int, values: dict[str, bytes]) -> bytes:
    """What a rank sends to the coordinator."""
    size = plan.layout.size
    blocks = "0" * 16 * -(-size // block_bytes_for(size))
    vote = Vote(
        files=[FileRecord(STEP.file_name(1, rank), size, block_bytes_for(size), blocks)],
        listing=Listing(plan.shared, plan.cut[0], plan.cut[1], plan.own),
        listed="0" * 32,
        values={name: msgspec.Raw(value) for name, value in values.items()} if rank == 0 else {},
        as_rank_0=list(values) if rank else [],
        plan="0" * 32,
        replicas={f"0-{rank}": "0" * 32},
        seconds=1.0,
    )
    return msgspec.json.encode(vote)


def timed(work):
    """(result, seconds)."""
    began = time.perf_counter()
    result = work()
    return result, time.perf_counter() - began


def votes_of_all(ranks: int, tensors: int, kind: str, values: dict[str, bytes]) -> list[bytes]:
    """Votes of all ranks. With thousands of them only those that describe cut tensors are planned for real, the others
    are made after one of them: their pieces of counters lie where the line of all counters is cut."""
    if ranks <= MOST_PIECES:
        return [vote_of(plan_snapshot(state_of(r, ranks, tensors, kind), r, ranks), r, values) for r in range(ranks)]
    counters = [f"optimizer/state/model/layers.{index}.weight/step" for index in range(tensors // 4)]
    shares = share_out([Extent(name, whole(()), 4) for name in sorted(counters)], ranks)
    describe = {0, *range(0, ranks, ranks // 8)} if kind == "hsdp" else {0}
    model = msgspec.json.decode(
        vote_of(plan_snapshot(state_of(1, ranks, tensors, kind), 1, ranks), 1, values), type=Vote
    )
    votes = []
    for rank in range(ranks):
        if rank in describe:
            votes.append(vote_of(plan_snapshot(state_of(rank, ranks, tensors, kind), rank, ranks), rank, values))
            continue
        (file,) = model.files
        model.files = [FileRecord(STEP.file_name(1, rank), file.size, file.block_bytes, file.blocks)]
        shared = {share.name: TensorRecord("float32", [], [PieceRecord(0, 4096, 4100)]) for share in shares[rank]}
        assert model.listing is not None
        model.listing = msgspec.structs.replace(model.listing, shared=shared)
        votes.append(msgspec.json.encode(model))
    return votes


def commit(votes: list[bytes], ranks: int) -> tuple[Manifest, bytes]:
    """What the coordinator computes between the last vote and the manifest's bytes."""

    class Channel:
        world_size = ranks

    generation = Generation(1, [], ranks, "", host="", pid=0)
    coordinator = Coordinator(Channel(), None, generation, None, {}, 60.0, 60.0)  # type: ignore[arg-type]
    decoded = [msgspec.json.decode(vote, type=Vote) for vote in votes]
    data = coordinator._manifest(STEP, decoded)
    return decode(data, "manifest.json"), data


def restore_plan(store: LocalStore, directory: str, data: bytes, rank: int, ranks: int, kind: str):
    """Which bytes of which files a rank of another job reads."""
    manifest = decode(data, "manifest.json")
    saved = saved_for(manifest, rank, ranks)
    pieces = Pieces(store, directory, manifest)
    mesh, order = mesh_of(kind, ranks), order_of(kind)
    found = []
    for name, record in saved.records.items():
        if name.startswith("rng/"):
            continue
        box = Cuts(tuple(record.shape), mesh, order if record.shape else ()).boxes_of(rank)[0]
        for piece in pieces.overlapping(name, record, box):
            if intersect(box_of(piece, tuple(record.shape)), box) is not None:
                found.append(piece)
    return found


def write_needed(root: Path, ranks: int, tensors: int, kind: str, needed: list[int], manifest: Manifest) -> None:
    """The real headers of some ranks' files, at their real sizes, with the manifest's digests made to fit."""
    directory = root / f"step-{STEP.step}"
    directory.mkdir()
    for rank in needed:
        plan = plan_snapshot(state_of(rank, ranks, tensors, kind), rank, ranks)
        arena = Arena()
        arena.take_shape(plan.layout)
        content = arena.content()
        (directory / STEP.file_name(1, rank)).write_bytes(content)
        blocks = "".join(digest_blocks(content, block_bytes_for(len(content))))
        manifest.rank_tensors[rank].clear()
        manifest.files[rank] = FileRecord(STEP.file_name(1, rank), len(content), block_bytes_for(len(content)), blocks)


def measure(ranks: int, tensors: int, kind: str) -> dict[str, float | int | str]:
    """One row of the table."""
    line.cache_clear()
    state = state_of(ranks // 2, ranks, tensors, kind)
    _, structure_s = timed(lambda: structure_of(state))
    plan, plan_s = timed(lambda: plan_snapshot(state, ranks // 2, ranks))
    values = {name: msgspec.json.encode(value) for name, value in state.values.items()}
    votes = votes_of_all(ranks, tensors, kind, values)
    (manifest, data), commit_s = timed(lambda: commit(votes, ranks))
    new_ranks = ranks * 3 // 4 if kind == "1d" else ranks // 2
    rank = new_ranks // 2
    with tempfile.TemporaryDirectory() as root:
        box = Cuts((ROWS, COLUMNS), mesh_of(kind, new_ranks), order_of(kind)).boxes_of(rank)[0]
        holders = {first for _, first in overlapping(Cuts((ROWS, COLUMNS), mesh_of(kind, ranks), order_of(kind)), box)}
        replicas = range(0, ranks, ranks // 8) if kind == "hsdp" else (0,)
        needed = {replica + holder for replica in replicas for holder in holders} | {0}
        if ranks <= MOST_PIECES:
            needed = set(range(ranks))
        write_needed(Path(root), ranks, tensors, kind, sorted(needed), manifest)
        data = encode(manifest)
        store = LocalStore(Path(root))
        found, restore_s = timed(lambda: restore_plan(store, f"step-{STEP.step}", data, rank, new_ranks, kind))
    return {
        "mesh": kind,
        "ranks": ranks,
        "tensors": tensors,
        "structure_s": structure_s,
        "plan_s": plan_s,
        "vote_bytes": len(vote_of(plan, ranks // 2, values)),
        "commit_s": commit_s,
        "manifest_bytes": len(data),
        "restore_plan_s": restore_s,
        "pieces_read": len(found),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> None:
    """Print the table, or JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[64, 1024, 4096, 16384])
    parser.add_argument("--tensors", type=int, nargs="*", default=[1000])
    parser.add_argument("--mesh", choices=["1d", "2d", "hsdp"], default="1d")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("mesh   ranks  tensors  plan s  restore plan s  vote kB  commit s  manifest MB  peak MB", file=sys.stderr)
    for tensors in arguments.tensors:
        for ranks in arguments.ranks:
            row = measure(ranks, tensors, arguments.mesh)
            if arguments.json:
                print(json.dumps(row), flush=True)
                continue
            print(
                f"{row['mesh']:5} {ranks:6} {tensors:8} {row['structure_s'] + row['plan_s']:7.3f} "
                f"{row['restore_plan_s']:15.3f} {row['vote_bytes'] / 1e3:8.1f} {row['commit_s']:9.2f} "
                f"{row['manifest_bytes'] / 1e6:12.2f} {row['peak_bytes'] / 1e6:8.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
