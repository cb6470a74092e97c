"""`MetadataTruth`: what the metadata topic has committed, and when, whatever any process knows of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from uuid import UUID

from protocol.errors import ErrorCode
from tests.support.simulation.cluster import SimPartition
from tests.support.simulation.loop import VirtualLoop
from tiers.broker.fetch import FetchedPartition
from tiers.config.total_retention import recorded_total
from tiers.metadata.topic.committed_records import read_committed
from tiers.model.log_source import AbortedTransaction
from tiers.model.log_start import LogStart, OffsetAndEpoch
from tiers.model.segment_metadata import (
    CutUpdate,
    LocalLogStartUpdate,
    LogGapUpdate,
    LogStartOffsetUpdate,
    RemoteLogSegmentMetadata,
    RemoteLogSegmentMetadataUpdate,
    RemotePartitionDeleteMetadata,
    TopicTierConfigUpdate,
)
from tiers.model.segment_metadata import RemoteLogSegmentState as State

Place = tuple[UUID, int]


@dataclass(eq=False)
class TrueSegment:
    metadata: RemoteLogSegmentMetadata
    state: State
    finished_at_s: float | None = None
    is_deleted: bool = False
    """Whether a DELETE record was ever committed, also if the topic lost it."""
    is_cut: bool = False
    """Whether a CUT voids records of it."""
    started_at_s: float = 0.0
    gone_at_s: float | None = None
    """When DELETE_SEGMENT_FINISHED was committed."""
    written_at: tuple[int, int] = -1, -1
    """The metadata partition, and the offset of the record that began the copy."""
    finished_at: int = -1
    """The offset of COPY_SEGMENT_FINISHED."""
    is_forgotten: bool = False
    """Whether the metadata topic lost one of these two records."""

    def is_of(self, place: Place) -> bool:
        partition = self.metadata.topic_id_partition
        return (partition.topic_id, partition.partition) == place


MARKS = ("settings", "delete", "cut", "log-start", "finished", "started")
"""The kinds of records whose places are noted."""


class MetadataTruth:
    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._read_to: dict[SimPartition, int] = {}
        self.segments: dict[UUID, TrueSegment] = {}
        self.log_starts: dict[Place, list[LogStart]] = {}
        self.lost_records: set[int] = set()
        """The metadata partitions that lost committed records."""
        self.lost_at_s = math.inf
        """When records were lost last. Infinite: none was."""
        self.records = 0
        self.marks: dict[str, list[tuple[int, int]]] = {}
        """By kind: the metadata partitions and offsets of its records."""
        self.copied_to: dict[Place, int] = {}
        """By partition: the end of the segments that ever finished."""
        self.on_started: Callable[[TrueSegment], None] = lambda segment: None
        self.gaps: dict[Place, list[tuple[int, int]]] = {}
        self.cuts = 0
        self.deleted: set[Place] = set()
        """The partitions whose deletion has begun."""
        self.on_begun_again: Callable[[TrueSegment], None] = lambda segment: None
        """Called when a copy begins with the uuid of a segment whose deletion has begun."""
        self.on_total: Callable[[UUID], None] = lambda topic_id: None
        """Called when a total of a topic's own is recorded."""
        self.on_log_start: Callable[[Place, LogStart], None] = lambda place, start: None
        self.on_trim_recorded: Callable[[Place, OffsetAndEpoch], None] = lambda place, start: None

    def follow(self, partition: SimPartition) -> None:
        """Takes what was committed since the last call."""
        log = partition.log
        position = self._read_to.get(partition, 0)
        bound = log.last_stable_offset
        if position >= bound:
            return
        records, next_offset = log.read(max(position, log.start), bound, 1 << 30, True)
        aborted = tuple(AbortedTransaction(*one) for one in log.aborted_between(position, next_offset))
        fetched = FetchedPartition(
            partition.topic.topic_id, partition.index, ErrorCode.NONE, bound, bound, log.start, aborted,
            memoryview(records),
        )  # fmt: skip
        read = read_committed(fetched, position)
        self._read_to[partition] = bound
        for event in read.events:
            self.records += 1
            self._take(event.record, partition.index, event.offset)

    def lost(self, partition: SimPartition, end: int) -> None:
        """The topic has lost the records from `end` on."""
        if self._read_to.get(partition, 0) > end:
            self._read_to[partition] = end
            self._lost(partition, lambda offset: offset >= end)

    def lost_head(self, partition: SimPartition, begin: int) -> None:
        """The topic has lost the records below `begin`."""
        self._lost(partition, lambda offset: 0 <= offset < begin)

    def _lost(self, partition: SimPartition, is_lost: Callable[[int], bool]) -> None:
        self.lost_records.add(partition.index)
        self.lost_at_s = self._loop.time()
        for one in self.segments.values():
            number, offset = one.written_at
            one.is_forgotten |= number == partition.index and (is_lost(offset) or is_lost(one.finished_at))

    def may_be_dead(self, segment: TrueSegment) -> bool:
        return segment.is_deleted or any(map(segment.is_of, self.deleted))

    def _take(self, record: object, number: int, offset: int) -> None:
        kind = _kind_of(record)
        if kind is not None:
            self.marks.setdefault(kind, []).append((number, offset))
        if isinstance(record, RemoteLogSegmentMetadata):
            known = self.segments.get(record.segment_id.id)
            if known is None:
                started = TrueSegment(record, record.state, started_at_s=self._loop.time(), written_at=(number, offset))
                self.segments[record.segment_id.id] = started
                self.on_started(started)
            elif known.is_deleted and not self.lost_records:
                self.on_begun_again(known)
        elif isinstance(record, RemoteLogSegmentMetadataUpdate):
            segment = self.segments.get(record.segment_id.id)
            if segment is None:
                return
            segment.state = max(segment.state, record.state)
            if segment.state is State.DELETE_SEGMENT_FINISHED and segment.gone_at_s is None:
                segment.gone_at_s = self._loop.time()
            if record.state is State.COPY_SEGMENT_FINISHED:
                segment.finished_at, segment.is_forgotten = offset, False
                of = record.segment_id.topic_id_partition
                place = of.topic_id, of.partition
                self.copied_to[place] = max(self.copied_to.get(place, 0), segment.metadata.end_offset + 1)
                if segment.finished_at_s is None:
                    segment.finished_at_s = self._loop.time()
            if record.state in (State.DELETE_SEGMENT_STARTED, State.DELETE_SEGMENT_FINISHED):
                segment.is_deleted = True
        elif isinstance(record, RemotePartitionDeleteMetadata):
            self.deleted.add((record.topic_id_partition.topic_id, record.topic_id_partition.partition))
        elif isinstance(record, LogStartOffsetUpdate):
            place = record.topic_id_partition.topic_id, record.topic_id_partition.partition
            self.log_starts.setdefault(place, []).append(record.log_start)
            self.on_log_start(place, record.log_start)
        elif isinstance(record, LocalLogStartUpdate):
            place = record.topic_id_partition.topic_id, record.topic_id_partition.partition
            self.on_trim_recorded(place, record.local_log_start)
        elif isinstance(record, TopicTierConfigUpdate):
            if recorded_total(record.config).is_set:
                self.on_total(record.topic_id_partition.topic_id)
        elif isinstance(record, LogGapUpdate):
            place = record.topic_id_partition.topic_id, record.topic_id_partition.partition
            self.gaps.setdefault(place, []).append((record.gap.first_offset, record.gap.next_offset))
        elif isinstance(record, CutUpdate):
            self.cuts += 1
            place = record.topic_id_partition.topic_id, record.topic_id_partition.partition
            for one in [*self.finished(place), *self.unfinished(place)]:
                is_earlier = one.metadata.leader_epoch < record.leader_epoch
                one.is_cut |= is_earlier and one.metadata.end_offset >= record.offset

    def unfinished(self, place: Place) -> list[TrueSegment]:
        """Returns the segments of a partition whose copy began, and neither finished nor was deleted."""
        return [one for one in self.segments.values() if one.state is State.COPY_SEGMENT_STARTED and one.is_of(place)]

    def finished(self, place: Place) -> list[TrueSegment]:
        """Returns the segments of a partition that are readable by the metadata, in the order of their offsets."""
        return sorted(
            (one for one in self.segments.values() if one.state is State.COPY_SEGMENT_FINISHED and one.is_of(place)),
            key=lambda one: (one.metadata.start_offset, one.finished_at_s or 0),
        )


def _kind_of(record: object) -> str | None:
    match record:
        case TopicTierConfigUpdate():
            return "settings"
        case CutUpdate():
            return "cut"
        case LogStartOffsetUpdate():
            return "log-start"
        case RemoteLogSegmentMetadata():
            return "started"
        case RemoteLogSegmentMetadataUpdate(state=State.COPY_SEGMENT_FINISHED):
            return "finished"
        case RemoteLogSegmentMetadataUpdate():
            return "delete"
    return None
