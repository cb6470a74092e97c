"""`RecordBackedMetadataManager` maps the calls of `RemoteLogMetadataManager` to records and to the materialised state.

Every write becomes records (`written_records`), and the state that those records build answers every read. A subclass
appends the records and follows the log that holds them. `RecordLogMetadataManager` does this for a log with one writer,
which is the shortest way to a manager of one's own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from uuid import UUID

from tiers.metadata.records.record_types import KeyAndValue
from tiers.metadata.records.serde import (
    MetadataRecord,
    log_gap_key,
    topic_deletion_key,
    topic_missing_key,
)
from tiers.metadata.state.state_backed_reader import StateBackedReader
from tiers.metadata.written_records import (
    CheckTierConfig,
    changed_tier_config,
    is_log_start_known,
    key_and_value,
    records_of_cut,
    records_of_deletion,
    records_of_ended_log_starts,
    records_of_forgotten_deletions,
    records_of_log_start,
    records_of_named_cut,
    records_of_new_segment,
    records_of_plan_end,
    records_of_update,
    tombstone,
)
from tiers.model.copy_plan import CopyPlan
from tiers.model.ids import TIER_PARTITION, RemoteLogSegmentId, TopicIdPartition
from tiers.model.log_start import UNKNOWN_EPOCH, LogGap, LogStart, OffsetAndEpoch
from tiers.model.segment_metadata import (
    Cut,
    CutUpdate,
    LocalLogStartUpdate,
    LogGapUpdate,
    LogStartOffsetUpdate,
    RemoteLogSegmentMetadata,
    RemoteLogSegmentMetadataUpdate,
    RemotePartitionDeleteMetadata,
    TierMarkerUpdate,
    TopicDeletionUpdate,
    TopicMissingUpdate,
    TopicTierConfigUpdate,
)
from tiers.model.segment_state import RemoteLogSegmentState

MakeRecords = Callable[[], Sequence[KeyAndValue]]
"""Makes the records of one call from the state. It may raise an error, which reaches the caller of the manager."""

_SEEN_KEPT = 100_000


class SegmentsSeen:
    """Remembers when this process saw segments become COPY_SEGMENT_FINISHED."""

    def __init__(self, clock_ms: Callable[[], int]) -> None:
        self._clock_ms = clock_ms
        self._seen_at_ms: dict[RemoteLogSegmentId, int] = {}
        self.opened_at_ms = 0
        """When the state was opened, or a forgotten segment was seen, if that is later.

        Every segment without an entry counts as seen then."""

    def finished(self, segment_ids: Sequence[RemoteLogSegmentId]) -> None:
        now_ms = self._clock_ms()
        for segment_id in segment_ids:
            self._seen_at_ms.setdefault(segment_id, now_ms)
        # A process that reads a whole topic forgets segments within a second, also one that has just become readable.
        while len(self._seen_at_ms) > _SEEN_KEPT:
            forgotten_ms = self._seen_at_ms.pop(next(iter(self._seen_at_ms)))
            self.opened_at_ms = max(self.opened_at_ms, forgotten_ms)

    def at_ms(self, segment_id: RemoteLogSegmentId) -> int:
        return self._seen_at_ms.get(segment_id, self.opened_at_ms)


class RecordBackedMetadataManager(StateBackedReader, ABC):
    """Implements the reads, and all writes over the four abstract methods.

    The subclass opens the state and closes it."""

    def __init__(self, writer: str, clock_ms: Callable[[], int], wall_clock_ms: Callable[[], int]) -> None:
        super().__init__()
        self._writer = writer
        """The name of this process in the records that it writes."""
        self._clock_ms = clock_ms
        self._wall_clock_ms = wall_clock_ms
        self._seen = SegmentsSeen(clock_ms)

    @abstractmethod
    async def _append_as_owner(self, partition: TopicIdPartition, records: MakeRecords) -> None:
        """Appends the records as the owner of `partition`, in one step, and returns after the state has them.

        `records` is called when the state has all records of earlier owners and of this process. Raises
        `OwnershipLostError` when this process is not the owner; then no reader ever sees the records."""

    @abstractmethod
    async def _append(self, partition: TopicIdPartition, records: Sequence[KeyAndValue]) -> None:
        """Appends records that need no ownership, and returns after the state has them."""

    @abstractmethod
    async def _append_when_fresh(
        self, partition: TopicIdPartition, records: MakeRecords, timeout_ms: int | None
    ) -> None:
        """Does the same, but calls `records` when the state has all records that were appended before the call.

        Without records, it appends nothing. None: the timeout of every other write."""

    @abstractmethod
    async def _append_in_turn(self, partition: TopicIdPartition, records: MakeRecords) -> None:
        """Does the same, and no other process appends in turn between the call of `records` and the append.

        `records` may be called more than once."""

    def seen_at_ms(self, segment_id: RemoteLogSegmentId) -> int | None:
        metadata = self.remote_log_segment_metadata_by_id(segment_id)
        if metadata is None or metadata.state < RemoteLogSegmentState.COPY_SEGMENT_FINISHED:
            return None
        return self._seen.at_ms(segment_id)

    async def add_remote_log_segment_metadata(self, metadata: RemoteLogSegmentMetadata) -> None:
        await self._append_as_owner(metadata.topic_id_partition, lambda: records_of_new_segment(self._state, metadata))

    async def update_remote_log_segment_metadata(self, update: RemoteLogSegmentMetadataUpdate) -> None:
        partition = update.segment_id.topic_id_partition
        await self._append_as_owner(partition, lambda: records_of_update(self._state, update))

    async def forget_deleted_segments(self, segments: Sequence[RemoteLogSegmentId]) -> None:
        partition = segments[0].topic_id_partition
        await self._append_as_owner(partition, lambda: records_of_forgotten_deletions(self._state, segments))

    async def put_copy_plan(self, plan: CopyPlan) -> None:
        record = replace(plan, writer=self._writer)
        await self._append_as_owner(plan.topic_id_partition, lambda: [key_and_value(record)])

    async def end_copy_plan(self, plan: CopyPlan) -> None:
        await self._append_as_owner(plan.topic_id_partition, lambda: records_of_plan_end(self._state, plan))

    async def put_remote_partition_delete_metadata(self, metadata: RemotePartitionDeleteMetadata) -> None:
        await self._append_as_owner(metadata.topic_id_partition, lambda: records_of_deletion(self._state, metadata))

    async def put_cut(
        self, partition: TopicIdPartition, leader_epoch: int, offset: int, *, is_proved: bool = True
    ) -> None:
        update = CutUpdate(partition, self._writer, self._wall_clock_ms(), leader_epoch, offset, is_proved)
        await self._append_as_owner(partition, lambda: records_of_cut(self._state, update))

    async def put_named_cut(self, partition: TopicIdPartition, leader_epoch: int, offset: int) -> None:
        update = CutUpdate(partition, self._writer, self._wall_clock_ms(), leader_epoch, offset)
        await self._append_when_fresh(partition, lambda: records_of_named_cut(self._state, update), None)

    async def put_local_log_start(self, partition: TopicIdPartition, start: OffsetAndEpoch) -> None:
        update = LocalLogStartUpdate(partition, self._writer, self._wall_clock_ms(), start)
        await self._append_as_owner(partition, lambda: [key_and_value(update)])

    async def put_log_start(
        self,
        partition: TopicIdPartition,
        start: LogStart,
        timeout_ms: int | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        def records() -> Sequence[KeyAndValue]:
            check()
            if is_log_start_known(self._state, partition, start):
                return []
            update = LogStartOffsetUpdate(partition, self._writer, self._wall_clock_ms(), start)
            return records_of_log_start(self._state, update)

        await self._append_when_fresh(partition, records, timeout_ms)

    async def end_log_start(self, partition: TopicIdPartition, start: LogStart) -> None:
        await self._append_as_owner(partition, lambda: records_of_ended_log_starts(self._state, partition, [start]))

    async def put_log_gap(self, partition: TopicIdPartition, gap: LogGap, leader_epoch: int) -> None:
        update = LogGapUpdate(partition, self._writer, self._wall_clock_ms(), gap, leader_epoch)
        await self._append_as_owner(partition, lambda: [key_and_value(update)])

    async def end_log_gap(self, partition: TopicIdPartition, gap: LogGap) -> None:
        await self._append_as_owner(partition, lambda: [tombstone(log_gap_key(partition, gap.first_offset))])

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
        named = partition, self._writer, self._wall_clock_ms()
        restored: list[MetadataRecord] = [
            *(CutUpdate(*named, each.leader_epoch, each.offset, each.is_proved) for each in cuts),
            *(LogGapUpdate(*named, each, UNKNOWN_EPOCH) for each in gaps),
            *(LogStartOffsetUpdate(*named, each) for each in log_starts),
            *([] if local_log_start is None else [LocalLogStartUpdate(*named, local_log_start)]),
        ]

        def records() -> Sequence[KeyAndValue]:
            lost = [each for each in segments if self.remote_log_segment_metadata_by_id(each.segment_id) is None]
            return [key_and_value(each) for each in (*restored, *lost)]

        await self._append_in_turn(partition, records)

    async def put_tier_marker(self, location: str, marker_id: UUID, *, is_confirmed: bool) -> None:
        now_ms = self._wall_clock_ms()
        update = TierMarkerUpdate(TIER_PARTITION, self._writer, now_ms, location, marker_id, is_confirmed)

        def records() -> Sequence[KeyAndValue]:
            known = self.tier_marker(location)
            is_needed = known is None or (known.marker_id == marker_id and is_confirmed and not known.is_confirmed)
            return [key_and_value(update)] if is_needed else []

        await self._append_in_turn(TIER_PARTITION, records)

    async def put_topic_deletion(self, topic_id: UUID, topic: str, *, is_confirmed: bool) -> None:
        partition = TopicIdPartition(topic_id, 0, topic)
        update = TopicDeletionUpdate(partition, self._writer, self._wall_clock_ms(), is_confirmed)
        await self._append(partition, [key_and_value(update)])

    async def end_topic_deletion(self, topic_id: UUID) -> None:
        partition = TopicIdPartition(topic_id, 0)
        await self._append_as_owner(partition, lambda: [tombstone(topic_deletion_key(partition))])

    async def put_topic_missing(self, topic_id: UUID, topic: str, *, is_missing: bool) -> None:
        partition = TopicIdPartition(topic_id, 0, topic)
        update = TopicMissingUpdate(partition, self._writer, self._wall_clock_ms())
        record = key_and_value(update) if is_missing else tombstone(topic_missing_key(partition))
        await self._append_as_owner(partition, lambda: [record])

    async def change_topic_tier_config(
        self,
        topic_id: UUID,
        topic: str,
        changes: Mapping[str, str | None],
        check: CheckTierConfig = lambda before: None,
    ) -> None:
        partition = TopicIdPartition(topic_id, 0, topic)

        def records() -> Sequence[KeyAndValue]:
            before = self.topic_tier_config(topic_id)
            check(before)
            known = TopicTierConfigUpdate(partition, self._writer, self._wall_clock_ms(), before)
            changed = changed_tier_config(known, changes)
            return [] if changed is None else [changed]

        await self._append_in_turn(partition, records)
