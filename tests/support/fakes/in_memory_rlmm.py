"""`InMemoryRemoteLogMetadataManager`: a model of a metadata manager over dictionaries, without records and state.

It computes every answer from the list of all segments, in the obvious way, and shares only values with the product. So
tests compare the product's managers and their state with it. Unit tests of one process use it too, and set `fresh`,
`owned` and `fail_writes`. `metadata_topic.py` has the product's own manager, for tests of several processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from uuid import UUID

from tests.support.fakes.log_starts import makes_needless, replaces
from tests.support.fakes.stored_segments import stored
from tests.support.tiers.segment_metadata import with_update
from tiers.errors import InvalidTransitionError, OwnershipLostError, RemoteLogMetadataNotReadyError
from tiers.metadata.remote_log_metadata_manager import MetadataPosition, MetadataStatus
from tiers.metadata.tenure import Tenure
from tiers.model.copy_plan import CopyPlan
from tiers.model.ids import TIER_PARTITION, RemoteLogSegmentId, TopicIdPartition
from tiers.model.log_start import LogGap, LogStart, OffsetAndEpoch
from tiers.model.segment_metadata import (
    Cut,
    RemoteLogSegmentMetadata,
    RemoteLogSegmentMetadataUpdate,
    RemotePartitionDeleteMetadata,
    TierMarkerUpdate,
    TopicDeletionUpdate,
    leader_epoch_at,
)
from tiers.model.segment_state import (
    RemoteLogSegmentState,
    RemotePartitionDeleteState,
    is_valid_partition_transition,
    is_valid_transition,
)
from tiers.model.stored_segment import CoverSize, StoredSegment

IN_MEMORY_TOPIC_ID = UUID(int=9)
"""The topic id of the metadata topic, which does not exist here."""


@dataclass
class InMemoryRemoteLogMetadataManager:
    clock_ms: Callable[[], int] = lambda: time.monotonic_ns() // 1_000_000
    wall_clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000
    fresh: bool = True
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

    async def ensure_fresh(self, partition: TopicIdPartition, max_age_ms: int, timeout_ms: int) -> None:
        if not self.fresh:
            raise RemoteLogMetadataNotReadyError(f"metadata of {partition} is not fresh")

    def is_fresh(self, partition: TopicIdPartition, max_age_ms: int) -> bool:
        return self.fresh

    def is_final(self) -> bool:
        return self.final

    def _readable(self, partition: TopicIdPartition) -> list[RemoteLogSegmentMetadata]:
        finished = [
            self._cut(segment)
            for segment in self.segments.values()
            if segment.topic_id_partition == partition and segment.state is RemoteLogSegmentState.COPY_SEGMENT_FINISHED
        ]
        return [segment for segment in finished if not segment.is_cut_off]

    def _cut(self, segment: RemoteLogSegmentMetadata) -> RemoteLogSegmentMetadata:
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
        return max(holders, key=lambda segment: self.begin_order.get(segment.segment_id, 0), default=None)

    def next_segment(self, partition: TopicIdPartition, offset: int) -> RemoteLogSegmentMetadata | None:
        later = [segment.start_offset for segment in self._readable(partition) if segment.valid_end_offset >= offset]
        if not later:
            return None
        return self.remote_log_segment_metadata(partition, max(offset, min(later)))

    def remote_log_segment_metadata_by_id(self, segment_id: RemoteLogSegmentId) -> RemoteLogSegmentMetadata | None:
        known = self.segments.get(segment_id)
        return None if known is None else self._cut(known)

    def list_remote_log_segments(
        self, partition: TopicIdPartition, min_offset: int = 0
    ) -> Iterator[RemoteLogSegmentMetadata]:
        found = [
            self._cut(segment)
            for segment in self.segments.values()
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
        readable, orders = self._readable(segment.topic_id_partition), self.begin_order
        later = [each for each in readable if orders.get(each.segment_id, 0) > orders.get(segment.segment_id, 0)]
        first, last = segment.start_offset, segment.end_offset
        is_alone = all(each.start_offset > last or each.valid_end_offset < first for each in later)
        return is_alone and segment in readable and segment.cut_at is None

    def earliest_offset(self, partition: TopicIdPartition) -> int | None:
        return min((segment.start_offset for segment in self._readable(partition)), default=None)

    def remote_end_offset(self, partition: TopicIdPartition) -> int | None:
        return max((segment.valid_end_offset for segment in self._readable(partition)), default=None)

    def cuts(self, partition: TopicIdPartition) -> list[Cut]:
        return sorted(cut for (known, *_), cut in self.recorded_cuts.items() if known == partition)

    def log_start_offset(self, partition: TopicIdPartition) -> int | None:
        starts = self.log_starts(partition)
        return starts[0].offset if starts else self.earliest_offset(partition)

    def log_starts(self, partition: TopicIdPartition) -> list[LogStart]:
        standing = [
            start
            for start in self.all_log_starts.get(partition, ())
            if start.deletes and self._stands(partition, start)
        ]
        return sorted(standing, key=lambda start: (start.position, start.reason, start.last_epoch), reverse=True)

    def recorded_log_starts(self, partition: TopicIdPartition) -> list[LogStart]:
        return list(self.all_log_starts.get(partition, ()))

    def _stands(self, partition: TopicIdPartition, start: LogStart) -> bool:
        below = [each for each in self._readable(partition) if each.start_offset < start.offset]
        last = max((min(each.valid_end_offset, start.offset - 1) for each in below), default=0)
        one = self.remote_log_segment_metadata(partition, last) if below else None
        return one is None or start.may_follow(last, leader_epoch_at(one.segment_leader_epochs, last))

    def local_log_start(self, partition: TopicIdPartition) -> OffsetAndEpoch | None:
        return self.local_log_starts.get(partition)

    def gaps(self, partition: TopicIdPartition) -> list[LogGap]:
        return sorted(self.recorded_gaps.get(partition, {}).values())

    def gap_at(self, partition: TopicIdPartition, offset: int) -> LogGap | None:
        return next((gap for gap in self.gaps(partition) if gap.holds(offset)), None)

    def topic_deletions(self) -> Mapping[UUID, TopicDeletionUpdate]:
        return self.topic_deletion_records

    def missing_topics(self) -> Mapping[UUID, int]:
        return self.missing

    def is_known(self, partition: TopicIdPartition) -> bool:
        return partition in self.partitions()

    def remote_partition_delete_state(self, partition: TopicIdPartition) -> RemotePartitionDeleteState | None:
        return self.deletions.get(partition)

    def topic_tier_config(self, topic_id: UUID) -> Mapping[str, str]:
        return self.tier_configs.get(TopicIdPartition(topic_id, 0), {})

    def topics_with_tier_config(self) -> list[TopicIdPartition]:
        return list(self.tier_configs)

    def is_tiered(self, topic_id: UUID) -> bool:
        return any(partition.topic_id == topic_id for partition in self.partitions())

    def partitions(self) -> list[TopicIdPartition]:
        known = {segment.topic_id_partition for segment in self.segments.values()}
        known |= set(self.all_log_starts) | set(self.local_log_starts) | set(self.recorded_gaps)
        known |= {
            partition
            for partition, state in self.deletions.items()
            if state is not RemotePartitionDeleteState.DELETE_PARTITION_FINISHED
        }
        return sorted(known, key=lambda partition: (partition.topic_id.bytes, partition.partition))

    async def add_remote_log_segment_metadata(self, metadata: RemoteLogSegmentMetadata) -> None:
        if metadata.state is not RemoteLogSegmentState.COPY_SEGMENT_STARTED:
            raise InvalidTransitionError(f"a new segment cannot be {metadata.state.name}")
        known = self.segments.get(metadata.segment_id)
        if known is not None and known.state is not RemoteLogSegmentState.COPY_SEGMENT_STARTED:
            raise InvalidTransitionError(f"the segment is {known.state.name} already")
        self._write(metadata.topic_id_partition)
        self.begin_order[metadata.segment_id] = self.written
        self.deleted.pop(metadata.segment_id, None)
        self.segments[metadata.segment_id] = replace(metadata, event_timestamp_ms=self.wall_clock_ms())

    async def update_remote_log_segment_metadata(self, update: RemoteLogSegmentMetadataUpdate) -> None:
        known = self.segments.get(update.segment_id)
        if (
            update.state is RemoteLogSegmentState.COPY_SEGMENT_STARTED
            or known is None
            or not is_valid_transition(known.state, update.state)
        ):
            source = None if known is None else known.state.name
            raise InvalidTransitionError(f"from {source} to {update.state.name}")
        self._write(update.segment_id.topic_id_partition)
        moved = with_update(known, replace(update, event_timestamp_ms=self.wall_clock_ms()))
        if update.state is RemoteLogSegmentState.DELETE_SEGMENT_FINISHED:
            del self.segments[update.segment_id]
            self.deleted[update.segment_id] = moved
            return
        self.segments[update.segment_id] = moved
        if update.state is RemoteLogSegmentState.COPY_SEGMENT_FINISHED:
            self.seen.setdefault(update.segment_id, self.clock_ms())

    def deleted_segments(
        self, partition: TopicIdPartition | None = None, until_ms: int | None = None
    ) -> list[RemoteLogSegmentMetadata]:
        return [
            one
            for one in self.deleted.values()
            if partition in (None, one.topic_id_partition) and (until_ms is None or one.event_timestamp_ms <= until_ms)
        ]

    async def forget_deleted_segments(self, segments: Sequence[RemoteLogSegmentId]) -> None:
        for segment_id in segments:
            self._write(segment_id.topic_id_partition)
            if self.deleted.pop(segment_id, None) is None:
                raise InvalidTransitionError(f"{segment_id.id} is no deleted segment that is kept")

    async def put_copy_plan(self, plan: CopyPlan) -> None:
        self._write(plan.topic_id_partition)
        self.plans.setdefault(plan.plan_id, plan)
        for announced in plan.announced():
            self.begin_order.setdefault(announced.segment_id, self.written)
            self.segments.setdefault(announced.segment_id, replace(announced, event_timestamp_ms=self.wall_clock_ms()))

    async def end_copy_plan(self, plan: CopyPlan) -> None:
        planned = [self.segments[one] for one in plan.segment_ids() if one in self.segments]
        if any(one.state is RemoteLogSegmentState.DELETE_SEGMENT_STARTED for one in planned):
            raise InvalidTransitionError("a deletion has not ended")
        self._write(plan.topic_id_partition)
        self.plans.pop(plan.plan_id, None)
        for one in planned:
            if one.state is RemoteLogSegmentState.COPY_SEGMENT_STARTED and one.segment_size_bytes == 0:
                del self.segments[one.segment_id]

    def copy_plans(self, partition: TopicIdPartition) -> list[CopyPlan]:
        return [plan for plan in self.plans.values() if plan.topic_id_partition == partition]

    async def put_named_cut(self, partition: TopicIdPartition, leader_epoch: int, offset: int) -> None:
        self._write_anybodys()
        self._record_cut(partition, Cut(leader_epoch, offset, self.wall_clock_ms()))
        for known in list(self.all_log_starts.get(partition, [])):
            if known.deletes and known.offset > offset and known.leader_epoch < leader_epoch:
                self._end_log_start(partition, known)

    async def put_cut(
        self, partition: TopicIdPartition, leader_epoch: int, offset: int, *, is_proved: bool = True
    ) -> None:
        self._write(partition)
        self._record_cut(partition, Cut(leader_epoch, offset, self.wall_clock_ms(), is_proved))

    def _record_cut(self, partition: TopicIdPartition, cut: Cut) -> None:
        self.recorded_cuts[partition, cut.leader_epoch, cut.offset] = cut
        trim = self.local_log_starts.get(partition)
        if trim is not None and trim.offset > cut.offset and trim.leader_epoch < cut.leader_epoch:
            del self.local_log_starts[partition]

    async def put_remote_partition_delete_metadata(self, metadata: RemotePartitionDeleteMetadata) -> None:
        partition = metadata.topic_id_partition
        known = self.deletions.get(partition)
        if not is_valid_partition_transition(known, metadata.state):
            raise InvalidTransitionError(f"from {known} to {metadata.state.name}")
        self._write(partition)
        self.deletions[partition] = metadata.state
        if metadata.state is RemotePartitionDeleteState.DELETE_PARTITION_FINISHED:
            self.segments = {
                key: segment for key, segment in self.segments.items() if segment.topic_id_partition != partition
            }
            self.recorded_cuts = {key: cut for key, cut in self.recorded_cuts.items() if key[0] != partition}
            self.all_log_starts.pop(partition, None)
            self.local_log_starts.pop(partition, None)
            self.recorded_gaps.pop(partition, None)
            self.plans = {key: one for key, one in self.plans.items() if one.topic_id_partition != partition}

    async def put_local_log_start(self, partition: TopicIdPartition, start: OffsetAndEpoch) -> None:
        self._write(partition)
        self.local_log_starts[partition] = start

    async def put_log_start(
        self,
        partition: TopicIdPartition,
        start: LogStart,
        timeout_ms: int | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        check()
        self._write_anybodys()
        known = self.all_log_starts.setdefault(partition, [])
        if start.deletes:
            covering = [one for one in self.log_starts(partition) if makes_needless(one, start)]
            if not covering:
                known[:] = [one for one in known if not replaces(start, one)]
                known.append(start)
        elif not known:
            known.append(start)

    async def end_log_start(self, partition: TopicIdPartition, start: LogStart) -> None:
        self._write(partition)
        self._end_log_start(partition, start)

    def _end_log_start(self, partition: TopicIdPartition, start: LogStart) -> None:
        known = [one for one in self.all_log_starts.pop(partition, []) if one != start]
        if known:
            self.all_log_starts[partition] = known
        trim = self.local_log_starts.get(partition)
        if trim is not None and start.offset >= trim.offset and start.leader_epoch >= trim.leader_epoch:
            del self.local_log_starts[partition]

    async def put_log_gap(self, partition: TopicIdPartition, gap: LogGap, leader_epoch: int) -> None:
        self._write(partition)
        self.recorded_gaps.setdefault(partition, {})[gap.first_offset] = gap

    async def end_log_gap(self, partition: TopicIdPartition, gap: LogGap) -> None:
        self._write(partition)
        self.recorded_gaps.get(partition, {}).pop(gap.first_offset, None)

    async def restore(
        self,
        partition: TopicIdPartition,
        *,
        segments: Sequence[RemoteLogSegmentMetadata] = (),
        cuts: Sequence[Cut] = (),
        gaps: Sequence[LogGap] = (),
        log_starts: Sequence[LogStart] = (),
        local_log_start: OffsetAndEpoch | None = None,
    ) -> None:
        for cut in cuts:
            await self.put_cut(partition, cut.leader_epoch, cut.offset, is_proved=cut.is_proved)
        for gap in gaps:
            await self.put_log_gap(partition, gap, -1)
        for start in log_starts:
            await self.put_log_start(partition, start)
        if local_log_start is not None:
            await self.put_local_log_start(partition, local_log_start)
        for segment in segments:
            if self.remote_log_segment_metadata_by_id(segment.segment_id) is None:
                await self.add_remote_log_segment_metadata(segment)

    def tier_marker(self, location: str) -> TierMarkerUpdate | None:
        return self.markers.get(location)

    async def put_tier_marker(self, location: str, marker_id: UUID, *, is_confirmed: bool) -> None:
        self._write_anybodys()
        known = self.markers.get(location)
        if known is None or known.marker_id == marker_id:
            self.markers[location] = TierMarkerUpdate(TIER_PARTITION, "", 0, location, marker_id, is_confirmed)

    async def put_topic_deletion(self, topic_id: UUID, topic: str, *, is_confirmed: bool) -> None:
        self._write_anybodys()
        partition = TopicIdPartition(topic_id, 0, topic)
        self.topic_deletion_records[topic_id] = TopicDeletionUpdate(partition, "", self.wall_clock_ms(), is_confirmed)

    async def end_topic_deletion(self, topic_id: UUID) -> None:
        self._write(TopicIdPartition(topic_id, 0))
        self.topic_deletion_records.pop(topic_id, None)

    async def put_topic_missing(self, topic_id: UUID, topic: str, *, is_missing: bool) -> None:
        self._write(TopicIdPartition(topic_id, 0, topic))
        if is_missing:
            self.missing.setdefault(topic_id, self.wall_clock_ms())
        else:
            self.missing.pop(topic_id, None)

    def metadata_topic_id(self) -> UUID | None:
        return self.topic_id

    def position(self, partition: TopicIdPartition) -> MetadataPosition:
        return MetadataPosition(IN_MEMORY_TOPIC_ID, 0, self.written)

    async def confirms(self, partition: TopicIdPartition, position: MetadataPosition, timeout_ms: int) -> bool:
        is_confirmed = self.is_position_confirmed and partition not in self.unconfirmed
        reached = self.position(partition)
        return is_confirmed and position.topic_id == reached.topic_id and position.next_offset <= reached.next_offset

    async def change_topic_tier_config(
        self,
        topic_id: UUID,
        topic: str,
        changes: Mapping[str, str | None],
        check: Callable[[Mapping[str, str]], None] = lambda before: None,
    ) -> None:
        if self.fail_writes is not None:
            raise self.fail_writes
        check(self.topic_tier_config(topic_id))
        self.written += 1
        partition = TopicIdPartition(topic_id, 0, topic)
        merged = {**self.tier_configs.pop(partition, {}), **changes}
        config = {key: value for key, value in merged.items() if value is not None}
        if config:
            self.tier_configs[partition] = config

    def owns(self, partition: TopicIdPartition) -> bool:
        return self.owned

    def tenure(self, partition: TopicIdPartition) -> Tenure | None:
        """A fake that is not the owner waits to be it again, if a test says so."""
        return Tenure(0, self.tenures) if self.owned or self.is_awaiting else None

    def seen_at_ms(self, segment_id: RemoteLogSegmentId) -> int | None:
        return self.seen.get(segment_id)

    async def clock_skew_ms(self, partition: TopicIdPartition, anew: bool = False) -> int:
        if anew and self.true_skew_ms is not None:
            self.skew_ms = self.true_skew_ms
        return self.skew_ms

    def status(self) -> MetadataStatus:
        age_ms = 0 if self.knows_all_partitions else None
        return MetadataStatus(None, age_ms, frozenset({0}) if self.owned else frozenset(), 0, 0, self.skew_ms)

    async def open(self) -> None:
        return

    async def close(self) -> None:
        return

    def _write_anybodys(self) -> None:
        if self.fail_writes is not None:
            raise self.fail_writes
        self.written += 1

    def _write(self, partition: TopicIdPartition) -> None:
        if self.fail_writes is None and not self.owned:
            raise OwnershipLostError(f"{partition} is owned by another member")
        self._write_anybodys()
