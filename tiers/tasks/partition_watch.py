"""`PartitionWatch`: what an owner measures of one partition, and the alarms about it.

If a topic has a total retention of its own, a record that the broker removes before it is copied is lost
(docs/design.md, safety rule 8). So the watch compares the oldest record that is not copied with the broker's retention.
A broker removes a file when the newest record in it is too old, so the alarms come early.
"""

from __future__ import annotations

import logging

from tiers.config.topic_policy import TopicPolicy
from tiers.config.total_retention import Retention
from tiers.errors import Peer
from tiers.metadata.remote_log import RemoteLog
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LocalLogBounds
from tiers.tasks.alarms import AlarmReason
from tiers.tasks.copy.copy_task import RLMCopyTask
from tiers.tasks.copy.uncopied import DUE_SHARE, has_lag
from tiers.tasks.metrics import BOUNDS
from tiers.tasks.task_services import TaskServices
from tiers.texts import moment_text

_ALARMS = {
    AlarmReason.COPY_LAG: (
        "copying is behind by more than half of the retention: records may expire before they are copied"
    ),
    AlarmReason.STUCK_LSO: "the last stable offset stands still: a transaction hangs, and no record after it is copied",
    AlarmReason.UNCOPIED_BEGINNING: "the local log has uncopied records before copied ones: trimming stops at them",
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
_SHARES = {
    AlarmReason.BROKER_RETENTION_50: 0.5,
    AlarmReason.BROKER_RETENTION_80: 0.8,
    AlarmReason.BROKER_RETENTION_PASSED: 1.0,
}
logger = logging.getLogger(__name__)


def violated_bounds(local: LocalLogBounds, remote_start: int | None, remote_end: int | None) -> list[str]:
    """Returns the names of the bounds between the tiers that do not hold: Lz >= Ly >= Lx and Ly > Ry >= Rx.

    Lz is the high watermark, since a copier cannot know more of the log end. `remote_end` is inclusive. Both remote
    offsets are None while the remote tier has no segment. See docs/founding.md, "Bounds"; docs/design.md, "Words"."""
    lso = local.last_stable_offset
    start, end = (lso - 1, lso - 1) if remote_start is None or remote_end is None else (remote_start, remote_end)
    holds = local.high_watermark >= lso, lso >= local.log_start_offset, lso > end, end >= start
    return [bound for bound, is_held in zip(BOUNDS, holds, strict=True) if not is_held]


def used_share(broker: Retention, age_ms: int, size_bytes: int) -> float:
    """Returns how much of the broker's retention is used, in time or in bytes, whichever is more. 1.0 is all of it."""
    in_time = age_ms / max(1, broker.ms) if broker.ms >= 0 else 0.0
    in_bytes = size_bytes / max(1, broker.size_bytes) if broker.size_bytes >= 0 else 0.0
    return max(in_time, in_bytes)


class PartitionWatch:
    """The watch of one partition, for as long as this process owns it."""

    def __init__(self, services: TaskServices, topic_id_partition: TopicIdPartition, copy: RLMCopyTask) -> None:
        self._services = services
        self._partition = topic_id_partition
        self._copy = copy
        self._labels = topic_id_partition.topic, str(topic_id_partition.partition)
        self._lso = -1
        self._lso_since_ms = 0
        self.retention_share = 0.0
        """The part of the broker's retention that records which are not copied have used, as of the last look.

        0.0: the broker's retention is the total."""

    async def look(self, policy: TopicPolicy, bounds: LocalLogBounds) -> None:
        """Looks at the leader's bounds, once a round."""
        services, now_ms = self._services, self._services.clock_ms()
        if self._lso != bounds.last_stable_offset or bounds.last_stable_offset == bounds.high_watermark:
            self._lso, self._lso_since_ms = bounds.last_stable_offset, now_ms
        # While nothing may expire, the broker's own retention still removes records that are not copied.
        broker = policy.broker_retention
        retention_ms = policy.retention_ms if broker is None or policy.recorded_total.is_set else broker.ms
        lag_ms = max(retention_ms // 2, policy.copy_lag_ms + policy.segment_ms if has_lag(policy) else 0)
        self._raise(AlarmReason.COPY_LAG, is_raised=retention_ms >= 0 and self._copy.behind_ms > lag_ms)
        stuck_ms = now_ms - self._lso_since_ms
        self._raise(AlarmReason.STUCK_LSO, is_raised=stuck_ms >= services.settings.stuck_lso_alarm_ms)
        self._copy.observe(policy, bounds)
        offset = RemoteLog(services.state, self._partition).first_uncopied(bounds)
        is_behind = offset < bounds.high_watermark
        self.retention_share = await self.share_from(policy, offset) if is_behind else 0.0
        for reason, share in _SHARES.items():
            fields = {"offset": offset, "broker_retention": str(broker)}
            self._raise(reason, is_raised=self.retention_share >= share, **fields)

    async def share_from(self, policy: TopicPolicy, offset: int) -> float:
        """Returns the part of the broker's retention that the records from `offset` on have used.

        0.0: the broker's retention is the total. If the age or the size of the records is not known, they are due."""
        broker, uncopied = policy.broker_retention, self._copy.uncopied
        if broker is None or not policy.recorded_total.is_set:
            return 0.0
        timestamp_ms = await uncopied.look(offset)  # None: for example behind an open transaction
        size_bytes = uncopied.at_most(offset) if broker.size_bytes >= 0 else 0
        share = used_share(
            broker, uncopied.age_ms(offset), uncopied.between(offset) if size_bytes is None else size_bytes
        )
        is_known = size_bytes is not None and (broker.ms < 0 or timestamp_ms is not None)
        return share if is_known else max(share, DUE_SHARE)

    def watch_progress(self, *, is_idle: bool, error: str, waits_for: Peer | None) -> None:
        """Watches the progress of the copy, also while it waits for a place.

        The copies of other partitions may occupy all places. `error` is the last one of the copy; empty: none.
        `waits_for`: who did not answer, by that error."""
        services, partition, copy, now_ms = self._services, self._partition, self._copy, self._services.clock_ms()
        if is_idle:
            copy.progress_at_ms = now_ms
        stalled_ms = now_ms - copy.progress_at_ms
        is_stalled = stalled_ms >= services.settings.copy_stall_alarm_ms
        services.metrics.copy_stalled_seconds.labels(*self._labels).set(stalled_ms / 1000 if is_stalled else 0)
        if copy.behind_ms:
            copy.show_age()
        alarms, alarm = services.metrics.alarms, (partition.topic, AlarmReason.COPY_STALLED, str(partition))
        if not is_stalled:
            if alarms.end(*alarm):
                logger.info("copying goes on", extra={"partition": str(partition)})
        elif alarms.begin(*alarm, error, waits_for) and not (waits_for is Peer.STORE and services.outages.now()):
            since = moment_text(services.wall_clock_ms() - stalled_ms)
            fields = {"partition": str(partition), "error": error or "none", "since": since}
            logger.error("copying makes no progress", extra=fields)

    def check_bounds(
        self, bounds: LocalLogBounds, remote_bounds: tuple[int | None, int | None], log_start: int
    ) -> None:
        """Raises an alarm when a bound between the tiers does not hold, or when uncopied records end the trimming.

        `bounds` are those of a leader that has the history of the copied records. An out-of-date leader may end
        anywhere. `remote_bounds` are the first and the last remote offset, as of before the leader answered.
        `log_start` is the recorded one."""
        partition, remote_end = self._partition, remote_bounds[1]
        # A broker that lost its log start has records again that were removed before the owner could copy them.
        local_start, metadata = bounds.log_start_offset, self._services.state
        is_among_copied = remote_end is not None and log_start <= local_start <= remote_end
        is_uncopied = metadata.remote_log_segment_metadata(partition, local_start) is None or any(
            local_start < gap.next_offset <= (remote_end or 0) for gap in metadata.gaps(partition)
        )
        self._raise(AlarmReason.UNCOPIED_BEGINNING, is_raised=is_among_copied and is_uncopied)
        for bound in violated_bounds(bounds, *remote_bounds):
            self._services.metrics.bounds_violations.labels(partition.topic, bound).inc()
            logger.error("a bound between the tiers does not hold", extra={"partition": str(partition), "bound": bound})

    def _raise(self, reason: AlarmReason, *, is_raised: bool, **fields: object) -> None:
        """Raises or ends an alarm. It is logged once per episode."""
        alarms, partition = self._services.metrics.alarms, self._partition
        if not is_raised:
            alarms.end(partition.topic, reason, str(partition))
        elif alarms.begin(partition.topic, reason, str(partition)):
            logger.error(_ALARMS[reason], extra={"partition": str(partition), **fields})

    def measure(self) -> None:
        metadata, metrics, partition = self._services.state, self._services.metrics, self._partition
        size, apart, gaps = metadata.cover_size(partition), metadata.segments_apart(partition), metadata.gaps(partition)
        finished = [one for one in apart if one.is_finished]
        for gauge, value in (
            (metrics.metadata_count, size.whole_segments + len(apart)),
            (metrics.log_gap_offsets, sum(gap.next_offset - gap.first_offset for gap in gaps)),
            (metrics.recorded_cuts, len(metadata.cuts(partition))),
            (metrics.log_size_bytes, size.whole_bytes + sum(one.segment_size_bytes for one in finished)),
        ):
            gauge.labels(*self._labels).set(value)
