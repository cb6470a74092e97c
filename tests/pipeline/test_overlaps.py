"""Overlaps are the offsets that two segments have. Offsets above a CUT are none."""

from __future__ import annotations

from dataclasses import replace
from uuid import uuid4

from hypothesis import given
from hypothesis import strategies as st

from pipeline.maintenance.scrub import overlaps
from tests.support.fakes.segments import PARTITION
from tests.support.fakes.stored_segments import stored
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.storage.object_key import SegmentObjectKey, segment_of_key


def segment(start: int, end: int, cut_at: int | None = None) -> RemoteLogSegmentMetadata:
    key = SegmentObjectKey("c", PARTITION.topic_id, PARTITION.partition, start, end, uuid4(), ".log")
    return replace(segment_of_key(key, None), cut_at=cut_at)


SEGMENTS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 15), st.none() | st.integers(0, 50)), max_size=8)


@given(made=SEGMENTS, log_start=st.integers(0, 30))
def test_they_are_what_more_than_one_segment_holds(made: list[tuple[int, int, int | None]], log_start: int) -> None:
    segments = [
        segment(start, start + length, None if valid_end is None or valid_end >= start + length else valid_end)
        for start, length, valid_end in made
    ]
    held = [offset for each in segments for offset in range(each.start_offset, each.valid_end_offset + 1)]
    several = {offset for offset in held if offset >= log_start and held.count(offset) > 1}
    in_order = map(stored, sorted(segments, key=lambda each: each.start_offset))
    found = list(overlaps(in_order, log_start))
    common = [
        range(each.first_offset, min(each.one.valid_end_offset, each.other.valid_end_offset) + 1) for each in found
    ]
    assert {offset for each in common for offset in each} == several
    assert all(one.one.segment_id != one.other.segment_id for one in found)
