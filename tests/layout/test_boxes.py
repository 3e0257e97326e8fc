from hypothesis import given
from hypothesis import strategies as st

from unbroken.layout.boxes import Box, intersect, name_of_part, whole

ranges = st.tuples(st.integers(0, 6), st.integers(0, 6)).map(sorted)


@st.composite
def pairs(draw):
    dims = draw(st.integers(0, 3))
    both = [[draw(ranges) for _ in range(dims)] for _ in range(2)]
    return tuple(Box(tuple(r[0] for r in one), tuple(r[1] for r in one)) for one in both)


def points(box: Box) -> set[tuple[int, ...]]:
    found: set[tuple[int, ...]] = {()}
    for begin, end in zip(box.begin, box.end, strict=True):
        found = {(*point, index) for point in found for index in range(begin, end)}
    return found


@given(pairs())
def test_the_intersection_holds_exactly_the_common_points(pair):
    one, other = pair
    shared = intersect(one, other)
    assert (points(shared) if shared else set()) == points(one) & points(other)


@given(pairs())
def test_numel_counts_the_points(pair):
    assert pair[0].numel == len(points(pair[0]))


def test_a_scalar_has_one_element_and_meets_itself():
    assert whole(()).numel == 1
    assert intersect(whole(()), whole(())) == whole(())


def test_a_whole_tensor_keeps_its_name_and_a_part_carries_its_box():
    assert name_of_part("model/w", whole((4, 3)), (4, 3)) == "model/w"
    assert name_of_part("model/w", Box((1, 0), (2, 3)), (4, 3)) == "model/w[1:2,0:3]"
