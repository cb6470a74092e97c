"""Metadata of segments without data, and the calls that write it through a `RemoteLogMetadataManager`."""

from __future__ import annotations

from dataclasses import replace
from uuid import uuid4

from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataManager
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.segment_metadata import LeaderEpochEntry, RemoteLogSegmentMetadata, RemoteLogSegmentMetadataUpdate
from tiers.model.segment_metadata import RemoteLogSegmentState as State


def segment(partition: TopicIdPartition, start: int, end: int, epoch: int = 0) -> RemoteLogSegmentMetadata:
    return RemoteLogSegmentMetadata(
        segment_id=RemoteLogSegmentId(partition, uuid4()),
        start_offset=start,
        end_offset=end,
        broker_id=1,
        max_timestamp_ms=1_700_000_000_000,
        event_timestamp_ms=0,
        segment_leader_epochs=(LeaderEpochEntry(epoch, start),),
        segment_size_bytes=1000,
        state=State.COPY_SEGMENT_STARTED,
    )


def to(metadata: RemoteLogSegmentMetadata, state: State) -> RemoteLogSegmentMetadataUpdate:
    return RemoteLogSegmentMetadataUpdate(metadata.segment_id, 1, 0, state)


def with_update(metadata: RemoteLogSegmentMetadata, update: RemoteLogSegmentMetadataUpdate) -> RemoteLogSegmentMetadata:
    return replace(
        metadata,
        state=update.state,
        broker_id=update.broker_id,
        event_timestamp_ms=update.event_timestamp_ms,
        custom_metadata=update.custom_metadata if update.custom_metadata is not None else metadata.custom_metadata,
    )


async def copied(manager: RemoteLogMetadataManager, metadata: RemoteLogSegmentMetadata) -> RemoteLogSegmentMetadata:
    await manager.add_remote_log_segment_metadata(metadata)
    await manager.update_remote_log_segment_metadata(to(metadata, State.COPY_SEGMENT_FINISHED))
    return metadata
