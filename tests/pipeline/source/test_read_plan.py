"""The ranges of a plan together are the requested offsets. Packing and splitting lose and repeat none."""

from __future__ import annotations

import pickle
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import replace
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from pipeline.source.read_plan import (
    SMALLEST_TASK_BYTES,
    LocalRange,
    LogView,
    MissingOffsets,
    ReadRange,
    RemoteRange,
    count_of,
    cover,
    split,
    tasks_of,
)
from pipeline.source.read_task import ReadTask
from tests.support.fakes.segments import PARTITION
from tests.support.fakes.stored_segments import remote_range, stored
from tiers.model.ids import RemoteLogSegmentId
from tiers.model.log_start import LogGap
from tiers.model.segment_metadata import LeaderEpochEntry, RemoteLogSegmentMetadata, RemoteLogSegmentState
from tiers.model.stored_segment import StoredSegment

Segments = list[RemoteLogSegmentMetadata]


def segments_at(*spans: tuple[int, int], size_bytes: int = 1000) -> Segments:
    return [
        RemoteLogSegmentMetadata(
            RemoteLogSegmentId(PARTITION, UUID(int=first)),
            first,
            last,
            broker_id=1,
            max_timestamp_ms=0,
            event_timestamp_ms=0,
            segment_leader_epochs=(LeaderEpochEntry(0, first),),
            segment_size_bytes=size_bytes,
            state=RemoteLogSegmentState.COPY_SEGMENT_FINISHED,
        )
        for first, last in spans
    ]


def answering(segments: Segments) -> Callable[[int], Iterator[StoredSegment]]:
    return lambda offset: map(stored, segments[bisect_left(segments, offset, key=_valid_end) :])


def _valid_end(segment: RemoteLogSegmentMetadata) -> int:
    return segment.valid_end_offset


def covered(segments: Segments, log_start: int, local_start: int, first: int, end: int) -> list[tuple[str, int, int]]:
    view = LogView(PARTITION, log_start, local_start, answering(segments))
    return [(type(one).__name__, one.first_offset, one.end_offset) for one in cover(view, first, end)]


def test_the_remote_tier_is_read_up_to_its_end_and_the_broker_from_there() -> None:
    tier = segments_at((0, 99), (100, 199))
    assert covered(tier, 0, 50, 0, 299) == [
        ("RemoteRange", 0, 99),
        ("RemoteRange", 100, 199),
        ("LocalRange", 200, 299),
    ]
    assert covered(tier, 0, 50, 150, 160) == [("RemoteRange", 150, 160)]
    assert covered(tier, 0, 50, 250, 260) == [("LocalRange", 250, 260)]
    assert covered([], 7, 7, 7, 9) == [("LocalRange", 7, 9)]
    assert covered(tier, 0, 50, 10, 9) == []
    [cut, _] = segments_at((0, 99), (100, 199))
    assert covered([replace(cut, cut_at=50)], 0, 50, 0, 99) == [("RemoteRange", 0, 49), ("LocalRange", 50, 99)]
    behind_a_hole = segments_at((100, 199), (300, 399))
    assert covered(behind_a_hole, 100, 250, 0, 450) == [
        ("MissingOffsets", 0, 99),
        ("RemoteRange", 100, 199),
        ("MissingOffsets", 200, 249),
        ("LocalRange", 250, 299),
        ("RemoteRange", 300, 399),
        ("LocalRange", 400, 450),
    ]


spans = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), max_size=8)


@given(spans, st.integers(0, 60), st.integers(0, 300), st.integers(0, 100), st.integers(0, 300))
def test_every_offset_is_in_exactly_one_piece(
    shapes: list[tuple[int, int]], log_start: int, local_start: int, first: int, count: int
) -> None:
    segments: Segments = []
    position = 0
    for gap, length in shapes:
        position += gap
        segments += segments_at((position, position + length - 1))
        position += length
    view = LogView(PARTITION, log_start, local_start, answering(segments))
    pieces = list(cover(view, first, first + count - 1))
    offsets = [offset for one in pieces for offset in range(one.first_offset, one.end_offset + 1)]
    assert offsets == list(range(first, first + count))
    for one in pieces:
        if isinstance(one, RemoteRange):
            assert one.segment.start_offset <= one.first_offset
            assert one.end_offset <= one.segment.valid_end_offset
        elif isinstance(one, LocalRange):
            assert one.first_offset >= local_start
        if not isinstance(one, MissingOffsets):
            assert one.first_offset >= log_start


@given(
    st.lists(st.tuples(st.integers(1, 500), st.integers(0, 10_000)), min_size=1, max_size=10),
    st.integers(1, 5_000),
    st.none() | st.integers(1, 30),
    st.none() | st.integers(1, 50),
)
def test_tasks_are_the_ranges_cut_and_packed(
    shapes: list[tuple[int, int]], split_bytes: int, min_partitions: int | None, max_records: int | None
) -> None:
    ranges: list[ReadRange] = []
    position = 0
    for count, size_bytes in shapes:
        [segment] = segments_at((position, position + count - 1), size_bytes=size_bytes)
        ranges.append(remote_range(segment, position, position + count - 1))
        position += count
    tasks = tasks_of(ranges, split_bytes, min_partitions, max_records)
    pieces = [piece for task in tasks for piece in task]
    assert [offset for one in pieces for offset in range(one.first_offset, one.end_offset + 1)] == list(range(position))
    assert all(tasks)
    if max_records is not None:
        assert all(sum(map(count_of, task)) <= max_records for task in tasks)
    if min_partitions is not None:
        assert len(tasks) >= min(min_partitions, position)
    for task in tasks:
        assert len(task) == 1 or sum(one.size_bytes for one in task) <= split_bytes


def test_large_segments_are_cut_and_small_ones_packed() -> None:
    [large] = segments_at((0, 999), size_bytes=1000)
    pieces = list(split(remote_range(large, 0, 999), 250))
    assert [(one.first_offset, one.end_offset) for one in pieces] == [(0, 249), (250, 499), (500, 749), (750, 999)]
    small = [LocalRange(PARTITION, first, first + 9, record_bytes=10) for first in range(0, 100, 10)]
    assert [len(task) for task in tasks_of(small, 350)] == [3, 3, 3, 1]


@given(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 2**63 - 1)), min_size=1, max_size=4))
def test_a_range_travels_whole(epochs: list[tuple[int, int]]) -> None:
    [segment] = segments_at((10, 99))
    for one in (
        replace(segment, segment_leader_epochs=tuple(LeaderEpochEntry(*each) for each in epochs), custom_metadata=b"x"),
        replace(segment, cut_at=40, txn_index_empty=True),
    ):
        planned = remote_range(one, 20, 30)
        assert planned.segment == one
        task = ReadTask("cluster", (planned, LocalRange(PARTITION, 31, 40, 7.5), planned))
        travelled = pickle.loads(pickle.dumps(task))
        assert (travelled.cluster_id, travelled.ranges) == (task.cluster_id, task.ranges)
        assert travelled.ranges[0].segment == one
        assert [each.partition.topic for each in travelled.ranges] == [PARTITION.topic] * 3
        assert planned.max_timestamp_ms == one.max_timestamp_ms


def test_no_plan_has_more_tasks_than_spark_can_run() -> None:
    [segment] = segments_at((0, 9_999), size_bytes=10_000)
    ranges = [remote_range(segment, first, first + 9) for first in range(0, 10_000, 10)]
    assert len(tasks_of(ranges, 20)) == 500
    assert len(tasks_of(ranges, 20, max_tasks=100)) == 100
    assert len(tasks_of(ranges, 1000, max_tasks=100)) == 10


@given(st.integers(0, 80), st.integers(0, 40), st.lists(st.integers(10, 60), max_size=6, unique=True))
def test_a_plan_passes_over_recorded_gaps_and_over_nothing_else(first: int, count: int, edges: list[int]) -> None:
    """The remote tier has 0 to 9, the broker has 60 and above."""
    edges.sort()
    gaps = [LogGap(*pair) for pair in zip(edges[::2], edges[1::2], strict=False)]
    view = LogView(PARTITION, 0, 60, answering(segments_at((0, 9))), gaps)
    missing = {
        offset
        for piece in cover(view, first, first + count)
        if isinstance(piece, MissingOffsets)
        for offset in range(piece.first_offset, piece.end_offset + 1)
    }
    asked = range(first, first + count + 1)
    assert missing == {at for at in asked if 10 <= at < 60 and not any(gap.holds(at) for gap in gaps)}


def test_a_small_read_has_a_task_for_each_core() -> None:
    mib = 1 << 20
    whole = LocalRange(PARTITION, 0, 63_999, record_bytes=mib / 1000)
    assert len(tasks_of([whole], 64 * mib)) == 1
    assert len(tasks_of([whole], 64 * mib, parallelism=8)) == 8
    assert len(tasks_of([whole], 4 * mib, parallelism=8)) == 16
    small = LocalRange(PARTITION, 0, 7_999, record_bytes=mib / 1000)
    assert len(tasks_of([small], 64 * mib, parallelism=100)) == 8 * mib // SMALLEST_TASK_BYTES
