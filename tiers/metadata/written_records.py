"""What each act of an owner writes into the metadata topic, decided by what is known at that moment.

Every update repeats the custom metadata, for the record before it may be compacted away; what is gone takes all of its
keys with it (DESIGN, RLMM). An act that the states do not allow is `InvalidTransitionError` (semantics 11.2).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from tiers.errors import InvalidTransitionError
from tiers.metadata.metadata_producer import KeyAndValue
from tiers.metadata.serde import (
    LOG_START_OFFSET_API_KEY,
    MetadataRecord,
    RecordKey,
    clamp_key,
    encode_key,
    encode_value,
    key_of,
    local_log_start_key,
    log_gap_key,
    operator_acceptance_key,
    quarantine_deletion_key,
    segment_keys,
)
from tiers.metadata.state import RemoteLogMetadataState
from tiers.model.copy_plan import CopyPlan
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.log_start import LogStart
from tiers.model.segment_metadata import (
    RemoteLogSegmentMetadata,
    RemoteLogSegmentMetadataUpdate,
    RemotePartitionDeleteMetadata,
)
from tiers.model.segment_state import (
    RemoteLogSegmentState,
    RemotePartitionDeleteState,
    is_valid_partition_transition,
    is_valid_transition,
)


def key_and_value(record: MetadataRecord) -> KeyAndValue:
    return encode_key(key_of(record)), encode_value(record)


def tombstone(key: RecordKey) -> KeyAndValue:
    return encode_key(key), None


def records_of_new_segment(state: RemoteLogMetadataState, metadata: RemoteLogSegmentMetadata) -> list[KeyAndValue]:
    if metadata.state is not RemoteLogSegmentState.COPY_SEGMENT_STARTED:
        raise InvalidTransitionError(f"a new segment cannot be {metadata.state.name}")
    known = state.remote_log_segment_metadata_by_id(metadata.segment_id)
    if known is not None and known.state is not RemoteLogSegmentState.COPY_SEGMENT_STARTED:
        raise InvalidTransitionError(f"segment {metadata.segment_id.id} is {known.state.name} already")
    return [key_and_value(metadata)]


def records_of_update(state: RemoteLogMetadataState, update: RemoteLogSegmentMetadataUpdate) -> list[KeyAndValue]:
    if update.state is RemoteLogSegmentState.COPY_SEGMENT_STARTED:
        raise InvalidTransitionError("COPY_SEGMENT_STARTED is written by adding a segment")
    known = state.remote_log_segment_metadata_by_id(update.segment_id)
    if known is None or not is_valid_transition(known.state, update.state):
        source = "an unknown segment" if known is None else known.state.name
        raise InvalidTransitionError(f"{update.segment_id.id}: from {source} to {update.state.name}")
    custom_metadata = known.custom_metadata if update.custom_metadata is None else update.custom_metadata
    written = [key_and_value(replace(update, custom_metadata=custom_metadata))]
    if update.state is RemoteLogSegmentState.DELETE_SEGMENT_FINISHED:
        written += _tombstones_of_segment(state, update.segment_id)
    return written


def records_of_deletion(state: RemoteLogMetadataState, metadata: RemotePartitionDeleteMetadata) -> list[KeyAndValue]:
    partition = metadata.topic_id_partition
    known = state.remote_partition_delete_state(partition)
    if not is_valid_partition_transition(known, metadata.state):
        source = "no deletion" if known is None else known.name
        raise InvalidTransitionError(f"{partition}: from {source} to {metadata.state.name}")
    written = [key_and_value(metadata)]
    if metadata.state is RemotePartitionDeleteState.DELETE_PARTITION_FINISHED:
        for segment in state.list_remote_log_segments(partition):
            written += _tombstones_of_segment(state, segment.segment_id)
        written += [tombstone(clamp_key(partition, end)) for end in state.clamp_offsets(partition)]
        written += [tombstone(key_of(plan)) for plan in state.copy_plans(partition)]
        written += [
            tombstone(RecordKey(LOG_START_OFFSET_API_KEY, partition, writer.encode()))
            for writer in state.log_starts_by_writer(partition)
        ]
        written += [tombstone(log_gap_key(partition, gap.first_offset)) for gap in state.gaps(partition)]
        if state.local_log_start(partition) is not None:
            written.append(tombstone(local_log_start_key(partition)))
        if state.is_accepted(partition):
            written.append(tombstone(operator_acceptance_key(partition)))
        written.append(tombstone(key_of(metadata)))
    return written


def records_of_plan_end(state: RemoteLogMetadataState, plan: CopyPlan) -> list[KeyAndValue]:
    for segment_id in plan.segment_ids():
        known = state.remote_log_segment_metadata_by_id(segment_id)
        if known is not None and known.state is RemoteLogSegmentState.DELETE_SEGMENT_STARTED:
            raise InvalidTransitionError(f"plan {plan.plan_id}: the deletion of {segment_id.id} has not ended")
    return [tombstone(key_of(plan))]


def is_log_start_known(
    state: RemoteLogMetadataState, partition: TopicIdPartition, start: LogStart, denied: Collection[LogStart]
) -> bool:
    """Whether a log start at or above `start` is recorded and not in `denied`, so that no record is needed."""
    if not start.deletes:
        return bool(state.log_starts_by_writer(partition))
    return any(known.offset >= start.offset and known not in denied for known in state.log_starts(partition))


def _tombstones_of_segment(state: RemoteLogMetadataState, segment_id: RemoteLogSegmentId) -> list[KeyAndValue]:
    asked = state.is_quarantine_deletion_asked(segment_id)
    keys = [*segment_keys(segment_id), *([quarantine_deletion_key(segment_id)] if asked else [])]
    return [tombstone(key) for key in keys]
