import math

from hypothesis import given
from hypothesis import strategies as st

from unbroken.layout.boxes import intersect, whole
from unbroken.layout.ownership import SPLIT_BYTES, Extent, share_out

shapes = st.lists(st.integers(0, 2000), max_size=3).map(tuple).filter(lambda shape: math.prod(shape) <= 4_000_000)


@st.composite
def extents(draw):
    count = draw(st.integers(0, 6))
    return [Extent(f"t{i}", whole(draw(shapes)), draw(st.sampled_from([1, 2, 4, 8]))) for i in range(count)]


@given(extents(), st.integers(1, 9))
def test_every_element_has_exactly_one_writer(tensors, writers):
    shares = [share for rank in share_out(tensors, writers) for share in rank]
    for extent in tensors:
        boxes = [share.box for share in shares if share.name == extent.name]
        assert sum(box.numel for box in boxes) == extent.box.numel
        assert boxes, "an empty tensor has a writer too, or it would be missing from the checkpoint"
        for index, box in enumerate(boxes):
            assert all(intersect(box, other) is None for other in boxes[index + 1 :])


@given(extents(), st.integers(1, 9))
def test_shares_are_even_up_to_one_small_tensor_or_row(tensors, writers):
    sizes = {extent.name: extent for extent in tensors}
    total = sum(extent.nbytes for extent in tensors)
    row = max((e.nbytes // e.box.shape[0] for e in tensors if e.box.shape and e.box.shape[0]), default=0)
    for rank in share_out(tensors, writers):
        written = sum(share.box.numel * sizes[share.name].itemsize for share in rank)
        assert abs(written - total / writers) <= max(2 * SPLIT_BYTES, 2 * row) + SPLIT_BYTES


def test_a_large_matrix_is_cut_between_rows():
    shares = share_out([Extent("w", whole((1000, 1024)), 4)], 4)
    assert [[share.box.begin[0], share.box.end[0]] for rank in shares for share in rank] == [
        [0, 250],
        [250, 500],
        [500, 750],
        [750, 1000],
    ]
