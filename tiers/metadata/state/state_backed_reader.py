"""The synchronous half of `RemoteLogMetadataReader`, over the state that is open in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from uuid import UUID

from tiers.errors import RemoteLogMetadataNotReadyError
from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.model.copy_plan import CopyPlan
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.log_start import LogGap, LogStart, OffsetAndEpoch
from tiers.model.segment_metadata import Cut, RemoteLogSegmentMetadata, TierMarkerUpdate, TopicDeletionUpdate
from tiers.model.segment_state import RemotePartitionDeleteState
from tiers.model.stored_segment import CoverSize, StoredSegment


@asynccontextmanager
async def in_turn(lock: asyncio.Lock, timeout_ms: int) -> AsyncIterator[None]:
    """Holds the lock. Raises `RemoteLogMetadataNotReadyError` when another task holds it for `timeout_ms`."""
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            await lock.acquire()
    except TimeoutError as error:
        raise RemoteLogMetadataNotReadyError(f"an earlier write did not end in {timeout_ms} ms") from error
    try:
        yield
    finally:
        lock.release()


class StateBackedReader:
    """Delegates the look-ups to the open state. They raise `RemoteLogMetadataNotReadyError` while none is open."""

    def __init__(self) -> None:
        self._opened_state: RemoteLogMetadataState | None = None

    @property
    def _state(self) -> RemoteLogMetadataState:
        if self._opened_state is None:
            raise RemoteLogMetadataNotReadyError("the saved state of the remote log metadata is not open yet")
        return self._opened_state

    def is_final(self) -> bool:
        return self._state.is_final()

    def remote_log_segment_metadata(self, partition: TopicIdPartition, offset: int) -> RemoteLogSegmentMetadata | None:
        return self._state.remote_log_segment_metadata(partition, offset)

    def next_segment(self, partition: TopicIdPartition, offset: int) -> RemoteLogSegmentMetadata | None:
        return self._state.next_segment(partition, offset)

    def remote_log_segment_metadata_by_id(self, segment_id: RemoteLogSegmentId) -> RemoteLogSegmentMetadata | None:
        return self._state.remote_log_segment_metadata_by_id(segment_id)

    def list_remote_log_segments(
        self, partition: TopicIdPartition, min_offset: int = 0
    ) -> Iterator[RemoteLogSegmentMetadata]:
        return self._state.list_remote_log_segments(partition, min_offset)

    def stored_segments(self, partition: TopicIdPartition, min_offset: int = 0) -> Iterator[StoredSegment]:
        return self._state.stored_segments(partition, min_offset)

    def answering_segments(self, partition: TopicIdPartition, offset: int = 0) -> Iterator[StoredSegment]:
        return self._state.answering_segments(partition, offset)

    def answered_offsets(self, partition: TopicIdPartition, offset: int = 0) -> Iterator[tuple[int, int]]:
        return self._state.answered_offsets(partition, offset)

    def segments_apart(self, partition: TopicIdPartition) -> list[StoredSegment]:
        return self._state.segments_apart(partition)

    def cover_size(self, partition: TopicIdPartition) -> CoverSize:
        return self._state.cover_size(partition)

    def earliest_offset(self, partition: TopicIdPartition) -> int | None:
        return self._state.earliest_offset(partition)

    def remote_end_offset(self, partition: TopicIdPartition) -> int | None:
        return self._state.remote_end_offset(partition)

    def cuts(self, partition: TopicIdPartition) -> list[Cut]:
        return self._state.cuts(partition)

    def log_start_offset(self, partition: TopicIdPartition) -> int | None:
        return self._state.log_start_offset(partition)

    def log_starts(self, partition: TopicIdPartition) -> list[LogStart]:
        return self._state.log_starts(partition)

    def recorded_log_starts(self, partition: TopicIdPartition) -> list[LogStart]:
        return self._state.recorded_log_starts(partition)

    def local_log_start(self, partition: TopicIdPartition) -> OffsetAndEpoch | None:
        return self._state.local_log_start(partition)

    def gaps(self, partition: TopicIdPartition) -> list[LogGap]:
        return self._state.gaps(partition)

    def gap_at(self, partition: TopicIdPartition, offset: int) -> LogGap | None:
        return self._state.gap_at(partition, offset)

    def tier_marker(self, location: str) -> TierMarkerUpdate | None:
        return self._state.tier_marker(location)

    def topic_deletions(self) -> Mapping[UUID, TopicDeletionUpdate]:
        return self._state.topic_deletions()

    def missing_topics(self) -> Mapping[UUID, int]:
        return self._state.missing_topics()

    def remote_partition_delete_state(self, partition: TopicIdPartition) -> RemotePartitionDeleteState | None:
        return self._state.remote_partition_delete_state(partition)

    def deleted_segments(
        self, partition: TopicIdPartition | None = None, until_ms: int | None = None
    ) -> list[RemoteLogSegmentMetadata]:
        return self._state.deleted_segments(partition, until_ms)

    def copy_plans(self, partition: TopicIdPartition) -> list[CopyPlan]:
        return self._state.copy_plans(partition)

    def topic_tier_config(self, topic_id: UUID) -> Mapping[str, str]:
        return self._state.topic_tier_config(topic_id)

    def topics_with_tier_config(self) -> list[TopicIdPartition]:
        return self._state.topics_with_tier_config()

    def is_known(self, partition: TopicIdPartition) -> bool:
        return self._state.is_known(partition)

    def is_tiered(self, topic_id: UUID) -> bool:
        return self._state.is_tiered(topic_id)

    def partitions(self) -> list[TopicIdPartition]:
        return self._state.partitions()
