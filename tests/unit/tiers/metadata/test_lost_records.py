"""The rules by which records of the metadata topic count as lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tiers.metadata.topic.lost_records import LostRecords
from tiers.model.log_source import EpochEndOffset
from tiers.model.log_start import OffsetAndEpoch

OFFSETS = st.integers(0, 50)


def reached(*offsets: int) -> dict[int, OffsetAndEpoch]:
    return {number: OffsetAndEpoch(offset, 3) for number, offset in enumerate(offsets)}


@given(before=OFFSETS, position=OFFSETS, log_start=OFFSETS, end=OFFSETS)
def test_a_log_is_whole_when_it_begins_and_ends_around_what_was_read(
    before: int, position: int, log_start: int, end: int
) -> None:
    lost = LostRecords(reached(before, 0), {})
    is_whole = log_start <= position and max(before, position) <= end
    assert lost.check(0, position, log_start, end) is not is_whole
    assert (lost.reason is None) is is_whole
    assert not lost.check(1, 7, 0, 7)
    assert (lost.reason is None) is is_whole, "another partition's answer says nothing of this one"
    whole = max(before, position)
    assert not lost.check(0, whole, 0, whole, is_continued=False)
    assert (lost.reason is None) is is_whole, "nobody knows yet whether these are the same records"
    assert not lost.check(0, whole, 0, whole)
    assert lost.reason is None


def test_the_reason_names_the_partition_and_the_offsets() -> None:
    lost = LostRecords(reached(9, 0, 0, 5), {})
    assert lost.check(3, 2, 0, 4)
    assert lost.reason == "metadata partition 3 ends at 4 and was read to 5: the topic lost records"
    assert not lost.check(3, 5, 0, 5)
    assert lost.check(0, 2, 6, 9)
    assert lost.reason == "records 2 to 5 of metadata partition 0 were deleted unread"


@given(answered=st.builds(EpochEndOffset, st.integers(-1, 5), st.integers(-1, 60)), high_watermark=OFFSETS)
def test_a_log_continues_if_its_epoch_reaches_the_read_position(answered: EpochEndOffset, high_watermark: int) -> None:
    read, lost = OffsetAndEpoch(40, 3), LostRecords(reached(0), {})
    continues = 0 <= answered.leader_epoch <= 3 and answered.end_offset >= 40
    assert lost.check_lineage(0, read, answered, high_watermark) is not continues
    assert (lost.reason is None) is continues
    has_grown = not continues and high_watermark > (answered.end_offset if 0 <= answered.leader_epoch <= 3 else 39)
    if answered.leader_epoch in (-1, 3) or answered.end_offset < 40:
        assert bool(lost.diverged) is has_grown or answered.leader_epoch in (4, 5)
    # A partition that only ends early may get its records back. A diverged one never does.
    was_diverged = dict(lost.diverged)
    assert lost.check_lineage(0, read, EpochEndOffset(3, 40), 40) is bool(was_diverged)
    assert lost.check(0, 40, 0, 40) is bool(was_diverged)
    assert lost.diverged == was_diverged
    assert (lost.reason is None) is not bool(was_diverged)


def test_a_divergence_names_the_loss_and_the_remedy() -> None:
    lost = LostRecords(reached(0, 57), {})
    assert lost.check_lineage(1, OffsetAndEpoch(57, 3), EpochEndOffset(3, 34), 34)
    assert lost.reason == "metadata partition 1 ends at 34 and was read to 57: the topic lost records"
    assert lost.check_lineage(1, OffsetAndEpoch(57, 3), EpochEndOffset(3, 34), 35)
    assert lost.reason == lost.diverged[1]
    for part in ("metadata partition 1 was read to 57 in leader epoch 3", "from 34 on", "docs/operations.md"):
        assert part in lost.diverged[1]
    again = LostRecords(reached(0, 57), lost.diverged)
    assert again.check(1, 57, 0, 57)
    assert again.reason == lost.reason
    assert not again.check(0, 0, 0, 0)
