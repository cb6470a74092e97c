"""`InMemoryRemoteLogMetadataManager`: the product's manager over a model of a metadata log.

The model keeps what the records say in dictionaries. It computes every answer from the list of all segments, in the
obvious way. So tests compare the product's logs and their state with it. Unit tests of one process use it too, and set
`fresh`, `owned` and `fail_writes`. `metadata_topic.py` has a log with the product's state, for tests of several
processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from uuid import UUID

from tests.support.fakes.stored_segments import stored
from tests.support.tiers.segment_metadata import with_update
from tiers.errors import OwnershipLostError, RemoteLogMetadataNotReadyError
from tiers.metadata.metadata_log import Append, MakeRecords, MetadataPosition, MetadataStatus, Tenure
from tiers.metadata.records.serde import (
    LOCAL_LOG_START_API_KEY,
    TIER_MARKER_API_KEY,
    TOPIC_DELETION_API_KEY,
    TOPIC_MISSING_API_KEY,
    TOPIC_TIER_CONFIG_API_KEY,
    MetadataRecord,
    RecordKey,
    decode_key,
    decode_value,
    key_of,
    log_gap_key,
    log_start_key,
    nothing_key,
    segment_keys,
)
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataManager
from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.model.copy_plan import CopyPlan
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.log_start import LogGap, LogStart, OffsetAndEpoch
from tiers.model.segment_metadata import (
    Cut,
    CutUpdate,
    LocalLogStartUpdate,
    LogGapUpdate,
    LogStartOffsetUpdate,
    RemoteLogSegmentMetadata,
    RemoteLogSegmentMetadataUpdate,
    RemoteLogSegmentState,
    RemotePartitionDeleteMetadata,
    RemotePartitionDeleteState,
    TierMarkerUpdate,
    TopicDeletionUpdate,
    TopicMissingUpdate,
    TopicTierConfigUpdate,
    leader_epoch_at,
)
from tiers.model.stored_segment import CoverSize, StoredSegment

IN_MEMORY_TOPIC_ID = UUID(int=9)
"""The topic id of the metadata topic, which does not exist here."""


@dataclass(eq=False, repr=False)
class InMemoryRemoteLogMetadataManager(RemoteLogMetadataManager):
    """A manager over an `InMemoryLog`. Tests set its fields."""

    clock_ms: Callable[[], int] = lambda: time.monotonic_ns() // 1_000_000
    wall_clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000
    fresh: bool = True
    reading: int = 0
    final: bool = False
    owned: bool = True
    is_awaiting: bool = False
    tenures: int = 0
    fail_writes: Exception | None = None
    skew_ms: int = 0
    true_skew_ms: int | None = None
    """The result of a new measurement. None: the same as before."""
    markers: dict[str, TierMarkerUpdate] = field(default_factory=dict)
    segments: dict[RemoteLogSegmentId, RemoteLogSegmentMetadata] = field(default_factory=dict)
    deleted: dict[RemoteLogSegmentId, RemoteLogSegmentMetadata] = field(default_factory=dict)
    begin_order: dict[RemoteLogSegmentId, int] = field(default_factory=dict)
    recorded_cuts: dict[tuple[TopicIdPartition, int, int], Cut] = field(default_factory=dict)
    plans: dict[UUID, CopyPlan] = field(default_factory=dict)
    all_log_starts: dict[TopicIdPartition, list[LogStart]] = field(default_factory=dict)
    local_log_starts: dict[TopicIdPartition, OffsetAndEpoch] = field(default_factory=dict)
    recorded_gaps: dict[TopicIdPartition, dict[int, LogGap]] = field(default_factory=dict)
    topic_deletion_records: dict[UUID, TopicDeletionUpdate] = field(default_factory=dict)
    missing: dict[UUID, int] = field(default_factory=dict)
    topic_id: UUID | None = IN_MEMORY_TOPIC_ID
    """None: as a manager whose metadata is not in a topic of the cluster."""
    is_position_confirmed: bool = True
    unconfirmed: set[TopicIdPartition] = field(default_factory=set)
    """The partitions whose metadata lost records, while that of all others did not."""
    deletions: dict[TopicIdPartition, RemotePartitionDeleteState] = field(default_factory=dict)
    seen: dict[RemoteLogSegmentId, int] = field(default_factory=dict)
    tier_configs: dict[TopicIdPartition, Mapping[str, str]] = field(default_factory=dict)
    written: int = 0
    knows_all_partitions: bool = True
    """False: another metadata partition was not read to its end."""

    def __post_init__(self) -> None:
        super().__init__(InMemoryLog(self), lambda: self.wall_clock_ms())


class InMemoryLog:
    """Implements `MetadataLog`. Every record changes the fields of the manager at once."""

    writer = "in-memory"

    def __init__(self, manager: InMemoryRemoteLogMetadataManager) -> None:
        self._of = manager
        self.state = InMemoryState(manager)

    async def open(self) -> None:
        return

    async def close(self) -> None:
        return

    @property
    def topic_id(self) -> UUID | None:
        return self._of.topic_id

    async def ensure_fresh(self, partition: TopicIdPartition, max_age_ms: int, timeout_ms: int) -> None:
        if not self._of.fresh:
            raise RemoteLogMetadataNotReadyError(f"metadata of {partition} is not fresh")

    def is_fresh(self, partition: TopicIdPartition, max_age_ms: int) -> bool:
        return self._of.fresh

    async def append(
        self, partition: TopicIdPartition, records: MakeRecords, by: Append, timeout_ms: int | None = None
    ) -> None:
        if self._of.fail_writes is not None:
            raise self._of.fail_writes
        if by is Append.AS_OWNER and not self._of.owned:
            raise OwnershipLostError(f"{partition} is owned by another member")
        made = records()
        self._of.written += bool(made)
        for key, value in made:
            record = None if value is None else decode_value(value)
            if record is None:
                self._end(decode_key(key))
            else:
                self._put(record)

    def _put(self, record: MetadataRecord) -> None:
        known = self._of
        match record:
            case RemoteLogSegmentMetadata():
                known.begin_order[record.segment_id] = known.written
                known.deleted.pop(record.segment_id, None)
                known.segments[record.segment_id] = replace(record, event_timestamp_ms=known.wall_clock_ms())
            case RemoteLogSegmentMetadataUpdate():
                at_ms, segment_id = known.wall_clock_ms(), record.segment_id
                moved = with_update(known.segments[segment_id], replace(record, event_timestamp_ms=at_ms))
                known.segments[segment_id] = moved
                if record.state is RemoteLogSegmentState.DELETE_SEGMENT_FINISHED:
                    known.deleted[segment_id] = known.segments.pop(segment_id)
                elif record.state is RemoteLogSegmentState.COPY_SEGMENT_FINISHED:
                    known.seen.setdefault(segment_id, known.clock_ms())
            case CopyPlan():
                known.plans.setdefault(record.plan_id, record)
                for each in record.announced():
                    known.begin_order.setdefault(each.segment_id, known.written)
                    announced = replace(each, event_timestamp_ms=known.wall_clock_ms())
                    known.segments.setdefault(each.segment_id, announced)
            case RemotePartitionDeleteMetadata():
                known.deletions[record.topic_id_partition] = record.state
                if record.state is RemotePartitionDeleteState.DELETE_PARTITION_FINISHED:
                    known.recorded_gaps.pop(record.topic_id_partition, None)
            case CutUpdate(partition):
                at = partition, record.leader_epoch, record.offset
                known.recorded_cuts[at] = record.cut._replace(at_ms=known.wall_clock_ms())
            case LocalLogStartUpdate():
                known.local_log_starts[record.topic_id_partition] = record.local_log_start
            case LogStartOffsetUpdate():
                self._end(key_of(record))
                known.all_log_starts.setdefault(record.topic_id_partition, []).append(record.log_start)
            case LogGapUpdate():
                known.recorded_gaps.setdefault(record.topic_id_partition, {})[record.gap.first_offset] = record.gap
            case TierMarkerUpdate():
                known.markers[record.location] = replace(record, event_timestamp_ms=known.wall_clock_ms())
            case TopicTierConfigUpdate():
                known.tier_configs[record.topic_id_partition] = record.config
            case TopicDeletionUpdate():
                at_ms, topic_id = known.wall_clock_ms(), record.topic_id_partition.topic_id
                known.topic_deletion_records[topic_id] = replace(record, event_timestamp_ms=at_ms)
            case TopicMissingUpdate():
                known.missing.setdefault(record.topic_id_partition.topic_id, known.wall_clock_ms())

    def _end(self, key: RecordKey) -> None:
        """Removes what has the key."""
        known, partition = self._of, key.topic_id_partition
        for segment_id in [*known.segments, *known.deleted]:
            if key in segment_keys(segment_id):
                known.segments.pop(segment_id, None)
                known.deleted.pop(segment_id, None)
        for plan in [each for each in known.plans.values() if key == key_of(each)]:
            del known.plans[plan.plan_id]
            for segment_id in plan.segment_ids():
                one = known.segments.get(segment_id)
                if one and one.state is RemoteLogSegmentState.COPY_SEGMENT_STARTED and one.segment_size_bytes == 0:
                    del known.segments[segment_id]
        for cut in [each for each in known.recorded_cuts if key == key_of(CutUpdate(each[0], "", 0, *each[1:]))]:
            del known.recorded_cuts[cut]
        starts = [one for one in known.all_log_starts.pop(partition, []) if key != log_start_key(partition, one)]
        if starts:
            known.all_log_starts[partition] = starts
        gaps = known.recorded_gaps.get(partition, {})
        for first_offset in [each for each in gaps if key == log_gap_key(partition, each)]:
            del gaps[first_offset]
        if key.api_key == LOCAL_LOG_START_API_KEY:
            known.local_log_starts.pop(partition, None)
        elif key == nothing_key(partition):
            known.skew_ms = known.skew_ms if known.true_skew_ms is None else known.true_skew_ms
        elif key.api_key == TOPIC_TIER_CONFIG_API_KEY:
            known.tier_configs.pop(partition, None)
        elif key.api_key == TIER_MARKER_API_KEY:
            known.markers.pop(key.name.decode(), None)
        elif key.api_key == TOPIC_DELETION_API_KEY:
            known.topic_deletion_records.pop(partition.topic_id, None)
        elif key.api_key == TOPIC_MISSING_API_KEY:
            known.missing.pop(partition.topic_id, None)

    def owns(self, partition: TopicIdPartition) -> bool:
        return self._of.owned

    def tenure(self, partition: TopicIdPartition) -> Tenure | None:
        """A fake that is not the owner waits to be it again, if a test says so."""
        return Tenure(0, self._of.tenures) if self._of.owned or self._of.is_awaiting else None

    def position(self, partition: TopicIdPartition) -> MetadataPosition:
        return MetadataPosition(IN_MEMORY_TOPIC_ID, 0, self._of.written)

    async def confirms(self, partition: TopicIdPartition, position: MetadataPosition, timeout_ms: int) -> bool:
        is_confirmed = self._of.is_position_confirmed and partition not in self._of.unconfirmed
        reached = self.position(partition)
        return is_confirmed and position.topic_id == reached.topic_id and position.next_offset <= reached.next_offset

    def status(self) -> MetadataStatus:
        age_ms = 0 if self._of.knows_all_partitions else None
        owned = frozenset({0}) if self._of.owned else frozenset[int]()
        return MetadataStatus(None, age_ms, owned, clock_skew_ms=self._of.skew_ms)


class InMemoryState(RemoteLogMetadataState):
    """Computes every answer from the fields of the manager."""

    def __init__(self, manager: InMemoryRemoteLogMetadataManager) -> None:
        super().__init__()
        self._log = manager

    def reading(self) -> int:
        return self._log.reading

    def is_final(self) -> bool:
        return self._log.final

    def _readable(self, partition: TopicIdPartition) -> list[RemoteLogSegmentMetadata]:
        finished = [
            self._after_cuts(segment)
            for segment in self._log.segments.values()
            if segment.topic_id_partition == partition and segment.state is RemoteLogSegmentState.COPY_SEGMENT_FINISHED
        ]
        return [segment for segment in finished if not segment.is_cut_off]

    def _after_cuts(self, segment: RemoteLogSegmentMetadata) -> RemoteLogSegmentMetadata:
        void_from = [
            cut.offset
            for cut in self.cuts(segment.topic_id_partition)
            if cut.leader_epoch > segment.leader_epoch and cut.offset <= segment.end_offset
        ]
        return replace(segment, cut_at=min(void_from)) if void_from else segment

    def remote_log_segment_metadata(self, partition: TopicIdPartition, offset: int) -> RemoteLogSegmentMetadata | None:
        holders = [
            segment
            for segment in self._readable(partition)
            if segment.start_offset <= offset <= segment.valid_end_offset
        ]
        return max(holders, key=lambda segment: self._log.begin_order.get(segment.segment_id, 0), default=None)

    def next_segment(self, partition: TopicIdPartition, offset: int) -> RemoteLogSegmentMetadata | None:
        later = [segment.start_offset for segment in self._readable(partition) if segment.valid_end_offset >= offset]
        if not later:
            return None
        return self.remote_log_segment_metadata(partition, max(offset, min(later)))

    def remote_log_segment_metadata_by_id(self, segment_id: RemoteLogSegmentId) -> RemoteLogSegmentMetadata | None:
        known = self._log.segments.get(segment_id)
        return None if known is None else self._after_cuts(known)

    def list_remote_log_segments(
        self, partition: TopicIdPartition, min_offset: int = 0
    ) -> Iterator[RemoteLogSegmentMetadata]:
        found = [
            self._after_cuts(segment)
            for segment in self._log.segments.values()
            if segment.topic_id_partition == partition and segment.end_offset >= min_offset
        ]
        return iter(sorted(found, key=lambda segment: (segment.start_offset, segment.segment_id.id.bytes)))

    def stored_segments(self, partition: TopicIdPartition, min_offset: int = 0) -> Iterator[StoredSegment]:
        return map(stored, self.list_remote_log_segments(partition, min_offset))

    def answered_offsets(self, partition: TopicIdPartition, offset: int = 0) -> Iterator[tuple[int, int]]:
        return iter([run for run in self._runs(partition) if run[1] > offset])

    def _runs(self, partition: TopicIdPartition) -> Iterator[tuple[int, int]]:
        ends = {at for one in self._readable(partition) for at in (one.start_offset, one.valid_end_offset + 1)}
        pieces = [(*piece, self.remote_log_segment_metadata(partition, piece[0])) for piece in pairwise(sorted(ends))]
        for _, run in groupby((one for one in pieces if one[2] is not None), key=lambda one: one[2]):
            several = list(run)
            yield several[0][0], several[-1][1]

    def answering_segments(self, partition: TopicIdPartition, offset: int = 0) -> Iterator[StoredSegment]:
        while (segment := self.next_segment(partition, offset)) is not None:
            yield stored(segment)
            offset = segment.valid_end_offset + 1

    def segments_apart(self, partition: TopicIdPartition) -> list[StoredSegment]:
        return [each for each in self.stored_segments(partition) if not self._is_whole(each.metadata)]

    def cover_size(self, partition: TopicIdPartition) -> CoverSize:
        whole = [each for each in self.list_remote_log_segments(partition) if self._is_whole(each)]
        offsets = sum(following - first for first, following in self._runs(partition))
        return CoverSize(len(whole), sum(each.segment_size_bytes for each in whole), offsets)

    def _is_whole(self, segment: RemoteLogSegmentMetadata) -> bool:
        readable, orders = self._readable(segment.topic_id_partition), self._log.begin_order
        later = [each for each in readable if orders.get(each.segment_id, 0) > orders.get(segment.segment_id, 0)]
        first, last = segment.start_offset, segment.end_offset
        is_alone = all(each.start_offset > last or each.valid_end_offset < first for each in later)
        return is_alone and segment in readable and segment.cut_at is None

    def earliest_offset(self, partition: TopicIdPartition) -> int | None:
        return min((segment.start_offset for segment in self._readable(partition)), default=None)

    def remote_end_offset(self, partition: TopicIdPartition) -> int | None:
        return max((segment.valid_end_offset for segment in self._readable(partition)), default=None)

    def cuts(self, partition: TopicIdPartition) -> list[Cut]:
        return sorted(cut for (known, *_), cut in self._log.recorded_cuts.items() if known == partition)

    def log_start_offset(self, partition: TopicIdPartition) -> int | None:
        starts = self.log_starts(partition)
        return starts[0].offset if starts else self.earliest_offset(partition)

    def log_starts(self, partition: TopicIdPartition) -> list[LogStart]:
        standing = [
            start
            for start in self._log.all_log_starts.get(partition, ())
            if start.deletes and self._stands(partition, start)
        ]
        return sorted(standing, key=lambda start: (start.position, start.reason, start.last_epoch), reverse=True)

    def recorded_log_starts(self, partition: TopicIdPartition) -> list[LogStart]:
        return list(self._log.all_log_starts.get(partition, ()))

    def _stands(self, partition: TopicIdPartition, start: LogStart) -> bool:
        last = self.last_below(partition, start.offset)
        return last is None or start.may_follow(*last)

    def last_below(self, partition: TopicIdPartition, offset: int) -> OffsetAndEpoch | None:
        below = [each for each in self._readable(partition) if each.start_offset < offset]
        last = max((min(each.valid_end_offset, offset - 1) for each in below), default=0)
        one = self.remote_log_segment_metadata(partition, last) if below else None
        return None if one is None else OffsetAndEpoch(last, leader_epoch_at(one.segment_leader_epochs, last))

    def local_log_start(self, partition: TopicIdPartition) -> OffsetAndEpoch | None:
        return self._log.local_log_starts.get(partition)

    def gaps(self, partition: TopicIdPartition) -> list[LogGap]:
        return sorted(self._log.recorded_gaps.get(partition, {}).values())

    def gap_at(self, partition: TopicIdPartition, offset: int) -> LogGap | None:
        return next((gap for gap in self.gaps(partition) if gap.holds(offset)), None)

    def topic_deletions(self) -> dict[UUID, TopicDeletionUpdate]:
        return self._log.topic_deletion_records

    def missing_topics(self) -> dict[UUID, int]:
        return self._log.missing

    def log_record_keys(self, partition: TopicIdPartition) -> list[RecordKey]:
        return [
            *(log_start_key(partition, each) for each in self.recorded_log_starts(partition)),
            *(log_gap_key(partition, each.first_offset) for each in self.gaps(partition)),
            *(key_of(CutUpdate.of(partition, "", 0, each)) for each in self.cuts(partition)),
            *(key_of(each) for each in self.copy_plans(partition)),
            RecordKey(LOCAL_LOG_START_API_KEY, partition),
        ]

    def is_known(self, partition: TopicIdPartition) -> bool:
        return partition in self.partitions()

    def remote_partition_delete_state(self, partition: TopicIdPartition) -> RemotePartitionDeleteState | None:
        return self._log.deletions.get(partition)

    def topic_tier_config(self, topic_id: UUID) -> Mapping[str, str]:
        return self._log.tier_configs.get(TopicIdPartition(topic_id, 0), {})

    def topics_with_tier_config(self) -> list[TopicIdPartition]:
        return list(self._log.tier_configs)

    def is_tiered(self, topic_id: UUID) -> bool:
        return any(partition.topic_id == topic_id for partition in self.partitions())

    def partitions(self) -> list[TopicIdPartition]:
        known = {segment.topic_id_partition for segment in self._log.segments.values()}
        known |= set(self._log.all_log_starts) | set(self._log.local_log_starts) | set(self._log.recorded_gaps)
        known |= {
            partition
            for partition, state in self._log.deletions.items()
            if state is not RemotePartitionDeleteState.DELETE_PARTITION_FINISHED
        }
        return sorted(known, key=lambda partition: (partition.topic_id.bytes, partition.partition))

    def deleted_segments(
        self, partition: TopicIdPartition | None = None, until_ms: int | None = None
    ) -> list[RemoteLogSegmentMetadata]:
        return [
            one
            for one in self._log.deleted.values()
            if partition in (None, one.topic_id_partition) and (until_ms is None or one.event_timestamp_ms <= until_ms)
        ]

    def copy_plans(self, partition: TopicIdPartition) -> list[CopyPlan]:
        return [plan for plan in self._log.plans.values() if plan.topic_id_partition == partition]

    def tier_marker(self, location: str) -> TierMarkerUpdate | None:
        return self._log.markers.get(location)

    def seen_at_ms(self, segment_id: RemoteLogSegmentId) -> int | None:
        return self._log.seen.get(segment_id)
