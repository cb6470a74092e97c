"""`TieredPartitions`: what the remote tier's metadata says of a partition, in the terms of Kafka's answers.

Nothing here asks a broker or a store. Whether an answer may be trusted is `ensure_fresh`'s to say (safety rule 1).
"""

from __future__ import annotations

from bisect import bisect_right

from tiers.errors import RemoteLogError, RemoteLogMetadataNotReadyError
from tiers.metadata.earliest_readable import earliest_readable
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataReader
from tiers.model.ids import TopicIdPartition

NO_LEADER_EPOCH = -1


class TieredPartitions:
    def __init__(self, rlmm: RemoteLogMetadataReader, max_age_ms: int) -> None:
        self.rlmm = rlmm
        self._max_age_ms = max_age_ms

    def is_fresh(self, partition: TopicIdPartition) -> bool:
        try:
            return self.rlmm.is_fresh(partition, self._max_age_ms)
        except RemoteLogError:
            return False

    async def ensure_fresh(self, partition: TopicIdPartition, timeout_ms: int, max_age_ms: int | None = None) -> bool:
        """False when the metadata could not be read far enough in time: then nothing may be concluded from it."""
        max_age_ms = self._max_age_ms if max_age_ms is None else max_age_ms
        try:
            if not self.rlmm.is_fresh(partition, max_age_ms):
                await self.rlmm.ensure_fresh(partition, max_age_ms, timeout_ms)
        except RemoteLogError:
            return False
        return True

    def is_known_for_good(self, partition: TopicIdPartition, offset: int) -> bool:
        """The metadata topic is gone, so that nothing is fresh; this offset was remote when it was there."""
        try:
            return self.rlmm.is_final() and self.holds(partition, offset)
        except RemoteLogError:
            return False

    def log_start(self, partition: TopicIdPartition) -> int | None:
        """What was recorded: nothing below it exists for clients. None when the partition is not tiered.

        Another process may clear the state between a look at its freshness and this one, so None is checked again.
        """
        log_start = self.rlmm.log_start_offset(partition)
        if log_start is None and not self.is_fresh(partition):
            raise RemoteLogMetadataNotReadyError(f"whether {partition} is tiered is not known")
        return log_start

    def earliest_readable(self, partition: TopicIdPartition, local_log_start: int) -> int | None:
        """The log start of both tiers together. None: not tiered."""
        return earliest_readable(self.rlmm, partition, local_log_start)

    def holds(self, partition: TopicIdPartition, offset: int) -> bool:
        """Whether a readable remote segment has the offset, and it is not below the log start, as far as is known."""
        try:
            log_start = self.rlmm.log_start_offset(partition)
            if log_start is None or offset < log_start:
                return False
            return self.rlmm.remote_log_segment_metadata(partition, offset) is not None
        except RemoteLogError:
            return False

    def end_offset(self, partition: TopicIdPartition) -> int | None:
        """Inclusive. Of a segment in quarantine a head may be left below the log start: that counts for nothing."""
        end_offset = self.rlmm.remote_end_offset(partition)
        log_start = self.rlmm.log_start_offset(partition)
        return None if end_offset is None or log_start is None or end_offset < log_start else end_offset

    def leader_epoch_at(self, partition: TopicIdPartition, offset: int) -> int:
        """The leader epoch that wrote the offset, -1 when no remote segment has it."""
        segment = self.rlmm.remote_log_segment_metadata(partition, offset)
        if segment is None:
            return NO_LEADER_EPOCH
        epochs = segment.segment_leader_epochs
        place = bisect_right(epochs, offset, key=lambda entry: entry.start_offset) - 1
        return epochs[max(place, 0)].epoch

    def last_leader_epoch(self, partition: TopicIdPartition) -> int | None:
        """The newest epoch with a remote record."""
        end_offset = self.rlmm.remote_end_offset(partition)
        return None if end_offset is None else self.leader_epoch_at(partition, end_offset)
