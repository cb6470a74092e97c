"""The line of a partition: the bytes of its log by tier, its ends, and its copy backlog."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from uuid import UUID, uuid4

from proxy.admin.facts import TierBytes
from proxy.admin.lines import (
    PartitionKnowledge,
    SegmentSums,
    SegmentWalk,
    Spans,
    partition_line,
    segment_facts,
    topic_line,
)
from tests.support.fakes.stored_segments import stored
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.log_source import LocalLogBounds
from tiers.model.segment_metadata import LeaderEpochEntry, RemoteLogSegmentMetadata, RemoteLogSegmentState
from tiers.model.stored_segment import StoredSegment
from tiers.tasks.partition_tasks import PartitionReport

PARTITION = TopicIdPartition(UUID(int=7), 2, "orders")
FINISHED = RemoteLogSegmentState.COPY_SEGMENT_FINISHED


def segment(
    start: int, end: int, state: RemoteLogSegmentState = FINISHED, cut_at: int | None = None, size: int = 1000
) -> StoredSegment:
    """Returns the segment of the offsets [start, end)."""
    return stored(
        RemoteLogSegmentMetadata(
            segment_id=RemoteLogSegmentId(PARTITION, uuid4()),
            start_offset=start,
            end_offset=end - 1,
            broker_id=1,
            max_timestamp_ms=end * 10,
            event_timestamp_ms=end * 10 + 5,
            segment_leader_epochs=(LeaderEpochEntry(3, start),),
            segment_size_bytes=size,
            state=state,
            cut_at=cut_at,
        )
    )


def known(remote_start: int | None = 0, remote_end: int | None = 299) -> PartitionKnowledge:
    return PartitionKnowledge(PARTITION, remote_start, remote_start, remote_end, trimmed_to=100, gaps=0)


def sums_of(segments: Iterable[StoredSegment], tail_from: int) -> SegmentSums:
    walk = SegmentWalk(tail_from)
    for each in segments:
        walk.add(each)
    return walk.result()


THREE = [segment(0, 100), segment(100, 200), segment(200, 300)]


def test_a_log_is_divided_at_the_local_start_and_at_the_remote_end() -> None:
    bounds = LocalLogBounds(150, 400, 420, leader_epoch=5)
    line = partition_line(known(), sums_of(THREE, 150), bounds, None, leader=1)
    assert line.bytes == TierBytes(remote_only=1500, both=1500, local_only=1200)
    assert (line.backlog_offsets, line.backlog_bytes) == (100, 1000)
    assert (line.oldest_ms, line.newest_remote_ms) == (1000, 3000)
    assert (line.local_start, line.last_stable_offset, line.high_watermark, line.leader_epoch) == (150, 400, 420, 5)


def test_a_look_after_a_trim_needs_no_new_walk() -> None:
    sums = sums_of(THREE, 50)
    line = partition_line(known(), sums, LocalLogBounds(250, 300, 300, 5), None, leader=1)
    assert line.bytes == TierBytes(2500, 500, 0)


def test_a_silent_leader_leaves_the_last_trim_as_the_local_start() -> None:
    line = partition_line(known(), sums_of(THREE, 100), None, None, None, trouble="connection refused")
    assert line.bytes == TierBytes(1000, 2000, 0)
    assert line.trouble == "connection refused"
    assert (line.high_watermark, line.backlog_bytes) == (None, None)


def test_the_owner_knows_the_backlog_better_than_an_estimate() -> None:
    report = PartitionReport(uncopied_bytes=77, behind_ms=9_000, alarms=("copy-stalled",), stages=())
    line = partition_line(known(), sums_of(THREE, 150), LocalLogBounds(150, 400, 400, 5), report, leader=1)
    assert (line.backlog_bytes, line.backlog_ms, line.bytes.local_only) == (77, 9_000, 77)
    assert line.alarms == ("copy-stalled",)


def test_a_log_without_remote_segments_has_no_estimate() -> None:
    line = partition_line(known(None, None), sums_of([], 0), LocalLogBounds(0, 40, 40, 1), None, leader=1)
    assert (line.backlog_offsets, line.backlog_bytes, line.bytes) == (40, None, TierBytes())


def test_only_readable_segments_count() -> None:
    segments = [
        segment(0, 100),
        segment(100, 200, cut_at=150),
        segment(150, 250, cut_at=100),
        segment(250, 300, RemoteLogSegmentState.COPY_SEGMENT_STARTED),
        segment(300, 400, RemoteLogSegmentState.DELETE_SEGMENT_STARTED),
    ]
    sums = sums_of(segments, 0)
    assert (sums.segments, sums.size_bytes) == (2, 1500)
    assert (sums.cut_segments, sums.cut_bytes) == (1, 1000)
    assert [segment_facts(each, 160).state for each in segments] == [
        "remote", "cut", "void", "copying", "deleting",
    ]  # fmt: skip
    assert [segment_facts(each, 160).is_on_broker for each in segments[:3]] == [False, True, True]
    assert segment_facts(segments[0], None).is_on_broker is None


def test_a_topic_adds_up_its_partitions() -> None:
    one = partition_line(known(), sums_of(THREE, 150), LocalLogBounds(150, 400, 400, 5), None, leader=1)
    two = replace(one, partition=3, alarms=("gap",), oldest_ms=5, backlog_ms=7_000, trouble="no leader", gaps=2)
    topic = topic_line("orders", "id", "tiered", [one, two])
    assert topic.bytes == TierBytes(3000, 3000, 2000)
    assert (topic.partitions, topic.segments, topic.gaps, topic.unanswered) == (2, 6, 2, 1)
    assert (topic.oldest_ms, topic.backlog_bytes, topic.backlog_ms, topic.alarms) == (5, 2000, 7_000, ("gap",))


def test_a_drawing_of_a_long_log_has_a_bounded_number_of_spans() -> None:
    spans = Spans(20_000)
    for start in range(0, 200_000, 10):
        spans.add(segment(start, start + 10))
    found = spans.result()
    assert (found[0].start, found[-1].end) == (0, 200_000)
    assert len(found) <= 250
    assert sum(each.segments for each in found) == 20_000


def test_a_drawing_joins_no_segments_across_a_hole_or_of_two_states() -> None:
    spans = Spans(10_000)
    for each in (segment(0, 10), segment(10, 20), segment(30, 40), segment(40, 50, RemoteLogSegmentState(0))):
        spans.add(each)
    assert [(each.start, each.end, each.state) for each in spans.result()] == [
        (0, 20, "remote"),
        (30, 40, "remote"),
        (40, 50, "copying"),
    ]
