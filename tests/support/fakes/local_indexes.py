"""Consecutive segments as `.indexes` objects, for tests of the caches that keep them in files."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

from tests.support.fakes.segments import PARTITION
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.segment_metadata import LeaderEpochEntry, RemoteLogSegmentMetadata, RemoteLogSegmentState
from tiers.segment.indexes.indexes_object import (
    IndexesObject,
    SegmentIndexes,
    decode_indexes_object,
    encode_indexes_object,
)
from tiers.segment.indexes.segment_index import (
    AbortedTransactionRange,
    Chunk,
    SegmentIndex,
    encode_remote_log_index,
)
from tiers.segment.producer_state import encode_producer_snapshot

TIMESTAMP_MS = 1_600_000_000_000
Segment = tuple[RemoteLogSegmentMetadata, bytes]


def segment_object(
    start_offset: int, chunks: int = 3, uuid: int | None = None, partition: TopicIdPartition = PARTITION
) -> Segment:
    """Returns a segment with ten offsets per chunk. Its contents depend only on the arguments."""
    uuid = start_offset + 1 if uuid is None else uuid
    end_offset = start_offset + 10 * chunks - 1
    metadata = RemoteLogSegmentMetadata(
        segment_id=RemoteLogSegmentId(partition, UUID(int=uuid)),
        start_offset=start_offset,
        end_offset=end_offset,
        broker_id=1,
        max_timestamp_ms=TIMESTAMP_MS + end_offset,
        event_timestamp_ms=1_700_000_000_000,
        segment_leader_epochs=(LeaderEpochEntry(uuid % 5, start_offset),),
        segment_size_bytes=1000 * chunks,
        state=RemoteLogSegmentState.COPY_SEGMENT_STARTED,
    )
    indexes = SegmentIndexes(
        offset_index=b"",
        time_index=b"",
        aborted_transactions=tuple(AbortedTransactionRange(uuid, start_offset, end_offset) for _ in range(uuid % 3)),
        transaction_index=b"",
        leader_epochs=metadata.segment_leader_epochs,
        remote_log_index=encode_remote_log_index(
            Chunk(first, first + 9, TIMESTAMP_MS + first, TIMESTAMP_MS + first + 9, 1000 * n, 1000, 1000, uuid + n)
            for n, first in enumerate(range(start_offset, end_offset, 10))
        ),
        producer_snapshot=encode_producer_snapshot(()),
        history_from=start_offset,
    )
    return metadata, encode_indexes_object(metadata, indexes)


def decoded(segment: Segment) -> IndexesObject:
    return decode_indexes_object(segment[1], segment[0])


def contents(index: SegmentIndex, metadata: RemoteLogSegmentMetadata) -> tuple[object, ...]:
    """Returns all contents of an index."""
    aborted = index.aborted_transactions(metadata.start_offset, metadata.end_offset)
    return index.chunks(), tuple(aborted), index.leader_epochs()


def expected(segment: Segment) -> tuple[object, ...]:
    return contents(decoded(segment).remote_log_index(), segment[0])


def encrypted(segment: Segment, section: bytes) -> Segment:
    metadata, _ = segment
    return metadata, encode_indexes_object(metadata, replace(decoded(segment).indexes, encryption=section))
