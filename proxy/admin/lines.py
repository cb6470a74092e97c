"""Computes the line of a partition and of a topic. Pure: it gets what the metadata, the leader and the owner say."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from proxy.admin.facts import (
    PartitionLine,
    SegmentFacts,
    SegmentSpan,
    SegmentState,
    SettingSource,
    TierBytes,
    TopicLine,
    TopicSetting,
    TopicState,
)
from proxy.cluster.broker_configs import BrokerValue
from tiers.config.topic_policy import TopicConfig
from tiers.config.topic_settings import tier_values
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LocalLogBounds
from tiers.model.segment_metadata import RemoteLogSegmentState
from tiers.model.stored_segment import StoredSegment
from tiers.tasks.partition_tasks import PartitionReport

_FINISHED = int(RemoteLogSegmentState.COPY_SEGMENT_FINISHED)
_DENSITY_SEGMENTS = 4
"""The newest segments whose bytes per offset stand for the records that are not remote."""
MAX_SHAPE = 240


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of readable remote offsets, [`start`, `end`), and its bytes."""

    start: int
    end: int
    size_bytes: int

    def bytes_below(self, offset: int) -> int:
        """Returns the bytes below `offset`, as if all records had the same size."""
        below = min(max(offset - self.start, 0), self.end - self.start)
        return self.size_bytes * below // max(1, self.end - self.start)


@dataclass(frozen=True, slots=True)
class SegmentSums:
    """What one pass over the segments of a partition finds. `tail` has the pieces that end above `tail_from`."""

    size_bytes: int = 0
    segments: int = 0
    cut_segments: int = 0
    cut_bytes: int = 0
    oldest_ms: int | None = None
    newest_ms: int | None = None
    bytes_per_offset: float = 0.0
    tail_from: int = 0
    tail: tuple[Piece, ...] = ()

    def below(self, offset: int) -> int:
        """Returns the readable bytes below `offset`, which must not lie below `tail_from`."""
        return self.size_bytes - sum(each.size_bytes - each.bytes_below(offset) for each in self.tail)


class SegmentWalk:
    """Adds up the segments of a partition, which come by start offset. Those that the copy has not finished, or whose
    deletion has begun, do not count.

    A tier may have a million segments, so the walk makes no object of a segment below `tail_from`."""

    def __init__(self, tail_from: int) -> None:
        self._tail_from = tail_from
        self._size_bytes = self._count = self._cut_count = self._cut_bytes = 0
        self._oldest_ms: int | None = None
        self._newest_ms: int | None = None
        self._tail: list[Piece] = []
        self._newest: deque[tuple[int, int]] = deque(maxlen=_DENSITY_SEGMENTS)

    def add(self, segment: StoredSegment) -> None:
        if segment.state != _FINISHED:
            return
        start, end, kept_end, piece_bytes = (
            segment.start_offset, segment.end_offset, segment.kept_end_offset, segment.segment_size_bytes
        )  # fmt: skip
        if kept_end < end:
            if kept_end < start:
                self._cut_count += 1
                self._cut_bytes += piece_bytes
                return
            piece_bytes = Piece(start, end + 1, piece_bytes).bytes_below(kept_end + 1)
            end = kept_end
        self._size_bytes += piece_bytes
        self._count += 1
        newest_at_ms = segment.max_timestamp_ms
        if newest_at_ms >= 0:
            if self._oldest_ms is None:
                self._oldest_ms = newest_at_ms
            self._newest_ms = newest_at_ms
        if end >= self._tail_from:
            self._tail.append(Piece(start, end + 1, piece_bytes))
        self._newest.append((end + 1 - start, piece_bytes))

    def result(self) -> SegmentSums:
        offsets = sum(length for length, _ in self._newest)
        density = sum(piece_bytes for _, piece_bytes in self._newest) / offsets if offsets else 0.0
        return SegmentSums(
            self._size_bytes,
            self._count,
            self._cut_count,
            self._cut_bytes,
            self._oldest_ms,
            self._newest_ms,
            density,
            self._tail_from,
            tuple(self._tail),
        )


@dataclass(frozen=True, slots=True)
class PartitionKnowledge:
    """What the metadata says about a partition. `trimmed_to` is the end of the last recorded trim."""

    partition: TopicIdPartition
    log_start_offset: int | None
    remote_start: int | None
    remote_end: int | None
    trimmed_to: int | None
    gaps: int
    metadata_partition: int | None = None
    is_owned: bool = False


def partition_line(
    known: PartitionKnowledge,
    sums: SegmentSums,
    bounds: LocalLogBounds | None,
    report: PartitionReport | None,
    leader: int | None,
    trouble: str | None = None,
) -> PartitionLine:
    """`bounds` is None if the leader did not answer. Then the records that are not remote are unknown."""
    local_start = (known.trimmed_to or 0) if bounds is None else bounds.log_start_offset
    remote_only = sums.below(max(local_start, sums.tail_from))
    line = PartitionLine(
        topic=known.partition.topic,
        partition=known.partition.partition,
        leader=leader,
        is_owned=known.is_owned,
        metadata_partition=known.metadata_partition,
        log_start_offset=known.log_start_offset,
        remote_start=known.remote_start,
        remote_end=known.remote_end,
        bytes=TierBytes(remote_only, sums.size_bytes - remote_only, 0),
        segments=sums.segments,
        cut_segments=sums.cut_segments,
        cut_bytes=sums.cut_bytes,
        gaps=known.gaps,
        oldest_ms=sums.oldest_ms,
        newest_remote_ms=sums.newest_ms,
        backlog_ms=None if report is None else report.behind_ms,
        backlog_bytes=None if report is None else report.uncopied_bytes,
        alarms=() if report is None else report.alarms,
        trouble=trouble,
    )
    if bounds is None:
        return line
    remote_next = bounds.log_start_offset if known.remote_end is None else known.remote_end + 1
    first_local = max(bounds.log_start_offset, remote_next)
    waiting = max(0, bounds.last_stable_offset - first_local)
    unstable = max(0, bounds.high_watermark - max(first_local, bounds.last_stable_offset))
    backlog_bytes = line.backlog_bytes
    if backlog_bytes is None:
        backlog_bytes = int(waiting * sums.bytes_per_offset) if sums.bytes_per_offset or not waiting else None
    local_only = (backlog_bytes or 0) + int(unstable * sums.bytes_per_offset)
    return replace(
        line,
        log_start_offset=bounds.log_start_offset if known.log_start_offset is None else known.log_start_offset,
        local_start=bounds.log_start_offset,
        last_stable_offset=bounds.last_stable_offset,
        high_watermark=bounds.high_watermark,
        leader_epoch=bounds.leader_epoch,
        bytes=TierBytes(line.bytes.remote_only, line.bytes.both, local_only),
        backlog_offsets=waiting,
        backlog_bytes=backlog_bytes,
    )


def topic_line(
    topic: str, topic_id: str, state: TopicState, partitions: Sequence[PartitionLine], reason: str = "", count: int = 0
) -> TopicLine:
    """Adds up the lines of a topic's partitions. `count` is the number of partitions if they have no lines."""
    backlog_bytes = [each.backlog_bytes for each in partitions if each.backlog_bytes is not None]
    backlog_ms = [each.backlog_ms for each in partitions if each.backlog_ms is not None]
    oldest_ms = [each.oldest_ms for each in partitions if each.oldest_ms is not None]
    newest_ms = [each.newest_remote_ms for each in partitions if each.newest_remote_ms is not None]
    return TopicLine(
        topic=topic,
        topic_id=topic_id,
        state=state,
        reason=reason,
        partitions=count or len(partitions),
        bytes=TierBytes(
            sum(each.bytes.remote_only for each in partitions),
            sum(each.bytes.both for each in partitions),
            sum(each.bytes.local_only for each in partitions),
        ),
        segments=sum(each.segments for each in partitions),
        cut_segments=sum(each.cut_segments for each in partitions),
        gaps=sum(each.gaps for each in partitions),
        oldest_ms=min(oldest_ms, default=None),
        newest_remote_ms=max(newest_ms, default=None),
        backlog_bytes=sum(backlog_bytes) if backlog_bytes else None,
        backlog_ms=max(backlog_ms, default=None),
        alarms=tuple(sorted({alarm for each in partitions for alarm in each.alarms})),
        unanswered=sum(each.trouble is not None for each in partitions),
    )


def topic_settings(
    topic: str, rules: Sequence[TopicConfig], own: Mapping[str, str], brokers: Mapping[str, BrokerValue]
) -> Iterator[TopicSetting]:
    """Yields the settings of a topic. `own` has its tier settings, and `brokers` what the brokers say of it."""
    values = tier_values(next((rule for rule in rules if rule.matches(topic)), None), own)
    for key, value in values.items():
        source: SettingSource = "topic" if value.is_own else "file" if value.is_from_file else "default"
        yield TopicSetting(key, value.value, source)
    for key, said in brokers.items():
        if key not in values:
            yield TopicSetting(key, said.value, "broker" if said.value == said.default else "topic")


def segment_facts(segment: StoredSegment, local_start: int | None) -> SegmentFacts:
    """`local_start` is the first offset on the broker; None if the leader did not answer."""
    metadata = segment.metadata
    return SegmentFacts(
        id=str(metadata.segment_id.id),
        start_offset=segment.start_offset,
        end_offset=segment.end_offset,
        valid_end_offset=segment.valid_end_offset,
        size_bytes=segment.segment_size_bytes,
        state=_state_of(segment),
        is_on_broker=None if local_start is None else segment.end_offset >= local_start,
        max_timestamp_ms=segment.max_timestamp_ms,
        event_timestamp_ms=segment.event_timestamp_ms,
        epochs=metadata.segment_leader_epochs,
    )


def _state_of(segment: StoredSegment) -> SegmentState:
    match segment.state:
        case RemoteLogSegmentState.COPY_SEGMENT_STARTED:
            return "copying"
        case RemoteLogSegmentState.DELETE_SEGMENT_STARTED:
            return "deleting"
    if segment.valid_end_offset < segment.start_offset:
        return "void"
    return "cut" if segment.valid_end_offset < segment.end_offset else "remote"


class Spans:
    """Joins neighbouring segments of one state, so that a drawing has about `MAX_SHAPE` spans.

    `total` is the number of segments, as far as it is known."""

    def __init__(self, total: int) -> None:
        self._joined = max(1, -(-total // MAX_SHAPE))
        self._spans: list[SegmentSpan] = []

    def add(self, segment: StoredSegment) -> None:
        """Segments come by start offset. Those of a log that is torn into very many spans are left out at its end."""
        spans, state = self._spans, _state_of(segment)
        last = spans[-1] if spans else None
        if (
            last is not None
            and (last.state, last.end) == (state, segment.start_offset)
            and last.segments < self._joined
        ):
            spans[-1] = SegmentSpan(last.start, segment.end_offset + 1, state, last.segments + 1)
        elif len(spans) < 4 * MAX_SHAPE:
            spans.append(SegmentSpan(segment.start_offset, segment.end_offset + 1, state, 1))

    def result(self) -> tuple[SegmentSpan, ...]:
        return tuple(self._spans)
