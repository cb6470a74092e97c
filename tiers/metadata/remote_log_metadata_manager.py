"""`RemoteLogMetadataManager` (KIP-405): writes the metadata of remote segments to a `MetadataLog`.

Every write becomes records, which depend on the state at that time. The state that they build answers every read. Most
writes are the owner's. Those that need no ownership say so.

Every update repeats the custom metadata, since compaction may remove the record before it. When a subject is gone, all
of its keys get tombstones (docs/design.md, "Metadata"). A write that the states do not allow raises
`InvalidTransitionError` (docs/semantics.md 11.2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from uuid import UUID

from tiers.broker.client import wall_clock_ms
from tiers.errors import InvalidTransitionError, RemoteLogMetadataError
from tiers.metadata.changes import CheckTierConfig
from tiers.metadata.metadata_log import Append, MetadataLog
from tiers.metadata.records.serde import (
    LOCAL_LOG_START_API_KEY,
    TOPIC_DELETION_API_KEY,
    TOPIC_MISSING_API_KEY,
    KeyAndValue,
    MetadataRecord,
    RecordKey,
    key_and_value,
    key_of,
    log_gap_key,
    log_start_key,
    nothing_key,
    segment_keys,
    tombstone,
)
from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.model.copy_plan import NOT_MEASURED_BYTES, CopyPlan
from tiers.model.ids import TIER_PARTITION, RemoteLogSegmentId, TopicIdPartition
from tiers.model.log_start import UNKNOWN_EPOCH, LogGap, LogStart, LogStartReason, OffsetAndEpoch
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
    is_valid_partition_transition,
    is_valid_transition,
)


class RemoteLogMetadataManager:
    """Writes metadata. Each write returns after the state shows it, and raises `RemoteLogMetadataError`.

    After an error or a cancellation of a write, the caller does not know whether the write happened."""

    def __init__(self, log: MetadataLog, wall_clock_ms: Callable[[], int] = wall_clock_ms) -> None:
        self.log = log
        self._wall_clock_ms = wall_clock_ms

    @property
    def state(self) -> RemoteLogMetadataState:
        return self.log.state

    async def add_remote_log_segment_metadata(self, metadata: RemoteLogSegmentMetadata) -> None:
        """Writes a new segment. Its state must be COPY_SEGMENT_STARTED."""
        if metadata.state is not RemoteLogSegmentState.COPY_SEGMENT_STARTED:
            raise InvalidTransitionError(f"a new segment must be COPY_SEGMENT_STARTED, not {metadata.state.name}")

        def records(state: RemoteLogMetadataState) -> list[KeyAndValue]:
            known = state.remote_log_segment_metadata_by_id(metadata.segment_id)
            if known is not None and known.state is not RemoteLogSegmentState.COPY_SEGMENT_STARTED:
                raise InvalidTransitionError(f"segment {metadata.segment_id.id} is {known.state.name} already")
            return [key_and_value(metadata)]

        await self._as_owner(metadata.topic_id_partition, records)

    async def update_remote_log_segment_metadata(self, update: RemoteLogSegmentMetadataUpdate) -> None:
        """Moves a known segment to a later state. Raises `InvalidTransitionError` for a transition that is invalid."""
        await self._as_owner(update.topic_id_partition, lambda state: records_of_update(state, update))

    async def forget_deleted_segments(self, segments: Sequence[RemoteLogSegmentId]) -> None:
        """Removes every record of segments of one partition that are DELETE_SEGMENT_FINISHED. Their objects are gone.

        `InvalidTransitionError` when a segment has another state, or is forgotten already."""
        partition = segments[0].topic_id_partition

        def records(state: RemoteLogMetadataState) -> list[KeyAndValue]:
            kept = {segment.segment_id for segment in state.deleted_segments(partition)}
            for segment_id in segments:
                if segment_id not in kept:
                    raise InvalidTransitionError(f"{segment_id.id} is no deleted segment that is kept")
            return [tombstone(key) for segment_id in segments for key in segment_keys(segment_id)]

        await self._as_owner(partition, records)

    async def put_copy_plan(self, plan: CopyPlan) -> None:
        """Announces all segments of the plan in one record. Each is COPY_SEGMENT_STARTED from then on."""
        await self._put(replace(plan, writer=self.log.writer))

    async def end_copy_plan(self, plan: CopyPlan) -> None:
        """Forgets the plan's segments that were neither announced nor deleted individually: they have no objects.

        Raises `InvalidTransitionError` while the deletion of such a segment has not ended, since it needs the
        announcement."""

        def records(state: RemoteLogMetadataState) -> list[KeyAndValue]:
            for segment_id in plan.segment_ids():
                known = state.remote_log_segment_metadata_by_id(segment_id)
                if known is not None and known.state is RemoteLogSegmentState.DELETE_SEGMENT_STARTED:
                    raise InvalidTransitionError(
                        f"plan {plan.plan_id} cannot end: the deletion of segment {segment_id.id} has not ended"
                    )
            return [tombstone(key_of(plan))]

        await self._as_owner(plan.topic_id_partition, records)

    async def put_remote_partition_delete_metadata(self, metadata: RemotePartitionDeleteMetadata) -> None:
        """Moves the deletion of a partition to a later state."""
        await self._as_owner(metadata.topic_id_partition, lambda state: records_of_deletion(state, metadata))

    async def put_cut(
        self, partition: TopicIdPartition, leader_epoch: int, offset: int, *, is_proved: bool = True
    ) -> None:
        """Records a CUT. It removes no other one: of several in one leader epoch, the lowest decides.

        In the same step, `local_log_start` ends if it lies above `offset` and is of an earlier leader epoch."""
        update = CutUpdate(*self._named(partition), leader_epoch, offset, is_proved)
        await self._as_owner(partition, lambda state: records_of_cut(state, update))

    async def put_named_cut(self, partition: TopicIdPartition, cut: Cut) -> None:
        """Records a proved CUT at an offset that an operator named, as `put_cut` does. Needs no ownership.

        In the same step, every recorded log start above `offset` ends that was made in an earlier leader epoch: it is
        of the history that is void. The leader may reach that epoch later."""
        update = CutUpdate.of(*self._named(partition), cut)

        def records() -> Sequence[KeyAndValue]:
            recorded = self.state.recorded_log_starts(partition)
            ended = [known for known in recorded if known.is_void(cut.leader_epoch, cut.offset)]
            return [*records_of_cut(self.state, update), *records_of_ended_log_starts(self.state, partition, ended)]

        await self.log.append(partition, records, Append.WHEN_FRESH)

    async def put_local_log_start(self, partition: TopicIdPartition, start: OffsetAndEpoch) -> None:
        """Records that the local log is about to be trimmed to `start`."""
        await self._put(LocalLogStartUpdate(*self._named(partition), start))

    async def put_log_start(
        self,
        partition: TopicIdPartition,
        start: LogStart,
        timeout_ms: int | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Records where the log starts. Needs no ownership.

        No record is needed if `log_starts` has one at or above the offset, of the same leader epoch or a later one.

        The record may have to wait for others, and may be sent again. So `check` is called right before it is sent,
        each time. If it raises an error, nothing more is sent, and the caller gets the error.

        An open transaction of a killed process delays the record until the coordinator ends that transaction, after
        about 20 s. A caller that can wait that long passes `timeout_ms`. None: the timeout of every other write."""

        def records() -> Sequence[KeyAndValue]:
            check()
            if is_log_start_known(self.state, partition, start):
                return []
            return records_of_log_start(self.state, LogStartOffsetUpdate(*self._named(partition), start))

        await self.log.append(partition, records, Append.WHEN_FRESH, timeout_ms)

    async def end_log_start(self, partition: TopicIdPartition, start: LogStart) -> None:
        """Removes the record of a log start that the leader disproves.

        In the same step, `local_log_start` ends if the log start covers it (`LogStart.covers`)."""
        await self._as_owner(partition, lambda state: records_of_ended_log_starts(state, partition, [start]))

    async def put_log_gap(self, partition: TopicIdPartition, gap: LogGap, leader_epoch: int) -> None:
        """Records a gap. It replaces a recorded gap with the same first offset."""
        await self._put(LogGapUpdate(*self._named(partition), gap, leader_epoch))

    async def end_log_gap(self, partition: TopicIdPartition, gap: LogGap) -> None:
        """Removes the record of a gap, for example when the gap lies below the log start."""
        await self._end(log_gap_key(partition, gap.first_offset))

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
        """Records what an operator found that the metadata had lost. Needs no ownership.

        The segments are COPY_SEGMENT_STARTED. Those that the metadata knows are left out."""
        named = self._named(partition)
        restored: list[MetadataRecord] = [
            *(CutUpdate.of(*named, each) for each in cuts),
            *(LogGapUpdate(*named, each, UNKNOWN_EPOCH) for each in gaps),
            *(LogStartOffsetUpdate(*named, each) for each in log_starts),
            *([] if local_log_start is None else [LocalLogStartUpdate(*named, local_log_start)]),
        ]

        def records() -> Sequence[KeyAndValue]:
            lost = [each for each in segments if self.state.remote_log_segment_metadata_by_id(each.segment_id) is None]
            return [key_and_value(each) for each in (*restored, *lost)]

        await self.log.append(partition, records, Append.IN_TURN)

    async def put_tier_marker(self, location: str, marker_id: UUID, *, is_confirmed: bool) -> None:
        """Records the marker of a location, unless another id is recorded. Needs no ownership.

        All processes make their changes one after the other."""
        update = TierMarkerUpdate(*self._named(TIER_PARTITION), location, marker_id, is_confirmed)

        def records() -> Sequence[KeyAndValue]:
            known = self.state.tier_marker(location)
            is_needed = known is None or (known.marker_id == marker_id and is_confirmed and not known.is_confirmed)
            return [key_and_value(update)] if is_needed else []

        await self.log.append(TIER_PARTITION, records, Append.IN_TURN)

    async def put_topic_deletion(self, topic_id: UUID, topic: str, *, is_confirmed: bool) -> None:
        """Records that a client is about to delete the topic, or an operator's word. Needs no ownership."""
        partition = TopicIdPartition(topic_id, 0, topic)
        await self._put(TopicDeletionUpdate(*self._named(partition), is_confirmed), Append.AT_ONCE)

    async def end_topic_deletion(self, topic_id: UUID) -> None:
        """Removes the record of the deletion, when the tier has nothing of the topic, or a broker knows the topic."""
        await self._end(RecordKey(TOPIC_DELETION_API_KEY, TopicIdPartition(topic_id, 0)))

    async def put_topic_missing(self, topic_id: UUID, topic: str, *, is_missing: bool) -> None:
        """Records that no broker knows the topic from now on, or that a broker knows it again."""
        partition = TopicIdPartition(topic_id, 0, topic)
        if is_missing:
            await self._put(TopicMissingUpdate(*self._named(partition)))
        else:
            await self._end(RecordKey(TOPIC_MISSING_API_KEY, partition))

    async def change_topic_tier_config(
        self,
        topic_id: UUID,
        topic: str,
        changes: Mapping[str, str | None],
        check: CheckTierConfig = lambda before: None,
    ) -> None:
        """Sets keys of the topic's tier settings; None removes a key. Needs no ownership.

        All processes make their changes one after the other. `check` is called with the settings right before the
        change. An exception from it reaches the caller, and nothing changes."""
        partition = TopicIdPartition(topic_id, 0, topic)

        def records() -> Sequence[KeyAndValue]:
            before = self.state.topic_tier_config(topic_id)
            check(before)
            config = {key: value for key, value in {**before, **changes}.items() if value is not None}
            update = TopicTierConfigUpdate(*self._named(partition), config)
            changed = [key_and_value(update) if config else tombstone(key_of(update))]
            return [] if config == before else changed

        await self.log.append(partition, records, Append.IN_TURN)

    async def clock_skew_ms(self, partition: TopicIdPartition, anew: bool = False) -> int:
        """Returns how far the clock of `event_timestamp_ms` is ahead of this machine's clock.

        The skew is measured when a record is written. With `anew`, a record is written now."""
        skew_ms = None if anew else self.log.status().clock_skew_ms
        if skew_ms is None:
            await self._end(nothing_key(partition), Append.AT_ONCE)
            skew_ms = self.log.status().clock_skew_ms
        if skew_ms is None:
            raise RemoteLogMetadataError("the brokers return no append time: the metadata topic has no LogAppendTime")
        return skew_ms

    def _named(self, partition: TopicIdPartition) -> tuple[TopicIdPartition, str, int]:
        """Returns the first fields of a record: the partition, the writer and the time."""
        return partition, self.log.writer, self._wall_clock_ms()

    async def _as_owner(
        self, partition: TopicIdPartition, records: Callable[[RemoteLogMetadataState], list[KeyAndValue]]
    ) -> None:
        await self.log.append(partition, lambda: records(self.state), Append.AS_OWNER)

    async def _put(self, record: MetadataRecord, by: Append = Append.AS_OWNER) -> None:
        await self.log.append(key_of(record).topic_id_partition, lambda: [key_and_value(record)], by)

    async def _end(self, key: RecordKey, by: Append = Append.AS_OWNER) -> None:
        await self.log.append(key.topic_id_partition, lambda: [tombstone(key)], by)


def records_of_update(state: RemoteLogMetadataState, update: RemoteLogSegmentMetadataUpdate) -> list[KeyAndValue]:
    if update.state is RemoteLogSegmentState.COPY_SEGMENT_STARTED:
        raise InvalidTransitionError("only the addition of a segment writes COPY_SEGMENT_STARTED, not an update")
    known = state.remote_log_segment_metadata_by_id(update.segment_id)
    if known is None or not is_valid_transition(known.state, update.state):
        source = "an unknown segment" if known is None else known.state.name
        raise InvalidTransitionError(f"segment {update.segment_id.id} cannot move from {source} to {update.state.name}")
    custom_metadata = known.custom_metadata if update.custom_metadata is None else update.custom_metadata
    written = [key_and_value(replace(update, custom_metadata=custom_metadata))]
    is_deleted = update.state is RemoteLogSegmentState.DELETE_SEGMENT_FINISHED
    if is_deleted and known.segment_size_bytes == NOT_MEASURED_BYTES:
        # Only a copy plan announced the segment. The plan may end before the deleted segment is forgotten.
        announced = replace(known, state=RemoteLogSegmentState.COPY_SEGMENT_STARTED)
        written.insert(0, key_and_value(announced))
    return written


def records_of_deletion(state: RemoteLogMetadataState, metadata: RemotePartitionDeleteMetadata) -> list[KeyAndValue]:
    partition = metadata.topic_id_partition
    known = state.remote_partition_delete_state(partition)
    if not is_valid_partition_transition(known, metadata.state):
        source = "no deletion" if known is None else known.name
        raise InvalidTransitionError(f"the deletion of {partition} cannot move from {source} to {metadata.state.name}")
    written = [key_and_value(metadata)]
    if metadata.state is RemotePartitionDeleteState.DELETE_PARTITION_FINISHED:
        segments = (each.segment_id for each in state.list_remote_log_segments(partition))
        written += [tombstone(key) for segment_id in segments for key in segment_keys(segment_id)]
        written += map(tombstone, state.log_record_keys(partition))
        written.append(tombstone(key_of(metadata)))
    return written


def is_log_start_known(state: RemoteLogMetadataState, partition: TopicIdPartition, start: LogStart) -> bool:
    """Returns whether a log start at or above `start` is recorded, so that no record is needed.

    One of an earlier leader epoch may be of another history, and one of the same offset may lack the last epoch."""
    if not start.deletes:
        return bool(state.recorded_log_starts(partition))
    return any(
        known.leader_epoch >= start.leader_epoch
        and (known.offset, known.last_epoch) >= (start.offset, start.last_epoch)
        for known in state.log_starts(partition)
    )


def records_of_log_start(state: RemoteLogMetadataState, update: LogStartOffsetUpdate) -> list[KeyAndValue]:
    """Returns the record of the log start, and a tombstone for each log start that it replaces.

    Of the log starts of users, the highest of each leader epoch stays: a leader may confirm it and disprove those of
    later epochs. The owner applies retention again, so its earlier log starts may go."""
    partition, new = update.topic_id_partition, update.log_start
    replaced = [known for known in state.recorded_log_starts(partition) if _replaces(new, known)]
    return [key_and_value(update), *(tombstone(log_start_key(partition, known)) for known in replaced)]


def records_of_ended_log_starts(
    state: RemoteLogMetadataState, partition: TopicIdPartition, ended: Sequence[LogStart]
) -> list[KeyAndValue]:
    """Returns a tombstone for each log start, and for the recorded trim whose records it deleted.

    Without the log start, the lack of these records would look like lost metadata."""
    trim = state.local_log_start(partition)
    is_covered = trim is not None and any(start.covers(trim) for start in ended)
    starts = [tombstone(log_start_key(partition, start)) for start in ended]
    return [*starts, _trim_tombstone(partition)] if is_covered else starts


def records_of_cut(state: RemoteLogMetadataState, update: CutUpdate) -> list[KeyAndValue]:
    """Returns the record of a CUT, and a tombstone for the recorded trim if the CUT voids it.

    The CUT of an owner ends no log start: one of an earlier leader epoch may be of the leader's own history."""
    partition, trim = update.topic_id_partition, state.local_log_start(update.topic_id_partition)
    is_void = trim is not None and trim.offset > update.offset and trim.leader_epoch < update.leader_epoch
    return [key_and_value(update), *([_trim_tombstone(partition)] if is_void else [])]


def _trim_tombstone(partition: TopicIdPartition) -> KeyAndValue:
    return tombstone(RecordKey(LOCAL_LOG_START_API_KEY, partition))


def _replaces(new: LogStart, known: LogStart) -> bool:
    if not (new.deletes and known.deletes) or known.offset >= new.offset:
        return False
    if known.reason is LogStartReason.RETENTION:
        return known.leader_epoch <= new.leader_epoch
    return new.reason is LogStartReason.USER and known.leader_epoch == new.leader_epoch
