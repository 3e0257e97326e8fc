"""From any layout to any other, for any shape and dtype: what is read equals what was whole before it was spread.

Ranks are threads here, and shards are cut by hand; `test_against_dcp` does the same with real DTensors.
"""

import math
import tempfile
import threading
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ranks import clusters, on_all
from unbroken import planning
from unbroken.candidates import candidates, saved_for
from unbroken.commit import SaveId
from unbroken.layout.boxes import intersect, whole
from unbroken.layout.spread import Cuts, Mesh, Stretch
from unbroken.policy import Settings
from unbroken.reading import read_tensors, targets_of
from unbroken.session import Session
from unbroken.state.captured import Captured, LiveTensor
from unbroken.store.local import LocalStore

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.bool,
    torch.uint8,
    torch.int64,
    torch.complex64,
]
shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
worlds = st.sampled_from([1, 2, 3, 4, 6])


@st.composite
def meshes(draw, world):
    """All ranks in some order and shape."""
    lengths, rest = [], world
    while rest > 1 and draw(st.booleans()):
        length = draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0]))
        lengths.append(length)
        rest //= length
    return Mesh((*lengths, rest), tuple(draw(st.permutations(range(world)))))


@st.composite
def spreads(draw, shape, world):
    """Replicas, cuts of several dimensions in any order, or a stretch of a line."""
    mesh = draw(meshes(world))
    if draw(st.integers(0, 3)) == 0:
        begin, cutting = draw(st.integers(0, 5)), draw(st.sampled_from([None, *range(len(mesh.shape))]))
        parts = 1 if cutting is None else mesh.shape[cutting]
        return Stretch(shape, mesh, cutting, begin, -(-(begin + math.prod(shape)) // parts))
    dimensions = draw(st.lists(st.sampled_from(range(len(mesh.shape))), unique=True)) if shape else []
    return Cuts(shape, mesh, tuple((at, draw(st.integers(0, len(shape) - 1))) for at in dimensions))


@st.composite
def plans(draw):
    """Tensors, how they are saved by some ranks, and how they are restored by others."""
    before, after = draw(worlds), draw(worlds)
    tensors = []
    for index in range(draw(st.integers(1, 4))):
        shape = draw(shapes)
        spread = (draw(spreads(shape, before)), draw(spreads(shape, after)))
        tensors.append((f"model/t{index}", draw(st.sampled_from(DTYPES)), *spread))
    return before, after, tensors, draw(st.sampled_from([1, planning.MOST_PIECES]))


def make(name, dtype, shape):
    """A whole tensor of arbitrary bits."""
    generator = torch.Generator().manual_seed(len(shape) + 7 * math.prod(shape) + int(name[-1]))
    count = math.prod(shape) * dtype.itemsize
    bits = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).view(shape)


def held(tensor, spread, rank):
    """What a rank has of it."""
    if isinstance(spread, Stretch):
        return tensor.flatten()[slice(*spread.range_of(rank))].clone()
    (box,) = spread.boxes_of(rank)
    return tensor[box.slices(whole(spread.shape))].clone()


def save(root, world, tensors):
    """One checkpoint, written by `world` threads."""
    ranks = [
        Session(c, c.channel("t", threading.Event()), LocalStore(root), Settings(None, 20, 20), {}, threading.Event())
        for c in clusters(world)
    ]

    def act(session):
        session.begin(None, 0)
        captured = Captured()
        for name, dtype, spread, _ in tensors:
            captured.tensors[name] = LiveTensor(
                held(make(name, dtype, spread.shape), spread, session.cluster.rank), spread
            )
        session.save(SaveId(1, 0, 0), captured)
        assert session.wait()
        outcome = session.outcomes.popleft()
        session.close(abandon=False)
        return outcome.reason

    results = on_all(ranks, act)
    assert results == [""] * world, results


@settings(max_examples=100)
@given(plans())
def test_any_layout_restores_into_any_other(plan):
    before, after, tensors, most_pieces = plan
    original, planning.MOST_PIECES = planning.MOST_PIECES, most_pieces
    try:
        with tempfile.TemporaryDirectory() as directory:
            root = Path(directory) / "run"
            root.mkdir()
            save(root, before, tensors)
            restore(LocalStore(root), after, tensors)
    finally:
        planning.MOST_PIECES = original


def restore(store, world, tensors):
    """Each rank reads its part of every tensor."""
    (found,) = candidates(store, None)
    assert found.manifest is not None, found.problem
    for rank in range(world):
        saved = saved_for(found.manifest, rank, world)
        parts = {name: held(make(name, dtype, spread.shape), spread, rank) for name, dtype, _, spread in tensors}
        read = {name: torch.zeros(part.shape, dtype=part.dtype) for name, part in parts.items()}
        targets = {name: targets_of(read[name], spread, rank) for name, _, _, spread in tensors}
        read_tensors(store, found.directory, found.manifest, saved.records, targets)
        for name, part in parts.items():
            assert torch.equal(bits(read[name]), bits(part)), name


def bits(tensor):
    return tensor.contiguous().flatten().view(torch.uint8)


@given(st.data(), shapes, worlds)
def test_the_parts_of_all_ranks_cover_a_tensor_and_those_of_other_holders_do_not_overlap(data, shape, world):
    spread = data.draw(spreads(shape, world))
    parts = {spread.holders_of(rank): spread.boxes_of(rank) for rank in range(world)}
    boxes = [box for part in parts.values() for box in part]
    assert sum(box.numel for box in boxes) == math.prod(shape) or math.prod(shape) == 0
    for index, box in enumerate(boxes):
        assert all(intersect(box, other) is None for other in boxes[index + 1 :])
    assert sorted(rank for holders in parts for rank in holders) == list(range(world))
