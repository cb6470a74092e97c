"""`TieredPartitions` reads the remote tier's metadata of a partition, in the terms of Kafka's responses.

It asks no broker and no store. `ensure_fresh` tells whether the caller may trust an answer
(docs/design.md, safety rule 1). The state may be cleared, and read again from the start, after that. So an answer that
rests on what the metadata does not have counts only if the metadata is still fresh afterwards (`require_fresh`).
"""

from __future__ import annotations

from typing import NamedTuple

from tiers.config.paused_work import TierWork, paused_work
from tiers.errors import RemoteLogError, RemoteLogMetadataNotReadyError
from tiers.metadata.attempts import attempt_at_head
from tiers.metadata.log_bounds import earliest_readable, recorded_log_start, unexplained_trim
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataReader
from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import OffsetAndEpoch
from tiers.model.segment_metadata import leader_epoch_at

NO_LEADER_EPOCH = -1


class GapExit(NamedTuple):
    """The place where a log continues behind a recorded gap."""

    end: int
    """The end (exclusive) of the gap, or of the last one of the gaps that follow without a record between them."""
    segment_start: int | None
    """The start offset of the first remote segment behind the requested offset; None: no segment is there."""

    @property
    def is_remote(self) -> bool:
        """Whether the remote tier has the record that follows the gap.

        The local log may have that record too, or an earlier one."""
        return self.segment_start is not None and self.segment_start <= self.end


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
        """Whether the metadata is fresh, or becomes fresh within `timeout_ms`.

        False: the caller must not conclude anything from the metadata."""
        max_age_ms = self._max_age_ms if max_age_ms is None else max_age_ms
        try:
            if not self.rlmm.is_fresh(partition, max_age_ms):
                await self.rlmm.ensure_fresh(partition, max_age_ms, timeout_ms)
        except RemoteLogError:
            return False
        return True

    def is_known_for_good(self, partition: TopicIdPartition, offset: int) -> bool:
        """Whether the metadata topic is lost, so no metadata is fresh, and this offset was remote before the loss."""
        try:
            return self.rlmm.is_final() and self.remote_position(partition, offset) is not None
        except RemoteLogError:
            return False

    def is_known(self, partition: TopicIdPartition) -> bool:
        """Whether the metadata knows the partition, fresh or not. Its absence proves nothing."""
        try:
            return self.rlmm.is_known(partition)
        except RemoteLogError:
            return False

    def is_tiered(self, partition: TopicIdPartition) -> bool:
        """Whether the metadata knows the partition. Raises `RemoteLogMetadataNotReadyError` when that is unknown."""
        is_known = self.rlmm.is_known(partition)
        if not is_known:
            self.require_fresh(partition)
        return is_known

    def require_fresh(self, partition: TopicIdPartition) -> None:
        """Raises `RemoteLogMetadataNotReadyError` if the metadata is not fresh now.

        Call it after the reads that found nothing: the state may have been cleared since its freshness was checked."""
        if not self.is_fresh(partition):
            raise RemoteLogMetadataNotReadyError(f"the metadata of {partition} may have been cleared meanwhile")

    def is_reading_paused(self, partition: TopicIdPartition) -> bool:
        """Whether an operator paused the reading of the topic's remote records."""
        try:
            return TierWork.READING in paused_work(self.rlmm.topic_tier_config(partition.topic_id))
        except RemoteLogError:
            return False  # the read itself finds what is wrong with the metadata

    def recorded_log_start(self, partition: TopicIdPartition, local_log_start: int | None = None) -> int | None:
        """Returns the highest recorded log start at or below `local_log_start`, if it is given; None without one."""
        return recorded_log_start(self.rlmm, partition, local_log_start)

    def earliest_readable(self, partition: TopicIdPartition, local_log_start: int) -> int | None:
        """Returns the log start of both tiers together. None: the partition is not tiered."""
        return earliest_readable(self.rlmm, partition, local_log_start)

    def holds(self, partition: TopicIdPartition, offset: int) -> bool:
        """Whether a readable remote segment has the offset, and no known recorded log start lies above the offset."""
        try:
            log_start = self.rlmm.log_start_offset(partition)
            if log_start is None or offset < log_start:
                return False
            return self.has_segment(partition, offset)
        except RemoteLogError:
            return False

    def has_segment(self, partition: TopicIdPartition, offset: int) -> bool:
        return self.rlmm.remote_log_segment_metadata(partition, offset) is not None

    def gap_exit(self, partition: TopicIdPartition, offset: int) -> GapExit | None:
        """Returns where the log continues behind the recorded gap that holds the offset. None: no gap holds it."""
        gap = self.rlmm.gap_at(partition, offset)
        if gap is None:
            return None
        end, following = gap.next_offset, self.rlmm.gap_at(partition, gap.next_offset)
        while following is not None:
            end, following = following.next_offset, self.rlmm.gap_at(partition, following.next_offset)
        segment = self.rlmm.next_segment(partition, offset)
        return GapExit(end, None if segment is None else segment.start_offset)

    def has_gap_behind(self, partition: TopicIdPartition) -> bool:
        """Whether a recorded gap lies between the remote tier and the local log."""
        end_offset = self.rlmm.remote_end_offset(partition)
        return any(end_offset is None or gap.next_offset > end_offset for gap in self.rlmm.gaps(partition))

    def remote_position(self, partition: TopicIdPartition, offset: int) -> int | None:
        """Returns the offset at which a remote read begins: `offset`, or the next one behind the gap that holds it.

        None: the remote tier is not known to have that offset, or a known recorded log start lies above `offset`."""
        if self.holds(partition, offset):
            return offset
        try:
            log_start, gap = self.rlmm.log_start_offset(partition), self.gap_exit(partition, offset)
        except RemoteLogError:
            return None
        if log_start is None or offset < log_start or gap is None or not gap.is_remote:
            return None
        return gap.segment_start

    def is_at_head(self, partition: TopicIdPartition, offset: int, log_start: int) -> bool:
        """Whether no remote segment lies between the recorded `log_start` and the offset.

        An owner records no gap there: the log begins behind those offsets."""
        segment = self.rlmm.next_segment(partition, log_start)
        return segment is None or offset < segment.start_offset

    def unexplained_trim(self, partition: TopicIdPartition, log_start: int) -> OffsetAndEpoch | None:
        """Returns the recorded trim whose segments the metadata has lost, if the leader confirms the trim."""
        return unexplained_trim(self.rlmm, partition, log_start)

    def has_attempt_at_head(self, partition: TopicIdPartition, log_start: int, local_log_start: int) -> bool:
        """Whether a copy that has not ended may have records below `local_log_start` and the first segment."""
        return attempt_at_head(self.rlmm, partition, log_start, local_log_start) is not None

    def end_offset(self, partition: TopicIdPartition, log_start: int | None = None) -> int | None:
        """Returns the remote end offset (inclusive). None: no remote record lies at or above `log_start`.

        The head of a segment that is cut may remain below the log start. It does not count."""
        end_offset = self.rlmm.remote_end_offset(partition)
        return None if end_offset is None or end_offset < (log_start or 0) else end_offset

    def leader_epoch_at(self, partition: TopicIdPartition, offset: int) -> int:
        """Returns the leader epoch of the record at the offset, or -1 when no remote segment has the offset."""
        segment = self.rlmm.remote_log_segment_metadata(partition, offset)
        return NO_LEADER_EPOCH if segment is None else leader_epoch_at(segment.segment_leader_epochs, offset)

    def leader_epoch_before_gap(self, partition: TopicIdPartition, offset: int) -> int:
        """Returns the leader epoch of the last record before the recorded gap that holds the offset.

        -1 when that record is not known to be remote."""
        try:
            gap = self.rlmm.gap_at(partition, offset)
            return NO_LEADER_EPOCH if gap is None else self.leader_epoch_at(partition, gap.first_offset - 1)
        except RemoteLogError:
            return NO_LEADER_EPOCH

    def last_leader_epoch(self, partition: TopicIdPartition) -> int | None:
        """Returns the newest leader epoch that has a remote record. None: no record is remote."""
        end_offset = self.rlmm.remote_end_offset(partition)
        return None if end_offset is None else self.leader_epoch_at(partition, end_offset)
