"""`UncopiedWatch` reports that the broker's own retention may remove records before they are copied.

If a topic has a total retention of its own, the broker's `retention.*` bounds the local tier alone, and is shorter than
the total. A record that the broker removes before it is copied is then lost, and leaves a gap. So the watch compares
the oldest record that is not copied with the broker's retention, in time and in bytes.

A broker removes a segment of its log when the segment's newest record is too old. The oldest record is older, so the
alarms come early. The records of an import may be older than the retention at once.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from protocol.records.record_batch import RecordBatch, iterate_batches
from tiers.config.topic_policy import TopicPolicy
from tiers.config.total_retention import Retention
from tiers.errors import RemoteLogError
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataReader
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LocalLogBounds, LogSource
from tiers.tasks.alarms import AlarmReason
from tiers.tasks.task_services import TaskServices

_ALARMS = {
    AlarmReason.BROKER_RETENTION_50: (
        "records that are not copied have used half of the broker's retention: after all of it, the broker removes them"
    ),
    AlarmReason.BROKER_RETENTION_80: (
        "records that are not copied have used 80 % of the broker's retention: after all of it, the broker removes them"
    ),
    AlarmReason.BROKER_RETENTION_PASSED: (
        "records that are not copied are beyond the broker's retention: the broker may remove them at any time"
    ),
}
_LIMITS = {
    AlarmReason.BROKER_RETENTION_50: 0.5,
    AlarmReason.BROKER_RETENTION_80: 0.8,
    AlarmReason.BROKER_RETENTION_PASSED: 1.0,
}
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HeadBatch:
    """The first record batch that is not copied. `timestamp_ms` is None if its records have no timestamps."""

    timestamp_ms: int | None
    bytes_per_offset: float


def first_uncopied(metadata: RemoteLogMetadataReader, partition: TopicIdPartition, bounds: LocalLogBounds) -> int:
    """Returns the first offset of the local log that is not remote; the high watermark if all of it is remote."""
    remote_end = metadata.remote_end_offset(partition)
    start = bounds.log_start_offset if remote_end is None else max(bounds.log_start_offset, remote_end + 1)
    return min(start, bounds.high_watermark)


async def head_batch(source: LogSource, partition: TopicIdPartition, offset: int, timeout_ms: int) -> HeadBatch | None:
    """Returns the batch that holds `offset`; None if no batch from there on lies below the LSO.

    Raises `RemoteLogError`."""
    read = await source.read(partition, offset, 1, timeout_ms)
    batch = next(iterate_batches(read.records), None)
    return None if batch is None else head_of(batch)


def head_of(batch: RecordBatch) -> HeadBatch:
    timestamp_ms = batch.max_timestamp if batch.is_log_append_time else batch.base_timestamp
    count = max(1, batch.next_offset - batch.base_offset)
    return HeadBatch(timestamp_ms if timestamp_ms >= 0 else None, batch.size_bytes / count)


def used_share(broker: Retention, age_ms: int, size_bytes: int) -> float:
    """Returns how much of the broker's retention is used, in time or in bytes, whichever is more. 1.0 is all of it."""
    in_time = age_ms / max(1, broker.ms) if broker.ms >= 0 else 0.0
    in_bytes = size_bytes / max(1, broker.size_bytes) if broker.size_bytes >= 0 else 0.0
    return max(in_time, in_bytes)


class UncopiedWatch:
    """The watch of one partition, for as long as this process owns it."""

    def __init__(self, services: TaskServices, topic_id_partition: TopicIdPartition) -> None:
        self._services = services
        self._partition = topic_id_partition
        self._offset = -1
        self._since_ms = 0
        self._head: HeadBatch | None = None
        self._raised: set[AlarmReason] = set()
        self.share = 0.0
        """The part of the broker's retention that records which are not copied have used, as of the last run."""

    async def run(self, policy: TopicPolicy, bounds: LocalLogBounds, lag_bytes: int) -> None:
        """Raises the alarms, once per episode. `lag_bytes` is the copier's estimate; 0: it has none."""
        broker = policy.broker_retention
        self.share = share = 0.0
        if broker is None or not policy.recorded_total.is_set:
            self._raise(policy, set(), -1)
            return
        offset = first_uncopied(self._services.metadata, self._partition, bounds)
        if offset < bounds.high_watermark:
            await self._look_at(offset)
            size_bytes = lag_bytes
            if not size_bytes and self._head is not None:
                size_bytes = int(self._head.bytes_per_offset * (bounds.high_watermark - offset))
            self.share = share = used_share(broker, self._age_ms(), size_bytes)
        raised = {reason for reason, limit in _LIMITS.items() if share >= limit}
        self._raise(policy, raised, offset)

    def _raise(self, policy: TopicPolicy, raised: set[AlarmReason], offset: int) -> None:
        alarms, partition = self._services.metrics.alarms, str(self._partition)
        for reason in self._raised - raised:
            alarms.end(policy.topic, reason, partition)
        for reason in _ALARMS:
            if reason in raised - self._raised:
                alarms.begin(policy.topic, reason, partition)
                fields = {"partition": partition, "offset": offset, "broker_retention": str(policy.broker_retention)}
                logger.error(_ALARMS[reason], extra=fields)
        self._raised = raised

    async def _look_at(self, offset: int) -> None:
        if offset != self._offset:
            self._offset, self._since_ms, self._head = offset, self._services.clock_ms(), None
        if self._head is not None:
            return
        try:
            timeout_ms = self._services.settings.request_timeout_ms
            self._head = await head_batch(self._services.source, self._partition, offset, timeout_ms)
        except RemoteLogError as error:
            logger.debug(
                "the first record that is not copied cannot be read",
                extra={"partition": str(self._partition), "error": str(error)},
            )

    def _age_ms(self) -> int:
        """Returns the age of the oldest record that is not copied.

        A record behind an open transaction cannot be read. It is at least as old as the watch knows it."""
        services = self._services
        known_ms = services.clock_ms() - self._since_ms
        if self._head is None or self._head.timestamp_ms is None:
            return known_ms
        return max(known_ms, services.wall_clock_ms() - self._head.timestamp_ms)
