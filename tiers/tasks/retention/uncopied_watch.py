"""`UncopiedWatch` reports that the broker's own retention may remove records before they are copied.

If a topic has a total retention of its own, the broker's `retention.*` bounds the local tier alone, and is shorter than
the total. A record that the broker removes before it is copied is then lost, and leaves a gap. So the watch compares
the oldest record that is not copied with the broker's retention, in time and in bytes.

A broker removes a segment of its log when the segment's newest record is too old. The oldest record is older, so the
alarms come early. The records of an import may be older than the retention at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from tiers.config.topic_policy import TopicPolicy
from tiers.config.total_retention import Retention
from tiers.metadata.remote_log import RemoteLog
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LocalLogBounds
from tiers.tasks.alarms import AlarmReason
from tiers.tasks.copy.uncopied import DUE_SHARE, UncopiedRecords, UncopiedSize
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
AtMost = Callable[[int], UncopiedSize]
logger = logging.getLogger(__name__)


def used_share(broker: Retention, age_ms: int, size_bytes: int) -> float:
    """Returns how much of the broker's retention is used, in time or in bytes, whichever is more. 1.0 is all of it."""
    in_time = age_ms / max(1, broker.ms) if broker.ms >= 0 else 0.0
    in_bytes = size_bytes / max(1, broker.size_bytes) if broker.size_bytes >= 0 else 0.0
    return max(in_time, in_bytes)


class UncopiedWatch:
    """The watch of one partition, for as long as this process owns it."""

    def __init__(self, services: TaskServices, topic_id_partition: TopicIdPartition, heads: UncopiedRecords) -> None:
        self._services = services
        self._partition = topic_id_partition
        self._heads = heads
        self._raised: set[AlarmReason] = set()
        self.share = 0.0
        """The part of the broker's retention that records which are not copied have used, as of the last run."""

    async def run(self, policy: TopicPolicy, bounds: LocalLogBounds, at_most: AtMost) -> None:
        """Raises the alarms, once per episode."""
        offset = RemoteLog(self._services.state, self._partition).first_uncopied(bounds)
        is_behind = offset < bounds.high_watermark
        self.share = await self.share_from(policy, offset, at_most) if is_behind else 0.0
        self._raise(policy, {reason for reason, limit in _LIMITS.items() if self.share >= limit}, offset)

    async def share_from(self, policy: TopicPolicy, offset: int, at_most: AtMost) -> float:
        """Returns the part of the broker's retention that the records from `offset` on have used.

        0.0: the broker's retention is the total. If the age or the size of the records is not known, they are due."""
        broker = policy.broker_retention
        if broker is None or not policy.recorded_total.is_set:
            return 0.0
        timestamp_ms = await self._heads.look(offset)
        # A record behind an open transaction cannot be read. It is at least as old as the owner knows it.
        age_ms = self._heads.known_for_ms(offset)
        if timestamp_ms is not None:
            age_ms = max(age_ms, self._services.wall_clock_ms() - timestamp_ms)
        size = at_most(offset) if broker.size_bytes >= 0 else UncopiedSize(0, is_bound=True)
        share = used_share(broker, age_ms, size.size_bytes)
        is_known = size.is_bound and (broker.ms < 0 or timestamp_ms is not None)
        return share if is_known else max(share, DUE_SHARE)

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
