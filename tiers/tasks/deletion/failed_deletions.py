"""`FailedDeletions` schedules the retries of failed deletions, and publishes them for operators.

Each segment has its own backoff, so that an object that cannot be deleted does not cost a request in every round. After
`publish_after` attempts the failure is published. A later success retracts that record. The attempts are those of this
process: after a restart the count begins again, and a published record stays until the deletion succeeds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

from tiers.config.settings import RemoteLogConfig
from tiers.errors import RemoteLogError, RemoteStorageError
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.tasks.deletion.failed_deletions_topic import FailedDeletion

_PUBLISH_AFTER = RemoteLogConfig().delete_attempts

logger = logging.getLogger(__name__)
_KEPT = 100_000


class FailedDeletionLog(Protocol):
    async def publish(self, failed: FailedDeletion) -> None: ...

    async def retract(self, segment: UUID) -> None:
        """Retracts the published record of a segment, whichever process wrote it. Does nothing without a record."""


@dataclass(slots=True)
class _Failure:
    attempts: int
    due_ms: int
    first_failed_at_ms: int
    error: RemoteStorageError


class FailedDeletions:
    def __init__(
        self,
        log: FailedDeletionLog | None = None,
        *,
        backoff_ms: int = 30_000,
        max_backoff_ms: int = 3_600_000,
        publish_after: int = _PUBLISH_AFTER,
    ) -> None:
        self._log = log
        self._backoff_ms = backoff_ms
        self._max_backoff_ms = max_backoff_ms
        self._publish_after = publish_after
        self._failures: dict[RemoteLogSegmentId, _Failure] = {}

    @property
    def count(self) -> int:
        """The number of segments whose last deletion failed."""
        return len(self._failures)

    def is_due(self, segment_id: RemoteLogSegmentId, clock_ms: int) -> bool:
        failure = self._failures.get(segment_id)
        return failure is None or clock_ms >= failure.due_ms

    async def failed(
        self, segment: RemoteLogSegmentMetadata, error: RemoteStorageError, clock_ms: int, wall_clock_ms: int
    ) -> None:
        """Notes a failed attempt, and publishes it if it is due. Does not raise when the topic cannot be written.

        An attempt before its time only tests the store: it updates the error, but does not count and is not
        published."""
        known = self._failures.get(segment.segment_id)
        if known is not None and clock_ms < known.due_ms:
            known.error = error
            return
        self._failures.pop(segment.segment_id, None)
        attempts = 1 if known is None else known.attempts + 1
        pause_ms = min(self._max_backoff_ms, self._backoff_ms << min(attempts - 1, 20))
        first_ms = wall_clock_ms if known is None else known.first_failed_at_ms
        self._failures[segment.segment_id] = _Failure(attempts, clock_ms + pause_ms, first_ms, error)
        while len(self._failures) > _KEPT:
            del self._failures[next(iter(self._failures))]
        partition = segment.topic_id_partition
        fields = {"partition": str(partition), "segment": str(segment.segment_id.id), "error": str(error)}
        logger.warning("a segment could not be deleted", extra={**fields, "attempts": attempts, "pause_ms": pause_ms})
        if attempts < self._publish_after:
            return
        failed = FailedDeletion(
            topic=partition.topic,
            topic_id=str(partition.topic_id),
            partition=partition.partition,
            segment=str(segment.segment_id.id),
            start_offset=segment.start_offset,
            end_offset=segment.end_offset,
            size_bytes=segment.segment_size_bytes,
            attempts=attempts,
            first_failed_at_ms=first_ms,
            last_failed_at_ms=wall_clock_ms,
            error=str(error),
        )
        try:
            if self._log is not None:
                await self._log.publish(failed)
        except RemoteLogError as trouble:
            logger.warning("a failed deletion could not be published", extra={**fields, "error": str(trouble)})

    async def deleted(self, segment_id: RemoteLogSegmentId) -> None:
        """Forgets a failure, since the objects are gone. Raises `RemoteLogError` when the retraction fails."""
        if self._log is not None:
            await self._log.retract(segment_id.id)
        self._failures.pop(segment_id, None)

    def forget_unless(self, is_ours: Callable[[TopicIdPartition], bool]) -> None:
        """Forgets the failures of other owners' partitions: those owners count and retry them now."""
        owned = {partition: is_ours(partition) for partition in {each.topic_id_partition for each in self._failures}}
        self._failures = {each: one for each, one in self._failures.items() if owned[each.topic_id_partition]}
