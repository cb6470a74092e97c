"""`RemoteLogManager` runs the leader tasks of every partition that this process owns (docs/founding.md, "RLM tasks").

* Every partition has a scheduled processing time. One step of a partition runs at a time: manifest, lineage, leftovers,
  copy, manifest, trim, expiry. The next step is due after `process_interval_ms`, at once when more is ready to be
  copied, or after `retry_interval_ms` (doubling, up to the interval) after a failure.
* If a copy has work and makes no progress, for any reason, an alarm reports it within a minute, and a log line says
  since when and why.
* At most `manager_pool_size` partitions are processed at a time, and at most `copier_pool_size` of them are copied. The
  failure of one partition does not affect the others.
* `run` lives in the caller's TaskGroup. After `stop` no step begins, and the steps in progress have a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Protocol
from uuid import UUID

from tiers.config.topic_policy import TopicPolicy
from tiers.errors import (
    CustomMetadataTooLargeError,
    LogDivergedError,
    MetadataLostError,
    OwnershipLostError,
    RemoteLogError,
)
from tiers.lasting_trouble import LastingTrouble
from tiers.metadata.log_history import LogStartConfirmation
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LocalLogBounds
from tiers.model.segment_state import RemoteLogSegmentState
from tiers.tasks.bounds import violated_bounds
from tiers.tasks.clamp_task import RLMClampTask
from tiers.tasks.copy.copy_task import RLMCopyTask
from tiers.tasks.copy.spool_opening import open_spool
from tiers.tasks.expiration_task import RLMExpirationTask
from tiers.tasks.log_gap_task import LogGapTask
from tiers.tasks.partition_manifest import PartitionManifestTask
from tiers.tasks.remote_disable import RemoteDisableTask
from tiers.tasks.segment_deletion import collect_leftovers
from tiers.tasks.task_services import TaskServices
from tiers.tasks.topic_deletion import TopicDeletionTask
from tiers.tasks.total_retention import TotalRetentionTask
from tiers.tasks.trim_task import TrimTask
from tiers.tasks.uncopied_watch import UncopiedWatch

_OWNERSHIP_INTERVAL_MS = 1000
_WATCH_INTERVAL_MS = 1000
_ALARMS = {
    "copy-lag": "copying is behind by more than half of the retention: records may expire before they are copied",
    "stuck-lso": "the last stable offset stands still: a transaction hangs, and no record after it is copied",
}
_STOPS = {
    "metadata-lost": "the metadata of a partition was lost: the partition is not copied, trimmed or expired",
    "diverged": "the log diverged from the copied records: the partition is not copied, trimmed or expired",
}
logger = logging.getLogger(__name__)


class TopicPolicies(Protocol):
    """The part of `TieredTopics` that the manager uses."""

    @property
    def policies(self) -> Mapping[UUID, TopicPolicy]: ...

    async def refresh(self, timeout_ms: int) -> object: ...


@dataclass(slots=True)
class _Managed:
    partition: TopicIdPartition
    policy: TopicPolicy
    clamp: RLMClampTask
    copy: RLMCopyTask
    trim: TrimTask
    expiration: RLMExpirationTask
    manifest: PartitionManifestTask
    gaps: LogGapTask
    uncopied: UncopiedWatch
    due_ms: int = 0
    failures: int = 0
    copy_stopped: bool = False
    last_error: str = ""
    is_stalled: bool = False
    step: asyncio.Task[None] | None = None
    lso: int = -1
    lso_since_ms: int = 0
    alarms: set[str] = field(default_factory=set)
    stops: set[str] = field(default_factory=set)
    """The reasons for which the partition stopped since its last successful round."""

    @property
    def is_copied(self) -> bool:
        return not (self.policy.copy_disable or self.copy_stopped)

    @property
    def has_trouble(self) -> bool:
        return self.failures > 0 or self.copy_stopped or self.copy.throttled_ms > 0


class RemoteLogManager:
    def __init__(
        self,
        services: TaskServices,
        topics: TopicPolicies,
        topic_deletion: TopicDeletionTask | None = None,
        remote_disable: RemoteDisableTask | None = None,
    ) -> None:
        """Constructs the manager.

        Without `topic_deletion`, the remote logs of deleted topics stay. Without `remote_disable`, those of disabled
        topics stay."""
        self._services = services
        self._topics = topics
        self._topic_deletion = topic_deletion
        self._remote_disable = remote_disable
        self._log_starts = LogStartConfirmation(services.source, services.metadata)
        self._managed: dict[TopicIdPartition, _Managed] = {}
        self._steps: set[asyncio.Task[None]] = set()
        self._copying: set[asyncio.Task[None]] = set()
        """The steps that may copy, among `_steps`."""
        self._wake = asyncio.Event()
        self._stopping = False

    async def run(self) -> None:
        """Runs until `stop`. Returns when the steps in progress have ended, or were cancelled at their deadline."""
        try:
            opening = self._lasting("the spool cannot be opened: nothing is copied", "the spool is open")
            await open_spool(self._services, opening, self._wake, lambda: self._stopping)
            async with asyncio.TaskGroup() as tasks:
                keepers = [
                    tasks.create_task(self._keep_topics()),
                    tasks.create_task(self._keep_deletions()),
                    tasks.create_task(self._keep_disabled()),
                    tasks.create_task(self._keep_totals()),
                    tasks.create_task(self._keep_watch()),
                ]
                while not self._stopping:
                    self._wake.clear()
                    self._start_due(tasks)
                    await self._wait(self._wake, self._idle_ms())
                for keeper in keepers:
                    keeper.cancel()
                await self._end_steps()
        finally:
            for managed in self._managed.values():
                managed.copy.discard()
            self._managed.clear()
            self._services.spool.close()

    def stop(self) -> None:
        """Prevents new steps, and lets `run` end."""
        self._stopping = True
        self._wake.set()

    @property
    def partitions(self) -> list[TopicIdPartition]:
        """The partitions that this process copies now."""
        return list(self._managed)

    async def _keep_topics(self) -> None:
        services, settings = self._services, self._services.settings
        refresh_at_ms = services.clock_ms()
        unread = self._lasting("the tiered topics could not be read", "the tiered topics can be read again")
        while True:
            if services.clock_ms() >= refresh_at_ms:
                refresh_at_ms = services.clock_ms() + settings.topics_interval_ms
                try:
                    await self._topics.refresh(settings.request_timeout_ms)
                    unread.ended()
                except RemoteLogError as error:
                    unread.found(error=str(error))
                except Exception:  # the copying of the known topics goes on
                    logger.exception("the tiered topics could not be read")
            self._assign()
            self._wake.set()
            await asyncio.sleep(min(settings.topics_interval_ms, _OWNERSHIP_INTERVAL_MS) / 1000)

    def _lasting(self, begins: str, ends: str) -> LastingTrouble:
        return LastingTrouble(logger, begins, ends, clock_ms=self._services.clock_ms)

    async def _keep_deletions(self) -> None:
        failing = self._lasting("deleted topics could not be found or removed", "deleted topics can be removed again")
        while self._topic_deletion is not None:
            try:
                await self._topic_deletion.run()
                failing.ended()
            except RemoteLogError as error:
                failing.found(error=str(error))
            except Exception:  # the copying of other topics goes on
                logger.exception("deleted topics could not be found or removed")
            await asyncio.sleep(self._services.settings.topics_interval_ms / 1000)

    async def _keep_disabled(self) -> None:
        failing = self._lasting(
            "the remote log of a disabled topic could not be removed",
            "remote logs of disabled topics are removed again",
        )
        while self._remote_disable is not None:
            try:
                await self._remote_disable.run(self._is_worked_on)
                failing.ended()
            except RemoteLogError as error:
                failing.found(error=str(error))
            except Exception:  # the copying of other topics goes on
                logger.exception("the remote log of a disabled topic could not be removed")
            await asyncio.sleep(self._services.settings.topics_interval_ms / 1000)

    async def _keep_totals(self) -> None:
        totals = TotalRetentionTask(self._services)
        while True:
            try:
                await totals.run(self._topics.policies.values())
            except Exception:  # the copying goes on
                logger.exception("the total retention of topics could not be recorded")
            await asyncio.sleep(self._services.settings.topics_interval_ms / 1000)

    async def _keep_watch(self) -> None:
        while True:
            for managed in list(self._managed.values()):
                self._watch_progress(managed)
            await asyncio.sleep(min(_WATCH_INTERVAL_MS, self._services.settings.copy_stall_alarm_ms) / 1000)

    def _watch_progress(self, managed: _Managed) -> None:
        """Watches a partition's progress, also while it waits for a copier: the others may occupy all of them."""
        services, now_ms = self._services, self._services.clock_ms()
        is_idle = managed.step is None and managed.due_ms > now_ms and not managed.has_trouble
        if is_idle or managed.policy.copy_disable:
            managed.copy.progress_at_ms = now_ms
        stalled_ms = now_ms - managed.copy.progress_at_ms
        is_stalled = stalled_ms >= services.settings.copy_stall_alarm_ms
        labels = managed.partition.topic, str(managed.partition.partition)
        services.metrics.copy_stalled_seconds.labels(*labels).set(stalled_ms / 1000 if is_stalled else 0)
        if managed.copy.behind_ms:
            services.metrics.copy_lag_seconds.labels(*labels).set(managed.copy.behind_ms / 1000)
        fields = {"partition": str(managed.partition), "error": managed.last_error or "none"}
        if is_stalled and not managed.is_stalled:
            services.metrics.alarms.labels(managed.partition.topic, "copy-stalled").inc()
            since = datetime.fromtimestamp((services.wall_clock_ms() - stalled_ms) / 1000, UTC)
            logger.error("copying makes no progress", extra={**fields, "since": since.isoformat(timespec="seconds")})
        elif managed.is_stalled and not is_stalled:
            logger.info("copying goes on", extra={"partition": str(managed.partition)})
        managed.is_stalled = is_stalled

    def _is_worked_on(self, partition: TopicIdPartition) -> bool:
        name = _step_name(partition)
        return partition in self._managed or any(step.get_name() == name for step in self._steps)

    def _assign(self) -> None:
        """Takes on the partitions that are tiered and owned, and gives up the others."""
        wanted = {
            partition: policy
            for policy in self._topics.policies.values()
            for partition in policy.partitions()
            if self._services.metadata.owns(partition)
        }
        for partition in [each for each in self._managed if each not in wanted]:
            self._give_up(partition)
        self._services.failed_deletions.forget_unless(self._services.metadata.owns)
        self._services.metrics.failed_deletions.set(self._services.failed_deletions.count)
        ending = {step.get_name() for step in self._steps}
        for partition, policy in wanted.items():
            managed = self._managed.get(partition)
            if managed is not None:
                managed.policy = policy
                continue
            if _step_name(partition) in ending:
                # Ownership was lost and won again. A copy that is still being cancelled must not look like a leftover.
                continue
            manifest = PartitionManifestTask(self._services, partition)
            self._managed[partition] = _Managed(
                partition,
                policy,
                RLMClampTask(self._services, partition, manifest),
                RLMCopyTask(self._services, partition),
                TrimTask(self._services, partition, manifest),
                RLMExpirationTask(self._services, partition),
                manifest,
                LogGapTask(self._services, partition, manifest),
                UncopiedWatch(self._services, partition),
            )
        self._services.metrics.owned_partitions.set(len(self._managed))

    def _give_up(self, partition: TopicIdPartition) -> None:
        """Gives up a partition, and cancels its step. Later writes of the step are fenced.

        The next owner collects the leftovers."""
        managed = self._managed.pop(partition, None)
        if managed is None:
            return
        if managed.step is not None:
            # A task that is cancelled before it starts runs none of its code, so `_step` does not discard.
            managed.step.add_done_callback(lambda step: managed.copy.discard())
            managed.step.cancel()
        else:
            managed.copy.discard()
        self._services.metrics.forget(partition.topic, partition.partition)
        self._services.metrics.owned_partitions.set(len(self._managed))

    def _start_due(self, tasks: asyncio.TaskGroup) -> None:
        now_ms = self._services.clock_ms()
        due = [each for each in self._managed.values() if each.step is None and each.due_ms <= now_ms]
        for managed in sorted(due, key=lambda each: each.due_ms):
            if not self._has_place(managed):
                continue
            step = managed.step = tasks.create_task(self._step(managed), name=_step_name(managed.partition))
            self._steps.add(step)
            if managed.is_copied:
                self._copying.add(step)
            step.add_done_callback(self._end_step)

    def _has_place(self, managed: _Managed) -> bool:
        """Whether a step of the partition may start now: the pool has a free place, and a free copier if it copies."""
        remote_log = self._services.settings.remote_log
        if len(self._steps) >= remote_log.manager_pool_size:
            return False
        return not managed.is_copied or len(self._copying) < remote_log.copier_pool_size

    def _end_step(self, step: asyncio.Task[None]) -> None:
        """Frees the step's places, and wakes `run`, which may give them to a partition that is due."""
        self._steps.discard(step)
        self._copying.discard(step)
        self._wake.set()

    def _idle_ms(self) -> int:
        """Returns the time until a step is due. A step that ends or an assignment ends the wait earlier."""
        waiting = [each.due_ms for each in self._managed.values() if each.step is None and self._has_place(each)]
        now_ms = self._services.clock_ms()
        return max(1, min(waiting, default=now_ms + self._services.settings.remote_log.task_interval_ms) - now_ms)

    @staticmethod
    async def _wait(event: asyncio.Event, timeout_ms: int) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_ms / 1000):
                await event.wait()

    async def _end_steps(self) -> None:
        if self._steps:
            await asyncio.wait(self._steps, timeout=self._services.settings.stop_timeout_ms / 1000)
        for step in self._steps:
            step.cancel()

    async def _step(self, managed: _Managed) -> None:
        settings = self._services.settings
        pause_ms = settings.remote_log.task_interval_ms
        try:
            if await self._process(managed):
                pause_ms = 0
            elif managed.copy.throttled_ms:
                pause_ms = min(pause_ms, max(managed.copy.throttled_ms, settings.remote_log.task_retry_backoff_ms))
            managed.failures = 0
            if managed.stops:
                managed.stops.clear()
                logger.info("a partition that stopped goes on", extra={"partition": str(managed.partition)})
            if not managed.copy_stopped:
                managed.last_error = ""
        except OwnershipLostError:
            managed.step = None
            self._give_up(managed.partition)
        except Exception as error:  # any error of one partition must not affect the others
            self._on_failure(managed, error)
            pause_ms = min(
                settings.remote_log.task_interval_ms,
                settings.remote_log.task_retry_backoff_ms << min(managed.failures, 16),
            )
            managed.failures += 1
        finally:
            managed.step = None
            managed.due_ms = self._services.clock_ms() + pause_ms
            if self._managed.get(managed.partition) is not managed:
                managed.copy.discard()

    def _on_failure(self, managed: _Managed, error: Exception) -> None:
        topic = managed.partition.topic
        managed.last_error = str(error) or repr(error)
        fields = {"partition": str(managed.partition), "error": str(error)}
        if isinstance(error, MetadataLostError | LogDivergedError):
            reason = "metadata-lost" if isinstance(error, MetadataLostError) else "diverged"
            if reason not in managed.stops:
                self._services.metrics.alarms.labels(topic, reason).inc()
            logger.log(logging.DEBUG if reason in managed.stops else logging.ERROR, _STOPS[reason], extra=fields)
            managed.stops.add(reason)
        elif isinstance(error, CustomMetadataTooLargeError):
            managed.copy_stopped = True
            self._services.metrics.copy_stopped.labels(topic, str(managed.partition.partition)).set(1)
            self._services.metrics.alarms.labels(topic, "custom-metadata").inc()
            logger.error("copying stops: the store's custom metadata is too large", extra=fields)
        elif isinstance(error, RemoteLogError):
            logger.warning("a partition could not be processed", extra=fields)
        else:
            logger.exception("a partition could not be processed", extra=fields)

    async def _process(self, managed: _Managed) -> bool:
        """Runs one round. Returns whether the next round begins at once: for more to copy, or for a new leader."""
        services, partition, policy = self._services, managed.partition, managed.policy
        settings, timeout_ms = services.settings, services.settings.request_timeout_ms
        services.require_ownership(partition)
        await services.metadata.ensure_fresh(partition, settings.remote_log.visible_after_ms // 2, timeout_ms)
        bounds = await services.source.bounds(partition, timeout_ms)
        checked_epoch = bounds.leader_epoch
        self._check_bounds(partition, bounds)
        self._watch(managed, bounds)
        managed.copy.observe(policy, bounds)
        await managed.uncopied.run(policy, bounds, managed.copy.lag_bytes)
        log_start = await self._log_starts.confirmed(partition, bounds.leader_epoch, timeout_ms)
        await managed.manifest.check(bounds, log_start.offset)
        if await managed.clamp.run(bounds, log_start.offset):
            managed.copy.start_over()
            bounds = await services.source.bounds(partition, timeout_ms)
            log_start = await self._log_starts.confirmed(partition, bounds.leader_epoch, timeout_ms)
        await collect_leftovers(services, partition)
        more = False
        if not (policy.copy_disable or managed.copy_stopped):
            more = await self._copy(managed, bounds, log_start.offset)
        elif managed.manifest.is_accepted:
            # The gap that the operator accepts is recorded at once, since the acceptance does not count later.
            if not managed.copy_stopped:
                await managed.copy.finish_removed(bounds)
            await managed.gaps.copy_start(bounds, log_start.offset)
        else:
            await managed.gaps.end_passed(bounds, log_start.offset)
        # The bounds and the policy may be old: the leader or the topic's retention may have changed during the copy.
        bounds = await services.source.bounds(partition, timeout_ms)
        if bounds.leader_epoch != checked_epoch:
            # Expiry deletes below a log start, also at this leader, which may have another history. The next round
            # begins at once, and checks that history first.
            return True
        log_start = await self._log_starts.confirmed(partition, bounds.leader_epoch, timeout_ms)
        await managed.manifest.run()
        if managed.manifest.is_written:
            await managed.trim.run(managed.policy, managed.copy.local_only_bytes, log_start.offset)
        await managed.expiration.run(managed.policy, bounds, log_start, managed.copy.local_only_bytes)
        self._measure(partition)
        await managed.manifest.run()
        await managed.manifest.end_acceptance()
        return more

    async def _copy(self, managed: _Managed, bounds: LocalLogBounds, log_start: int | None) -> bool:
        """Copies the segments that are ready. Returns True when more are ready.

        The manifest has a new gap before the owner copies any record behind that gap."""
        services = self._services
        await managed.copy.finish_removed(bounds)
        start = await managed.gaps.copy_start(bounds, log_start)
        if start is None:
            return False
        if services.metadata.gaps(managed.partition):
            await managed.manifest.run()
            if not managed.manifest.is_written:
                return False
        return await managed.copy.run(managed.policy, bounds, start, log_start)

    def _check_bounds(self, partition: TopicIdPartition, bounds: LocalLogBounds) -> None:
        metadata = self._services.metadata
        violated = violated_bounds(bounds, metadata.earliest_offset(partition), metadata.remote_end_offset(partition))
        for bound in violated:
            self._services.metrics.bounds_violations.labels(partition.topic, bound).inc()
            logger.error("a bound between the tiers does not hold", extra={"partition": str(partition), "bound": bound})

    def _watch(self, managed: _Managed, bounds: LocalLogBounds) -> None:
        """Raises the alarms of docs/design.md, safety rule 8, once per episode: copying falls behind, or a transaction
        hangs."""
        services, policy, now_ms = self._services, managed.policy, self._services.clock_ms()
        if managed.lso != bounds.last_stable_offset or bounds.last_stable_offset == bounds.high_watermark:
            managed.lso, managed.lso_since_ms = bounds.last_stable_offset, now_ms
        # While nothing may expire, the broker's own retention still removes records that are not copied.
        broker = policy.broker_retention
        retention_ms = policy.retention_ms if broker is None or policy.recorded_total.is_set else broker.ms
        raised = {
            "copy-lag": 0 <= retention_ms < 2 * managed.copy.behind_ms,
            "stuck-lso": now_ms - managed.lso_since_ms >= services.settings.stuck_lso_alarm_ms,
        }
        for reason, is_raised in raised.items():
            if is_raised and reason not in managed.alarms:
                services.metrics.alarms.labels(policy.topic, reason).inc()
                logger.error(_ALARMS[reason], extra={"partition": str(managed.partition)})
        managed.alarms = {reason for reason, is_raised in raised.items() if is_raised}

    def _measure(self, partition: TopicIdPartition) -> None:
        segments = list(self._services.metadata.list_remote_log_segments(partition))
        labels = partition.topic, str(partition.partition)
        finished = [one for one in segments if one.state is RemoteLogSegmentState.COPY_SEGMENT_FINISHED]
        cut_off = [one for one in finished if one.is_cut_off]
        self._services.metrics.quarantined_segments.labels(*labels).set(len(cut_off))
        self._services.metrics.quarantined_bytes.labels(*labels).set(sum(one.segment_size_bytes for one in cut_off))
        self._services.metrics.metadata_count.labels(*labels).set(len(segments))
        gaps = self._services.metadata.gaps(partition)
        self._services.metrics.log_gaps.labels(*labels).set(len(gaps))
        self._services.metrics.log_gap_offsets.labels(*labels).set(
            sum(gap.next_offset - gap.first_offset for gap in gaps)
        )
        self._services.metrics.log_size_bytes.labels(*labels).set(sum(one.segment_size_bytes for one in finished))


def _step_name(partition: TopicIdPartition) -> str:
    return f"rlm {partition.topic_id} {partition.partition}"
