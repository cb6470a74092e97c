"""`PartitionTasks`: the RLM tasks of one partition, as stages that fail alone (docs/design.md, "Log range").

A round begins with the *survey*, which every stage needs: fresh metadata, the leader's bounds, its history, and the log
start. Then each stage does its own work:

* **gap**: finds where copying continues, and records gaps.
* **copy**: finishes the attempts that have not ended, and copies.
* **facts**: compares the metadata with the facts in the store, and stores facts that have changed.
* **expiry**: moves the log start. It needs the brokers and the metadata alone.
* **trim**: trims what was copied.
* **deletion**: deletes the objects of expired segments, and of attempts that other copies have replaced.

Until the metadata is proved, and while the owner doubts that it knows all copies, the owner records no gap, and trims,
expires and deletes nothing. While a CUT is not proved, it expires and deletes nothing. Copying goes on. Before a stage
removes anything, it checks that its policy is still the topic's.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from tiers.config.topic_policy import TierWork, TopicPolicy
from tiers.errors import (
    CustomMetadataTooLargeError,
    LogDivergedError,
    MetadataLostError,
    Peer,
    RemoteLogError,
    silent_peer,
)
from tiers.metadata.metadata_log import Tenure
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LocalLogBounds
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.tasks.alarms import AlarmReason
from tiers.tasks.copy.copy_attempts import CopyAttempts
from tiers.tasks.copy.copy_task import RLMCopyTask
from tiers.tasks.copy.uncopied import DUE_SHARE, copy_hold
from tiers.tasks.deletion.segment_deletion import delete_attempts
from tiers.tasks.history.align import RLMCutTask, require_no_open_cut
from tiers.tasks.history.log_gap_task import LogGapTask
from tiers.tasks.history.stored_facts import FactsTask
from tiers.tasks.hold import Hold
from tiers.tasks.metrics import STAGES
from tiers.tasks.partition_watch import PartitionWatch
from tiers.tasks.retention.expiration_task import RLMExpirationTask
from tiers.tasks.retention.trim_task import TrimTask
from tiers.tasks.task_services import Stage, TaskServices

_BEFORE_A_COPY = ("copy", "gap", "survey")
"""The stages without which nothing is copied."""
_DIVERGED = "the log diverged from the copied records: nothing of the partition expires"
_METADATA_LOST = "the metadata of a partition was lost: nothing of the partition is trimmed, expired or deleted"
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Surveyed:
    """The leader's bounds, and the recorded log start. The history of this leader epoch was checked.

    `remote_end` (inclusive) is the end of the remote records that were compared with it. None: there were none. A copy
    that ends during the check may have records of another history behind it. `copy_start` is where copying continues.
    None: nothing can be copied now."""

    bounds: LocalLogBounds
    log_start: int
    remote_end: int | None
    copy_start: int | None = None


@dataclass(frozen=True, slots=True)
class StageReport:
    """A stage of the tasks. `failures` are those since the last success, `error` is the last of them."""

    name: str
    failures: int
    error: str
    is_running: bool


@dataclass(frozen=True, slots=True)
class PartitionReport:
    """What the owner's tasks know about a partition now, for people who look at it.

    `uncopied_bytes` is an estimate of the bytes that are not remote. `behind_ms` is how long one of their records has
    waited. `alarms` are the reasons in docs/alarms.md whose alarms are raised now."""

    uncopied_bytes: int
    behind_ms: int
    alarms: tuple[str, ...]
    stages: tuple[StageReport, ...]
    stopped: str = ""
    """Why the partition stopped; empty while it has not."""
    doubt: str = ""
    """Why the owner doubts the past; empty while it does not."""
    copy_hold: Hold | None = None
    """Why the last round copied nothing; None: something was due."""

    @property
    def error(self) -> str:
        """The last error of the first stage that fails; empty without one."""
        return next((stage.error for stage in self.stages if stage.failures), "")


class PartitionTasks:
    """The tasks of a partition for as long as the tenure lasts. The manager decides when a stage runs."""

    def __init__(
        self, services: TaskServices, topic_id_partition: TopicIdPartition, policy: TopicPolicy, tenure: Tenure
    ) -> None:
        self.partition = topic_id_partition
        self.tenure = tenure
        self.policy = policy
        self.policy_as_of_ms = sys.maxsize
        """When (wall clock) the brokers were asked for the policy, or later."""
        self.facts = FactsTask(services, topic_id_partition)
        self.attempts = CopyAttempts(services, topic_id_partition)
        self.copy = RLMCopyTask(services, topic_id_partition, self.attempts, self.facts)
        self.watch = PartitionWatch(services, topic_id_partition, self.copy)
        self.is_copy_stopped = False
        self.running: dict[str, asyncio.Task[None]] = {}
        """What runs now, by the name of the stage. The round itself has the name of the survey."""
        self.stages = {name: Stage(services, topic_id_partition, name) for name in STAGES}
        self._services = services
        self._cut = RLMCutTask(services, topic_id_partition)
        self._gaps = LogGapTask(services, topic_id_partition, self.facts, self.attempts)
        self._trim = TrimTask(services, topic_id_partition, self._is_in_effect)
        self._expiration = RLMExpirationTask(
            services, topic_id_partition, self._is_in_effect, lambda: self.policy_as_of_ms
        )
        self.stopped = ""
        """Why the partition stopped since its last round that went through; empty: it did not."""
        self._divergence = ""
        """The detail of the alarm `diverged`; empty: it is not raised."""
        self._gap_doubt: MetadataLostError | None = None
        """The doubt of the last search for gaps. The one in progress has none yet."""

    def _is_in_effect(self, policy: TopicPolicy) -> bool:
        return policy == self.policy and self._may_remove

    @property
    def _may_remove(self) -> bool:
        """Whether the metadata is proved, and the owner has no doubt that it knows all copies."""
        return self.facts.is_proved and not self.doubt

    @property
    def doubt(self) -> str:
        """Why the owner doubts that the metadata knows all copies; empty: it does not."""
        return str(self.facts.doubt or self._gap_doubt or "")

    @property
    def is_copied(self) -> bool:
        return copy_hold(self.policy) is None and not self.is_copy_stopped

    @property
    def is_urgent(self) -> bool:
        """Whether a broker may soon remove records that are not copied."""
        return self.watch.retention_share >= DUE_SHARE

    @property
    def copy_waits_for(self) -> Peer | None:
        """Who does not answer, if that is why nothing is copied."""
        peers = (self.stages[name].waits_for for name in _BEFORE_A_COPY)
        return next(filter(None, peers), None) or silent_peer(self.attempts.error)

    def watch_progress(self) -> None:
        """Watches the copy and the stages, also while they wait for places."""
        failing = [self.stages[name] for name in _BEFORE_A_COPY]
        errors = [*(stage.last_error for stage in failing), str(self.attempts.error or "")]
        has_trouble = any(stage.failures for stage in failing) or self.attempts.error is not None
        has_work = has_trouble or self.is_copy_stopped or self.copy.throttled_ms > 0 or "copy" in self.running
        is_idle = copy_hold(self.policy) is not None or not (has_work or self.stages["copy"].is_due)
        error = next(filter(None, errors), "")
        self.watch.watch_progress(is_idle=is_idle, error=error, waits_for=self.copy_waits_for)
        for stage in self.stages.values():
            stage.watch()

    def report(self) -> PartitionReport:
        stages = [
            StageReport(name, each.failures, each.last_error, name in self.running)
            for name, each in self.stages.items()
        ]
        alarms = self._services.metrics.alarms.reasons_of(self.partition.topic, str(self.partition))
        return PartitionReport(
            self.copy.uncopied.size_bytes,
            self.copy.behind_ms,
            tuple(sorted(map(str, alarms))),
            tuple(stages),
            self.stopped,
            self.doubt,
            self.copy.hold,
        )

    def due_ms(self, name: str) -> int:
        """Returns when the stage may run: it is due, and no backoff of the survey is left."""
        survey = self.stages["survey"]
        return max(self.stages[name].due_ms, survey.due_ms if survey.failures else 0)

    async def round(self) -> Surveyed | None:
        """Surveys the partition, and does the work that needs no store. The rest may begin with what it returns.

        None: the survey failed, the leader changed meanwhile, or the partition stopped. Raises the errors in
        `STOPPING`."""
        surveyed = await self.stages["survey"].run(self.survey)
        if surveyed is None:
            return None
        if self.facts.is_check_due and not self.stages["facts"].is_postponed:
            await self.stages["facts"].run(self.facts.check)
        self._show_doubt()
        gap = self.stages["gap"]
        # While a copy is in progress, the remote end is behind, and the records of the copy look like a gap.
        if not ("copy" in self.running or gap.is_postponed):
            surveyed = await gap.run(partial(self.find_copy_start, surveyed)) or surveyed
        if self.stages["expiry"].is_due and not self._has_stopped:
            surveyed = await self.stages["expiry"].run(partial(self.expire, surveyed)) or surveyed
        if self._has_stopped:
            return None
        self.stopped = ""
        self._show_divergence(self._unproved(surveyed.log_start))
        self.watch.measure()
        return surveyed

    @property
    def _has_stopped(self) -> bool:
        """Whether work beside this round has stopped the partition since the survey."""
        return self.stages["survey"].failures > 0

    async def survey(self) -> Surveyed | None:
        """Checks what every stage depends on. Returns None if the leader changed meanwhile.

        Expiry deletes below a log start, also at a leader that may have another history. So the history that is
        checked is that of the leader epoch before and after the check."""
        services, partition = self._services, self.partition
        settings, timeout_ms = services.settings, services.settings.request_timeout_ms
        services.require_ownership(partition)
        await services.log.ensure_fresh(partition, settings.remote_log.fresh_within_ms, timeout_ms)
        size_bytes = await services.source.size_bytes(partition, timeout_ms)
        bounds = await services.source.bounds(partition, timeout_ms)
        self.copy.uncopied.survey(size_bytes, bounds)
        await self.watch.look(self.policy, bounds)
        compared_end = services.state.remote_end_offset(partition)
        if await self._cut.run(bounds, self.end_work):
            self.copy.start_over()
        checked_epoch = bounds.leader_epoch
        # A copy beside the round may move the remote end beyond the bounds of an earlier answer.
        remote_bounds = services.state.earliest_offset(partition), services.state.remote_end_offset(partition)
        bounds = await services.source.bounds(partition, timeout_ms)
        if bounds.leader_epoch != checked_epoch:
            return None
        log_start = self._cut.log_start
        self.watch.check_bounds(bounds, remote_bounds, log_start)
        return Surveyed(bounds, log_start, compared_end)

    async def find_copy_start(self, surveyed: Surveyed) -> Surveyed:
        """Finds where copying continues. Records gaps and ends them, also while the partition is not copied.

        No client gets past removed records that no gap explains, and copying may be disabled for good."""
        if not await self._gaps.make_known(surveyed.bounds, surveyed.log_start):
            return replace(surveyed, copy_start=None)
        has_announced = await self.attempts.announce_kept(surveyed.log_start)
        start = await self._gaps.copy_start(surveyed.bounds, surveyed.log_start)
        self._gap_doubt = self._gaps.doubt
        self._show_doubt()
        return replace(surveyed, copy_start=None if has_announced else start)

    async def copy_segments(self, surveyed: Surveyed) -> bool:
        """Finishes attempts, and copies the segments that are ready. Returns True when more are ready.

        Records that a broker removes soon are read and kept first. Attempts are finished whatever the policy is. Too
        much custom metadata stops the copying of the partition."""
        if self.is_copy_stopped:
            return False
        is_any_kept = False
        try:
            if self.is_urgent:
                with suppress(RemoteLogError):  # the attempts are finished anyway, and then the error comes again
                    is_any_kept = await self._copy(surveyed)
            if await self.attempts.run(surveyed.bounds, surveyed.log_start) or is_any_kept:
                return True  # the next round finds where copying continues
            return await self._copy(surveyed)
        except CustomMetadataTooLargeError as error:
            topic, partition = self.partition.topic, str(self.partition)
            self.is_copy_stopped = True
            self._services.metrics.alarms.begin(topic, AlarmReason.CUSTOM_METADATA, partition, str(error))
            logger.error(
                "copying stops: the store's custom metadata is too large",
                extra={"partition": partition, "error": str(error)},
            )
            return False

    async def _copy(self, surveyed: Surveyed) -> bool:
        start = surveyed.copy_start
        if start is None or not self.is_copied:
            return False
        share = self.watch.retention_share
        behind = self.attempts.start_behind(start, is_urgent=self.is_urgent)
        if behind > start:
            share = await self.watch.share_from(self.policy, behind)
        return await self.copy.run(self.policy, surveyed.bounds, behind, retention_share=share)

    async def run_copy(self, surveyed: Surveyed) -> None:
        copying = self.stages["copy"]
        more = await copying.run(partial(self.copy_segments, surveyed))
        remote_log, now_ms = self._services.settings.remote_log, self._services.clock_ms()
        if more:
            copying.due_ms = now_ms
        elif more is not None and self.copy.throttled_ms:
            pause_ms = max(self.copy.throttled_ms, remote_log.task_retry_backoff_ms)
            copying.due_ms = now_ms + min(remote_log.task_interval_ms, pause_ms)
        if self.attempts.due_ms is not None:
            copying.due_ms = min(copying.due_ms, self.attempts.due_ms)

    async def expire(self, surveyed: Surveyed) -> Surveyed:
        """Moves the log start, and applies it to the broker. Returns what the survey would find now."""
        if not self._may_remove or self._unproved(surveyed.log_start):
            return surveyed
        log_start = await self._expiration.run(
            self.policy, surveyed.bounds, surveyed.log_start, self.copy.uncopied.at_least(), surveyed.remote_end
        )
        return replace(surveyed, log_start=log_start)

    async def run_trim(self, surveyed: Surveyed) -> None:
        """Stores the facts if they have changed, and trims what was copied."""
        if self.stages["facts"].is_due:
            await self.stages["facts"].run(self.facts.run)
        await self.stages["trim"].run(partial(self.trim, surveyed))

    async def trim(self, surveyed: Surveyed) -> None:
        if self._may_remove:
            await self._trim.run(self.policy, surveyed.bounds.leader_epoch)

    async def run_deletion(self, surveyed: Surveyed) -> None:
        await self.stages["deletion"].run(partial(self.delete, surveyed))

    async def delete(self, surveyed: Surveyed) -> None:
        """Deletes the objects of segments that expired, and of attempts that other copies have replaced.

        While expiring is paused, no copied segment is deleted. A copy in progress deletes its attempt itself."""
        if not self._may_remove or self._unproved(surveyed.log_start):
            return
        needless = await self.attempts.give_up(surveyed.bounds, surveyed.log_start)

        def may_delete(segment: RemoteLogSegmentMetadata) -> bool:
            return self._may_remove and segment.segment_id != self.attempts.in_progress

        await delete_attempts(self._services, self.partition, needless, may_delete)
        if TierWork.EXPIRING not in self.policy.paused:
            await self._expiration.delete(self.policy, surveyed.log_start, lambda: self._may_remove)

    def _show_doubt(self) -> None:
        """Shows the alarm while there is a doubt about the past.

        To a former owner, what the present one copied and trimmed looks lost."""
        alarms, alarm = self._services.metrics.alarms, (self.partition.topic, AlarmReason.METADATA_LOST)
        fields = {"partition": str(self.partition)}
        if not self.doubt:
            if alarms.end(*alarm, str(self.partition)):
                logger.info("the metadata of a partition knows all copies again", extra=fields)
        elif self._services.log.owns(self.partition) and alarms.begin(*alarm, str(self.partition), self.doubt):
            logger.error(_METADATA_LOST, extra={**fields, "error": self.doubt})

    def stop(self, error: LogDivergedError, name: str) -> None:
        """Stops the whole partition until a round goes through. Raises the alarm once until then.

        `name` is the stage that found the divergence. If it is not the survey, the stage fails without an alarm: the
        next survey compares the histories itself, and cuts the tier if an unclean election explains the divergence.
        """
        if name == "survey":
            self.stopped = str(error)
            self._show_divergence(f"the partition is not copied or trimmed either: {error}")
        else:
            self.stages[name].failed(error)
        self.stages["survey"].postpone(error)
        self.cancel_work()

    def _unproved(self, log_start: int) -> str:
        """Returns why nothing may expire since the tier was cut; empty: it may."""
        try:
            require_no_open_cut(self._services.state, self.partition, log_start)
        except LogDivergedError as error:
            return str(error)
        return ""

    def _show_divergence(self, why: str) -> None:
        """Raises the alarm until `why` is empty. Each other `why` is logged once."""
        before, self._divergence = self._divergence, why
        alarms, alarm = self._services.metrics.alarms, (self.partition.topic, AlarmReason.DIVERGED, str(self.partition))
        fields = {"partition": str(self.partition)}
        if why:
            alarms.begin(*alarm, why)
            logger.log(logging.DEBUG if why == before else logging.ERROR, _DIVERGED, extra={**fields, "error": why})
        elif alarms.end(*alarm):
            logger.info("a partition that stopped goes on", extra=fields)

    def cancel_work(self) -> list[asyncio.Task[None]]:
        """Cancels what runs, except the caller and the round. Returns the tasks."""
        caller, round_ = asyncio.current_task(), self.running.get("survey")
        tasks = [task for task in self.running.values() if task is not caller and task is not round_]
        for task in tasks:
            task.cancel()
        return tasks

    async def end_work(self) -> None:
        """Ends what runs beside the round, before the round changes the tier under it."""
        if tasks := self.cancel_work():
            await asyncio.wait(tasks)
