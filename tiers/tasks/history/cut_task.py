"""`RLMCutTask` makes the tier agree with the leader's log, as the first task of a round.

See docs/design.md, safety rules 2 and 5. It records a CUT where the leader's log parts from the tier, and ends the log
starts that the leader disproves.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable

from tiers.errors import BrokerError, LogDivergedError
from tiers.metadata.log_history import disproved_log_starts
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LocalLogBounds
from tiers.model.log_start import LogStart, OffsetAndEpoch
from tiers.tasks.alarms import AlarmReason
from tiers.tasks.history.align import Parting, align, cut_command, cut_epoch
from tiers.tasks.task_services import TaskServices

logger = logging.getLogger(__name__)


async def _nothing() -> None:
    return


class RLMCutTask:
    def __init__(self, services: TaskServices, topic_id_partition: TopicIdPartition) -> None:
        self._services = services
        self._partition = topic_id_partition
        self._logged: set[OffsetAndEpoch] | None = None
        self._returned: set[OffsetAndEpoch] = set()
        """The CUTs that were logged, and those that the caller knows of. None: the task has not run yet."""
        self._confirmed: tuple[int, frozenset[LogStart]] = -1, frozenset()
        """A leader epoch, and the log starts that its leader confirmed."""

    @property
    def log_start(self) -> int:
        """The highest recorded log start that the leader confirmed in the last run; 0 without one."""
        recorded = self._services.state.log_starts(self._partition)
        return next((start.offset for start in recorded if start in self._confirmed[1]), 0)

    async def run(self, bounds: LocalLogBounds, end_work: Callable[[], Awaitable[None]] = _nothing) -> bool:
        """Cuts the tier if the leader's log parts from it. Ends the log starts that the leader disproves.

        Returns whether there are other CUTs than when a call returned last, whoever wrote them. Then the caller must
        discard what its tasks remember of the tier. Before that, `end_work` ends the copy, the trim and the deletion in
        progress: a segment that is finished after a CUT would leave a hole below it. The caller has just read
        `bounds`. Raises `LogDivergedError` when the partition must stop. Then nothing is cut, and no log start ends."""
        services, partition, timeout_ms = self._services, self._partition, self._services.settings.request_timeout_ms
        self._log()
        question = services.source, services.state, partition, bounds, timeout_ms
        disproved, parting = await self._disproved(bounds.leader_epoch), await align(*question)
        if parting is not None:
            await end_work()
            await self._cut(bounds, parting)
        # A leader that was cut off does not know the log starts of later leader epochs.
        ended = [each for each in disproved if each.leader_epoch <= bounds.leader_epoch]
        if ended:
            await end_work()
            await self._end_log_starts(bounds, ended)
        # Compared again after a CUT: the leader may have changed meanwhile.
        if parting is not None and await align(*question) is not None:
            raise BrokerError(f"{partition}: the leader's log parts from the tier again", retriable=True)
        recorded = self._recorded()
        is_cut = recorded != self._returned
        if is_cut:
            await end_work()
        self._returned = recorded
        return is_cut

    async def _disproved(self, leader_epoch: int) -> list[LogStart]:
        """Asks the leader about the recorded log starts that it has not confirmed in this leader epoch."""
        services, partition, timeout_ms = self._services, self._partition, self._services.settings.request_timeout_ms
        known = self._confirmed[1] if self._confirmed[0] == leader_epoch else frozenset()
        recorded = services.state.recorded_log_starts(partition)
        disproved = await disproved_log_starts(services.source, services.state, partition, timeout_ms, known)
        self._confirmed = leader_epoch, known.union(recorded).difference(disproved)
        return disproved

    async def _end_log_starts(self, bounds: LocalLogBounds, disproved: Iterable[LogStart]) -> None:
        await self._require_kept(bounds)
        for start in disproved:
            self._services.require_ownership(self._partition)
            await self._services.metadata.end_log_start(self._partition, start)
            logger.warning(
                "a log start has ended: the leader has other records below it",
                extra={
                    "partition": str(self._partition),
                    "log_start_offset": start.offset,
                    "leader_epoch": start.leader_epoch,
                },
            )
            self._services.checkpoint("log-start-ended")

    async def _cut(self, bounds: LocalLogBounds, parting: Parting) -> None:
        services, partition = self._services, self._partition
        if cut_epoch(services.state, partition, parting.offset, bounds.leader_epoch) != bounds.leader_epoch:
            raise LogDivergedError(
                f"{partition}: the leader of epoch {bounds.leader_epoch} has other records from offset {parting.offset}"
                f" on than a copy of the same leader epoch, or of a later one: {cut_command(partition)} voids them"
            )
        await self._require_kept(bounds)
        services.require_ownership(partition)
        await services.metadata.put_cut(partition, bounds.leader_epoch, parting.offset, is_proved=parting.is_proved)
        services.checkpoint("cut-written")
        self._log()

    async def _require_kept(self, bounds: LocalLogBounds) -> None:
        """Raises `BrokerError` unless the leader and its log start are still those of `bounds`.

        Then all answers since are of that log. The answers about epochs name the topic, and this question its id. So it
        fails for another topic that has the name by now."""
        now = await self._services.source.bounds(self._partition, self._services.settings.request_timeout_ms)
        if (now.leader_epoch, now.log_start_offset) != (bounds.leader_epoch, bounds.log_start_offset):
            raise BrokerError(
                f"{self._partition}: the leader of epoch {bounds.leader_epoch} was replaced, or has removed records."
                " The next round compares its log again",
                retriable=True,
            )

    def _recorded(self) -> set[OffsetAndEpoch]:
        return {OffsetAndEpoch(each.offset, each.leader_epoch) for each in self._services.state.cuts(self._partition)}

    def _log(self) -> None:
        """Logs and counts each CUT once, whoever wrote it. A write that failed may take effect in any later round."""
        recorded = self._recorded()
        if self._logged is None:
            self._logged = self._returned = recorded
        for cut in sorted(recorded - self._logged):
            self._services.metrics.cuts.labels(self._partition.topic).inc()
            self._services.metrics.alarms.happened(self._partition.topic, AlarmReason.CUT)
            logger.error(
                "another leader's records replaced copied records",
                extra={"partition": str(self._partition), "from_offset": cut.offset, "leader_epoch": cut.leader_epoch},
            )
        self._logged = recorded
