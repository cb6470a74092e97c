"""What counts as lost: nothing that was read, or may still be read, is missing from a whole log."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tiers.metadata.lost_records import LostRecords

OFFSETS = st.integers(0, 50)


@given(reached=OFFSETS, position=OFFSETS, log_start=OFFSETS, end=OFFSETS)
def test_a_log_is_whole_when_it_begins_and_ends_around_what_was_read(
    reached: int, position: int, log_start: int, end: int
) -> None:
    lost = LostRecords({0: reached, 1: 0})
    is_whole = log_start <= position and max(reached, position) <= end
    assert lost.check(0, position, log_start, end) is not is_whole
    assert (lost.reason is None) is is_whole
    assert not lost.check(1, 7, 0, 7)
    assert (lost.reason is None) is is_whole, "another partition's answer says nothing of this one"
    assert not lost.check(0, max(reached, position), 0, max(reached, position))
    assert lost.reason is None


def test_the_reason_names_the_partition_and_the_offsets() -> None:
    lost = LostRecords({0: 9, 3: 5})
    assert lost.check(3, 2, 0, 4)
    assert lost.reason == "metadata partition 3 ends at 4 and was read to 5: the topic lost records"
    assert not lost.check(3, 5, 0, 5)
    assert lost.check(0, 2, 6, 9)
    assert lost.reason == "records 2 to 5 of metadata partition 0 were deleted unread"
