"""`PartitionWatch`: what an owner measures of one partition, and the alarms about it.

See docs/design.md, safety rule 8.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime

from tiers.config.topic_policy import TopicPolicy
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LocalLogBounds
from tiers.tasks.alarms import AlarmReason
from tiers.tasks.bounds import violated_bounds
from tiers.tasks.copy.copy_task import RLMCopyTask
from tiers.tasks.copy.uncopied import UncopiedRecords, has_lag
from tiers.tasks.retention.uncopied_watch import UncopiedWatch
from tiers.tasks.task_services import TaskServices

_ALARMS = {
    AlarmReason.COPY_LAG: (
        "copying is behind by more than half of the retention: records may expire before they are copied"
    ),
    AlarmReason.STUCK_LSO: "the last stable offset stands still: a transaction hangs, and no record after it is copied",
    AlarmReason.UNCOPIED_BEGINNING: "the local log has uncopied records before copied ones: trimming stops at them",
}
logger = logging.getLogger(__name__)


class PartitionWatch:
    def __init__(self, services: TaskServices, topic_id_partition: TopicIdPartition, heads: UncopiedRecords) -> None:
        self._services = services
        self._partition = topic_id_partition
        self.uncopied = UncopiedWatch(services, topic_id_partition, heads)
        self._lso = -1
        self._lso_since_ms = 0
        self._alarms: set[AlarmReason] = set()
        self._is_stalled = False

    @property
    def retention_share(self) -> float:
        """The part of the broker's retention that records which are not copied have used; 0.0 if it is the total."""
        return self.uncopied.share

    async def look(self, policy: TopicPolicy, bounds: LocalLogBounds, copy: RLMCopyTask) -> None:
        """Looks at the leader's bounds, once a round."""
        self._watch(policy, bounds, copy.behind_ms)
        copy.observe(policy, bounds)
        await self.uncopied.run(policy, bounds, copy.uncopied.at_most)

    def watch_progress(self, copy: RLMCopyTask, *, is_idle: bool, error: str) -> None:
        """Watches the progress of a copy, also while it waits for a place.

        The copies of other partitions may occupy all places. `error` is the last one of the copy; empty: none."""
        services, partition, now_ms = self._services, self._partition, self._services.clock_ms()
        if is_idle:
            copy.progress_at_ms = now_ms
        stalled_ms = now_ms - copy.progress_at_ms
        is_stalled = stalled_ms >= services.settings.copy_stall_alarm_ms
        labels = partition.topic, str(partition.partition)
        services.metrics.copy_stalled_seconds.labels(*labels).set(stalled_ms / 1000 if is_stalled else 0)
        if copy.behind_ms:
            copy.show_age()
        services.metrics.alarms.tell(partition.topic, AlarmReason.COPY_STALLED, str(partition), error)
        if is_stalled and not self._is_stalled:
            services.metrics.alarms.begin(partition.topic, AlarmReason.COPY_STALLED, str(partition), error)
            since = datetime.fromtimestamp((services.wall_clock_ms() - stalled_ms) / 1000, UTC)
            fields = {"partition": str(partition), "error": error or "none"}
            logger.error("copying makes no progress", extra={**fields, "since": since.isoformat(timespec="seconds")})
        elif self._is_stalled and not is_stalled:
            services.metrics.alarms.end(partition.topic, AlarmReason.COPY_STALLED, str(partition))
            logger.info("copying goes on", extra={"partition": str(partition)})
        self._is_stalled = is_stalled

    def check_bounds(
        self,
        policy: TopicPolicy,
        bounds: LocalLogBounds,
        remote_bounds: tuple[int | None, int | None],
        log_start: int,
    ) -> None:
        """Raises an alarm when a bound between the tiers does not hold, or when uncopied records end the trimming.

        `bounds` are those of a leader that has the history of the copied records. An out-of-date leader may end
        anywhere. `remote_bounds` are the first and the last remote offset, as of before the leader answered.
        `log_start` is the recorded one."""
        partition, (remote_start, remote_end) = self._partition, remote_bounds
        # A broker that lost its log start has records again that were removed before the owner could copy them.
        local_start, metadata = bounds.log_start_offset, self._services.state
        is_among_copied = remote_end is not None and log_start <= local_start <= remote_end
        is_uncopied = metadata.remote_log_segment_metadata(partition, local_start) is None or any(
            local_start < gap.next_offset <= (remote_end or 0) for gap in metadata.gaps(partition)
        )
        self._raise(policy, AlarmReason.UNCOPIED_BEGINNING, is_raised=is_among_copied and is_uncopied)
        for bound in violated_bounds(bounds, remote_start, remote_end):
            self._services.metrics.bounds_violations.labels(partition.topic, bound).inc()
            logger.error("a bound between the tiers does not hold", extra={"partition": str(partition), "bound": bound})

    def _watch(self, policy: TopicPolicy, bounds: LocalLogBounds, behind_ms: int) -> None:
        """Watches whether copying falls behind, or a transaction hangs."""
        services, now_ms = self._services, self._services.clock_ms()
        if self._lso != bounds.last_stable_offset or bounds.last_stable_offset == bounds.high_watermark:
            self._lso, self._lso_since_ms = bounds.last_stable_offset, now_ms
        # While nothing may expire, the broker's own retention still removes records that are not copied.
        broker = policy.broker_retention
        retention_ms = policy.retention_ms if broker is None or policy.recorded_total.is_set else broker.ms
        asked_ms = policy.copy_lag_ms + policy.segment_ms if has_lag(policy) else 0
        raised = {
            AlarmReason.COPY_LAG: retention_ms >= 0 and behind_ms > max(retention_ms // 2, asked_ms),
            AlarmReason.STUCK_LSO: now_ms - self._lso_since_ms >= services.settings.stuck_lso_alarm_ms,
        }
        for reason, is_raised in raised.items():
            self._raise(policy, reason, is_raised=is_raised)

    def _raise(self, policy: TopicPolicy, reason: AlarmReason, *, is_raised: bool) -> None:
        """Raises or ends an alarm. It is raised once per episode."""
        alarms, partition = self._services.metrics.alarms, str(self._partition)
        if not is_raised:
            self._alarms.discard(reason)
            alarms.end(policy.topic, reason, partition)
        elif reason not in self._alarms:
            self._alarms.add(reason)
            alarms.begin(policy.topic, reason, partition)
            logger.error(_ALARMS[reason], extra={"partition": partition})

    def measure(self) -> None:
        metadata, metrics, partition = self._services.state, self._services.metrics, self._partition
        size, apart = metadata.cover_size(partition), metadata.segments_apart(partition)
        labels = partition.topic, str(partition.partition)
        finished = [one for one in apart if one.is_finished]
        cut_off = [one for one in finished if one.valid_end_offset < one.start_offset]
        metrics.cut_segments.labels(*labels).set(len(cut_off))
        metrics.cut_bytes.labels(*labels).set(sum(one.segment_size_bytes for one in cut_off))
        metrics.metadata_count.labels(*labels).set(size.whole_segments + len(apart))
        gaps = metadata.gaps(partition)
        metrics.log_gaps.labels(*labels).set(len(gaps))
        metrics.log_gap_offsets.labels(*labels).set(sum(gap.next_offset - gap.first_offset for gap in gaps))
        metrics.recorded_cuts.labels(*labels).set(len(metadata.cuts(partition)))
        size_bytes = size.whole_bytes + sum(one.segment_size_bytes for one in finished)
        metrics.log_size_bytes.labels(*labels).set(size_bytes)
