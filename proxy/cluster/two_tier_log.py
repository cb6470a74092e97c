"""`TwoTierLog`: the logs of both tiers as clients see them, by fresh metadata and recent bounds of the leaders.

`ensure_fresh` says whether the caller may trust an answer (docs/design.md, safety rule 1). The state may be cleared,
and read again from the start, after that. So an answer that rests on what the metadata does not have counts only if the
metadata is still fresh afterwards (`require_fresh`).
"""

from __future__ import annotations

from collections.abc import Callable

from proxy.cluster.local_log_bounds import LocalLogBoundsCache
from tiers.config.paused_work import TierWork, paused_work
from tiers.errors import RemoteLogError, RemoteLogMetadataNotReadyError
from tiers.metadata.log_history import confirms
from tiers.metadata.metadata_log import FreshMetadata
from tiers.metadata.remote_log import RemoteLog
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LocalLogBounds, LogSource

_BEYOND_ALL = 2**63 - 1


class TwoTierLog:
    def __init__(
        self,
        metadata: FreshMetadata,
        bounds: LocalLogBoundsCache,
        source: LogSource,
        clock_ms: Callable[[], int],
        *,
        max_age_ms: int,
        bounds_max_age_ms: int,
        bounds_timeout_ms: int,
    ) -> None:
        self._metadata = metadata
        self._bounds = bounds
        self._source = source
        self._clock_ms = clock_ms
        self._max_age_ms = max_age_ms
        self._bounds_max_age_ms = bounds_max_age_ms
        self._bounds_timeout_ms = bounds_timeout_ms

    def remote(self, partition: TopicIdPartition) -> RemoteLog:
        return RemoteLog(self._metadata.state, partition)

    def is_fresh(self, partition: TopicIdPartition) -> bool:
        try:
            return self._metadata.is_fresh(partition, self._max_age_ms)
        except RemoteLogError:
            return False

    async def ensure_fresh(self, partition: TopicIdPartition, timeout_ms: int, max_age_ms: int | None = None) -> bool:
        """Whether the metadata is fresh, or becomes fresh within `timeout_ms`.

        False: the caller must not conclude anything from the metadata."""
        max_age_ms = self._max_age_ms if max_age_ms is None else max_age_ms
        try:
            if not self._metadata.is_fresh(partition, max_age_ms):
                await self._metadata.ensure_fresh(partition, max_age_ms, timeout_ms)
        except RemoteLogError:
            return False
        return True

    def require_fresh(self, partition: TopicIdPartition) -> None:
        """Raises `RemoteLogMetadataNotReadyError` if the metadata is not fresh now.

        Call it after the reads that found nothing: the state may have been cleared since its freshness was checked."""
        if not self.is_fresh(partition):
            raise RemoteLogMetadataNotReadyError(f"the metadata of {partition} may have been cleared meanwhile")

    def is_known(self, partition: TopicIdPartition) -> bool:
        """Whether the metadata knows the partition, fresh or not. Its absence proves nothing."""
        try:
            return self._metadata.state.is_known(partition)
        except RemoteLogError:
            return False

    def is_tiered(self, partition: TopicIdPartition) -> bool:
        """Whether the metadata knows the partition. Raises `RemoteLogMetadataNotReadyError` when that is unknown."""
        is_known = self._metadata.state.is_known(partition)
        if not is_known:
            self.require_fresh(partition)
        return is_known

    def is_reading_paused(self, partition: TopicIdPartition) -> bool:
        """Whether an operator paused the reading of the topic's remote records."""
        try:
            return TierWork.READING in paused_work(self._metadata.state.topic_tier_config(partition.topic_id))
        except RemoteLogError:
            return False  # the read itself finds what is wrong with the metadata

    def remote_position(self, partition: TopicIdPartition, offset: int) -> int | None:
        """Returns `RemoteLog.remote_position`, by metadata that may not be fresh; None, too, if it cannot be read."""
        try:
            return self.remote(partition).remote_position(offset)
        except RemoteLogError:
            return None

    def is_known_for_good(self, partition: TopicIdPartition, offset: int) -> bool:
        """Whether the metadata topic is lost, so no metadata is fresh, and this offset was remote before the loss."""
        try:
            return self._metadata.state.is_final() and self.remote_position(partition, offset) is not None
        except RemoteLogError:
            return False

    async def local(self, partition: TopicIdPartition) -> LocalLogBounds:
        """Returns recent bounds of the leader's log. Raises `BrokerError`."""
        not_before_ms = self._clock_ms() - self._bounds_max_age_ms
        return (await self._bounds.ask(partition, not_before_ms, self._bounds_timeout_ms)).bounds

    async def log_start(self, partition: TopicIdPartition) -> int:
        """Returns the recorded log start; 0 without one. Raises `BrokerError`.

        The local bounds cost a request, so the method asks for them only if a log start hides remote records."""
        remote, earliest = self.remote(partition), self._metadata.state.earliest_offset(partition)
        recorded = remote.log_start()
        is_hiding = earliest is not None and earliest < recorded
        return remote.log_start((await self.local(partition)).log_start_offset) if is_hiding else recorded

    async def has_lost_head(self, partition: TopicIdPartition, log_start: int) -> bool:
        """Whether the metadata lost the segments below a recorded trim. Then the log start is unknown.

        Raises `BrokerError`."""
        trim = self.remote(partition).lost_trim(log_start)
        return trim is not None and await confirms(self._source, partition, trim, self._bounds_timeout_ms)

    async def require_no_hole(self, partition: TopicIdPartition, log_start: int, answer: int) -> None:
        """Checks that the metadata explains all offsets below `answer` that the local log does not have.

        `answer` -1: no record is named, so the check covers the whole log. A record that neither tier has may have the
        timestamp, while its metadata is lost. A client that began at the later offset would skip it. Raises
        `RemoteLogMetadataNotReadyError`, and `BrokerError`."""
        remote = self.remote(partition)
        explained = await remote.explained_to(log_start, answer if answer >= 0 else None)
        is_hole = await self.has_lost_head(partition, log_start)
        if not is_hole:
            # The local bounds cost a request, so the method asks for them only if a hole may lie below `answer`.
            far = answer if answer >= 0 else _BEYOND_ALL
            is_unexplained = explained is not None and not 0 <= answer <= explained
            if is_unexplained or remote.attempt_at_head(log_start, far) is not None:
                local_start = (await self.local(partition)).log_start_offset
                is_hole = explained is not None and is_unexplained and local_start > explained
                is_hole |= remote.attempt_at_head(log_start, min(far, local_start)) is not None
        if is_hole:
            raise RemoteLogMetadataNotReadyError(
                f"{partition}: neither tier has the offsets from {log_start if explained is None else explained} on"
            )
