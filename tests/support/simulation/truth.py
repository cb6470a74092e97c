"""`MetadataTruth`: what the metadata topic has committed, and when, whatever any process knows of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from uuid import UUID

from protocol.errors import ErrorCode
from tests.support.simulation.cluster import SimPartition
from tests.support.simulation.loop import VirtualLoop
from tiers.broker.fetch import FetchedPartition
from tiers.metadata.topic.committed_records import read_committed
from tiers.model.log_source import AbortedTransaction
from tiers.model.log_start import LogStart, OffsetAndEpoch
from tiers.model.segment_metadata import (
    LocalLogStartUpdate,
    LogGapUpdate,
    LogStartOffsetUpdate,
    RemoteLogClampUpdate,
    RemoteLogSegmentMetadata,
    RemoteLogSegmentMetadataUpdate,
)
from tiers.model.segment_state import RemoteLogSegmentState as State


@dataclass(eq=False)
class TrueSegment:
    metadata: RemoteLogSegmentMetadata
    state: State
    finished_at_s: float | None = None
    is_deleted: bool = False
    """Whether a DELETE record was ever committed, also if the topic lost it."""
    is_in_quarantine: bool = False
    """Whether a clamp cut records of it off. Only an operator's command deletes them."""
    started_at_s: float = 0.0
    gone_at_s: float | None = None
    """When DELETE_SEGMENT_FINISHED was committed."""


Place = tuple[UUID, int]


class MetadataTruth:
    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._read_to: dict[SimPartition, int] = {}
        self.segments: dict[UUID, TrueSegment] = {}
        self.log_starts: dict[Place, list[LogStart]] = {}
        self.lost_records: set[int] = set()
        """The metadata partitions that lost committed records."""
        self.records = 0
        self.on_started: Callable[[TrueSegment], None] = lambda segment: None
        self.gaps = 0
        self.clamps = 0
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
            self._take(event.record)

    def lost(self, partition: SimPartition, end: int) -> None:
        if self._read_to.get(partition, 0) > end:
            self.lost_records.add(partition.index)
            self._read_to[partition] = end

    def _take(self, record: object) -> None:
        if isinstance(record, RemoteLogSegmentMetadata):
            known = self.segments.get(record.segment_id.id)
            if known is None:
                started = TrueSegment(record, record.state, started_at_s=self._loop.time())
                self.segments[record.segment_id.id] = started
                self.on_started(started)
        elif isinstance(record, RemoteLogSegmentMetadataUpdate):
            segment = self.segments.get(record.segment_id.id)
            if segment is None:
                return
            segment.state = max(segment.state, record.state)
            if segment.state is State.DELETE_SEGMENT_FINISHED and segment.gone_at_s is None:
                segment.gone_at_s = self._loop.time()
            if record.state is State.COPY_SEGMENT_FINISHED and segment.finished_at_s is None:
                segment.finished_at_s = self._loop.time()
            if record.state in (State.DELETE_SEGMENT_STARTED, State.DELETE_SEGMENT_FINISHED):
                segment.is_deleted = True
        elif isinstance(record, LogStartOffsetUpdate):
            place = record.topic_id_partition.topic_id, record.topic_id_partition.partition
            self.log_starts.setdefault(place, []).append(record.log_start)
            self.on_log_start(place, record.log_start)
        elif isinstance(record, LocalLogStartUpdate):
            place = record.topic_id_partition.topic_id, record.topic_id_partition.partition
            self.on_trim_recorded(place, record.local_log_start)
        elif isinstance(record, LogGapUpdate):
            self.gaps += 1
        elif isinstance(record, RemoteLogClampUpdate):
            self.clamps += 1
            place = record.topic_id_partition.topic_id, record.topic_id_partition.partition
            for one in self.finished(place):
                one.is_in_quarantine |= one.metadata.end_offset > record.valid_end_offset

    def finished(self, place: Place) -> list[TrueSegment]:
        """Returns the segments of a partition that are readable by the metadata, in the order of their offsets."""
        return sorted(
            (
                one
                for one in self.segments.values()
                if one.state is State.COPY_SEGMENT_FINISHED
                and (one.metadata.topic_id_partition.topic_id, one.metadata.topic_id_partition.partition) == place
            ),
            key=lambda one: (one.metadata.start_offset, one.finished_at_s or 0),
        )
