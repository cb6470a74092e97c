"""Decides which records a metadata manager writes for each operation, by the state at that time.

Every update repeats the custom metadata, since compaction may remove the record before it. When a subject is gone, all
of its keys get tombstones (docs/design.md, "Metadata"). An operation that the states do not allow raises
`InvalidTransitionError` (docs/semantics.md 11.2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tiers.errors import InvalidTransitionError
from tiers.metadata.records.record_types import KeyAndValue
from tiers.metadata.records.serde import (
    MetadataRecord,
    RecordKey,
    cut_key,
    encode_key,
    encode_value,
    key_of,
    local_log_start_key,
    log_gap_key,
    log_start_key,
    segment_keys,
)
from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.model.copy_plan import NOT_MEASURED_BYTES, CopyPlan
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.log_start import LogStart, LogStartReason
from tiers.model.segment_metadata import (
    CutUpdate,
    LogStartOffsetUpdate,
    RemoteLogSegmentMetadata,
    RemoteLogSegmentMetadataUpdate,
    RemotePartitionDeleteMetadata,
    TopicTierConfigUpdate,
)
from tiers.model.segment_state import (
    RemoteLogSegmentState,
    RemotePartitionDeleteState,
    is_valid_partition_transition,
    is_valid_transition,
)

CheckTierConfig = Callable[[Mapping[str, str]], None]
"""Called with the topic's settings before the change. If it raises an exception, the change is not made."""


def key_and_value(record: MetadataRecord) -> KeyAndValue:
    return encode_key(key_of(record)), encode_value(record)


def tombstone(key: RecordKey) -> KeyAndValue:
    return encode_key(key), None


def records_of_new_segment(state: RemoteLogMetadataState, metadata: RemoteLogSegmentMetadata) -> list[KeyAndValue]:
    if metadata.state is not RemoteLogSegmentState.COPY_SEGMENT_STARTED:
        raise InvalidTransitionError(f"a new segment must be COPY_SEGMENT_STARTED, not {metadata.state.name}")
    known = state.remote_log_segment_metadata_by_id(metadata.segment_id)
    if known is not None and known.state is not RemoteLogSegmentState.COPY_SEGMENT_STARTED:
        raise InvalidTransitionError(f"segment {metadata.segment_id.id} is {known.state.name} already")
    return [key_and_value(metadata)]


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


def records_of_forgotten_deletions(
    state: RemoteLogMetadataState, segments: Sequence[RemoteLogSegmentId]
) -> list[KeyAndValue]:
    kept = {segment.segment_id for segment in state.deleted_segments(segments[0].topic_id_partition)}
    for segment_id in segments:
        if segment_id not in kept:
            raise InvalidTransitionError(f"{segment_id.id} is no deleted segment that is kept")
    return [tombstone(key) for segment_id in segments for key in segment_keys(segment_id)]


def records_of_deletion(state: RemoteLogMetadataState, metadata: RemotePartitionDeleteMetadata) -> list[KeyAndValue]:
    partition = metadata.topic_id_partition
    known = state.remote_partition_delete_state(partition)
    if not is_valid_partition_transition(known, metadata.state):
        source = "no deletion" if known is None else known.name
        raise InvalidTransitionError(f"the deletion of {partition} cannot move from {source} to {metadata.state.name}")
    written = [key_and_value(metadata)]
    if metadata.state is RemotePartitionDeleteState.DELETE_PARTITION_FINISHED:
        for segment in state.list_remote_log_segments(partition):
            written += map(tombstone, segment_keys(segment.segment_id))
        written += [tombstone(cut_key(partition, one.leader_epoch, one.offset)) for one in state.cuts(partition)]
        written += [tombstone(key_of(plan)) for plan in state.copy_plans(partition)]
        written += [tombstone(log_start_key(partition, start)) for start in state.recorded_log_starts(partition)]
        written += [tombstone(log_gap_key(partition, gap.first_offset)) for gap in state.gaps(partition)]
        if state.local_log_start(partition) is not None:
            written.append(tombstone(local_log_start_key(partition)))
        written.append(tombstone(key_of(metadata)))
    return written


def records_of_plan_end(state: RemoteLogMetadataState, plan: CopyPlan) -> list[KeyAndValue]:
    for segment_id in plan.segment_ids():
        known = state.remote_log_segment_metadata_by_id(segment_id)
        if known is not None and known.state is RemoteLogSegmentState.DELETE_SEGMENT_STARTED:
            raise InvalidTransitionError(
                f"plan {plan.plan_id} cannot end: the deletion of segment {segment_id.id} has not ended"
            )
    return [tombstone(key_of(plan))]


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
    keys = [*(log_start_key(partition, start) for start in ended), *[local_log_start_key(partition)] * is_covered]
    return [tombstone(key) for key in keys]


def records_of_cut(state: RemoteLogMetadataState, update: CutUpdate) -> list[KeyAndValue]:
    """Returns the record of a CUT, and a tombstone for the recorded trim if the CUT voids it.

    The CUT of an owner ends no log start: one of an earlier leader epoch may be of the leader's own history."""
    partition, trim = update.topic_id_partition, state.local_log_start(update.topic_id_partition)
    is_void = trim is not None and trim.offset > update.offset and trim.leader_epoch < update.leader_epoch
    return [key_and_value(update), *([tombstone(local_log_start_key(partition))] if is_void else [])]


def records_of_named_cut(state: RemoteLogMetadataState, update: CutUpdate) -> list[KeyAndValue]:
    """Returns the records of an operator's CUT, and a tombstone for each log start that it voids."""
    partition = update.topic_id_partition
    ended = [
        known for known in state.recorded_log_starts(partition) if known.is_void(update.leader_epoch, update.offset)
    ]
    return [*records_of_cut(state, update), *records_of_ended_log_starts(state, partition, ended)]


def changed_tier_config(known: TopicTierConfigUpdate, changes: Mapping[str, str | None]) -> KeyAndValue | None:
    """Returns the new record, or None when nothing changes.

    `known` has the settings before the change, and the writer and time of the new record."""
    merged = {**known.config, **changes}
    config = {key: value for key, value in merged.items() if value is not None}
    if config == known.config:
        return None
    update = TopicTierConfigUpdate(known.topic_id_partition, known.writer, known.event_timestamp_ms, config)
    return encode_key(key_of(update)), encode_value(update) if config else None


def _replaces(new: LogStart, known: LogStart) -> bool:
    if not (new.deletes and known.deletes) or known.offset >= new.offset:
        return False
    if known.reason is LogStartReason.RETENTION:
        return known.leader_epoch <= new.leader_epoch
    return new.reason is LogStartReason.USER and known.leader_epoch == new.leader_epoch
