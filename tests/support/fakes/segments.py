"""Builds segments of real batches, with their metadata, for tests of storage and readers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from uuid import UUID, uuid4

from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.log_source import AbortedTransaction
from tiers.model.segment_metadata import RemoteLogSegmentMetadata, RemoteLogSegmentState
from tiers.segment.segment_builder import BuiltSegment, SegmentBuilder

PARTITION = TopicIdPartition(UUID("6a1d9b2e-4c3f-4e58-9f70-1b2c3d4e5f60"), 3, "orders")


def no_time() -> int:
    return 0


def build_segment(
    path: Path,
    appends: Sequence[bytes],
    base_offset: int = 0,
    aborted: Sequence[AbortedTransaction] = (),
    chunk_bytes: int = 1 << 20,
) -> BuiltSegment:
    builder = SegmentBuilder(path, base_offset, chunk_bytes=chunk_bytes)
    for records in appends:
        builder.append(records, aborted)
    return builder.finish()


def metadata_of(
    built: BuiltSegment,
    partition: TopicIdPartition = PARTITION,
    segment_uuid: UUID | None = None,
    state: RemoteLogSegmentState = RemoteLogSegmentState.COPY_SEGMENT_STARTED,
    event_timestamp_ms: int = 1_700_000_000_000,
) -> RemoteLogSegmentMetadata:
    return RemoteLogSegmentMetadata(
        segment_id=RemoteLogSegmentId(partition, segment_uuid or uuid4()),
        start_offset=built.start_offset,
        end_offset=built.end_offset,
        broker_id=1,
        max_timestamp_ms=built.max_timestamp_ms,
        event_timestamp_ms=event_timestamp_ms,
        segment_leader_epochs=built.segment_leader_epochs,
        segment_size_bytes=built.size_bytes,
        state=state,
        txn_index_empty=built.txn_index_empty,
    )
