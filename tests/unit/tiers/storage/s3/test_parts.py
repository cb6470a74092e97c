"""The parts of a large object."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tiers.storage.s3.upload import MAX_PARTS, parts_of


@given(size_bytes=st.integers(1, 1 << 44), least_bytes=st.integers(1 << 20, 1 << 30))
def test_all_parts_have_one_size_and_the_last_may_have_less(size_bytes: int, least_bytes: int) -> None:
    parts = parts_of(size_bytes, least_bytes)
    sizes = [size for _, size in parts]
    assert [start for start, _ in parts] == [number * sizes[0] for number in range(len(parts))]
    assert (len(set(sizes[:-1])) <= 1, sizes[-1] <= sizes[0], sum(sizes)) == (True, True, size_bytes)
    assert len(parts) <= MAX_PARTS
    assert len(parts) == 1 or sizes[0] >= least_bytes


def test_an_object_of_up_to_two_parts_is_one() -> None:
    assert parts_of(0, 8) == [(0, 0)]
    assert parts_of(16, 8) == [(0, 16)]
    assert parts_of(17, 8) == [(0, 9), (9, 8)]
