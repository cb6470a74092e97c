"""`RLMCutTask` makes the tier agree with the leader's log, as the first task of a round.

See docs/design.md, safety rule 2.

If an unclean election replaced the end of the log, the task records a CUT. The void records stay in the store until
the total retention has passed since then. If the leader has another history altogether, the owner records that, and the
partition stops. If an operator accepts the leader's log, the task cuts the tier where this log parts from it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from tiers.errors import BrokerError, LogDivergedError, OwnershipLostError, RemoteLogError
from tiers.metadata.attempts import begun_end_offset
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LocalLogBounds
from tiers.model.log_start import OffsetAndEpoch
from tiers.tasks.alarms import AlarmReason
from tiers.tasks.history.lineage import check_history, cut_end, surviving_end
from tiers.tasks.history.partition_manifest import PartitionManifestTask
from tiers.tasks.history.stop_check import AcceptedLog
from tiers.tasks.task_services import TaskServices

logger = logging.getLogger(__name__)


async def _nothing() -> None:
    return


class RLMCutTask:
    def __init__(
        self, services: TaskServices, topic_id_partition: TopicIdPartition, manifest: PartitionManifestTask
    ) -> None:
        self._services = services
        self._partition = topic_id_partition
        self._manifest = manifest
        self._untold: dict[OffsetAndEpoch, int | None] = {}
        """The CUTs whose write has begun, until they take effect, each with the remote end (inclusive) before. A write
        that failed with an unknown outcome may take effect in any later round."""
        self._decided: OffsetAndEpoch | None = None
        """A CUT that is not written yet. A later leader whose log begins behind it confirms everything."""
        self._is_cut = False
        """Whether a CUT has taken effect since the last run that returned."""

    async def run(
        self, bounds: LocalLogBounds, log_start: int | None, end_work: Callable[[], Awaitable[None]] = _nothing
    ) -> bool:
        """Cuts the tier if the leader's log ends earlier.

        Returns whether a CUT has taken effect since the last call that returned, even if the write of the CUT failed.

        `end_work` ends the copy, the trim and the deletion in progress. They belong to the history before the CUT: a
        segment that is finished after it would leave a hole below it. After a CUT, the caller must discard
        what its tasks remember of the tier. The caller has just read `bounds`. `log_start` is the recorded one that
        the leader confirms. Raises `LogDivergedError` when the partition must stop."""
        services, partition, timeout_ms = self._services, self._partition, self._services.settings.request_timeout_ms
        self._tell_of_effect()
        if self._is_cut:
            await end_work()
        try:
            await check_history(services.source, services.metadata, partition, bounds, log_start, timeout_ms)
        except LogDivergedError:
            await end_work()
            await self._agree(bounds, log_start)
            # Checked again after the CUT: the leader may have changed meanwhile.
            await check_history(services.source, services.metadata, partition, bounds, log_start, timeout_ms)
        else:
            await self._end_decision(bounds, end_work)
        if services.metadata.is_diverged(partition):
            await self._require_kept(bounds)
        await self._record_divergence(is_diverged=False)
        is_cut, self._is_cut = self._is_cut, False
        return is_cut

    async def _agree(self, bounds: LocalLogBounds, log_start: int | None) -> None:
        """Cuts off the remote records that the leader's log does not have."""
        services, partition, timeout_ms = self._services, self._partition, self._services.settings.request_timeout_ms
        begun_end, leader_epoch = begun_end_offset(services.metadata, partition), bounds.leader_epoch
        try:
            common = await cut_end(services.source, services.metadata, partition, bounds, log_start, timeout_ms)
        except LogDivergedError:
            await self._record_divergence(is_diverged=True)
            common = await surviving_end(
                services.source, services.metadata, partition, bounds.log_start_offset, timeout_ms
            )
            if not self._manifest.accepts(AcceptedLog(common.offset, bounds.leader_epoch)):
                raise
            if not await self._has_kept(bounds):
                raise
            services.require_ownership(partition)
            # The trims and log starts of the other history say nothing any more. After a crash right here, the recorded
            # divergence keeps the next round from taking the leader's log for one that an unclean election cut.
            begins_at = OffsetAndEpoch(common.offset + 1, bounds.leader_epoch)
            await services.metadata.begin_accepted_history(partition, begins_at)
            services.checkpoint("trim-reset")
            segments = services.metadata.stored_segments(partition, common.offset + 1)
            leader_epoch = max([leader_epoch, *(each.metadata.leader_epoch + 1 for each in segments)])
        if common.offset == begun_end:
            return  # the leader changed back, and confirms all records that are remote or in an attempt
        await self._require_kept(bounds)
        cut = OffsetAndEpoch(common.offset + 1, leader_epoch)
        recorded = services.metadata.cuts(partition)
        if any(each.leader_epoch == cut.leader_epoch and each.offset <= cut.offset for each in recorded):
            raise LogDivergedError(
                f"{partition}: the leader of epoch {leader_epoch} has other records from offset {cut.offset} on than a"
                " copy of the same leader epoch, or of a later one"
            )
        await self._put(cut, begun_end)

    async def _end_decision(self, bounds: LocalLogBounds, end_work: Callable[[], Awaitable[None]]) -> None:
        """Writes a CUT that an earlier round could not write, unless the leader shows the last remote record."""
        decided, begun_end = self._decided, begun_end_offset(self._services.metadata, self._partition)
        if decided is not None and begun_end is not None and decided.offset <= begun_end < bounds.log_start_offset:
            await end_work()
            await self._put(decided, begun_end)
        else:
            self._decided = None

    async def _put(self, cut: OffsetAndEpoch, remote_end: int | None) -> None:
        services, partition = self._services, self._partition
        self._decided = cut
        services.require_ownership(partition)
        self._untold[cut] = remote_end
        await services.metadata.put_cut(partition, cut.leader_epoch, cut.offset)
        self._decided = None
        services.checkpoint("cut-written")
        self._tell_of_effect()

    def _tell_of_effect(self) -> None:
        """Tells of the CUTs that the task wrote and that have taken effect since. `rebuild` writes CUTs too."""
        recorded = {
            OffsetAndEpoch(each.offset, each.leader_epoch) for each in self._services.metadata.cuts(self._partition)
        }
        for cut in self._untold.keys() & recorded:
            remote_end = self._untold.pop(cut)
            self._is_cut = True
            self._services.metrics.cuts.labels(self._partition.topic).inc()
            self._services.metrics.alarms.happened(self._partition.topic, AlarmReason.CUT)
            logger.error(
                "another leader's records replaced copied records",
                extra={"partition": str(self._partition), "from_offset": cut.offset, "remote_end": remote_end},
            )

    async def _has_kept(self, bounds: LocalLogBounds) -> bool:
        """Returns whether the leader and its log start are those of `bounds`. Then all answers since are of that log.

        The answers about epochs name the topic, and this question its id. So it fails for another topic that has the
        name by now. Raises `BrokerError`."""
        now = await self._services.source.bounds(self._partition, self._services.settings.request_timeout_ms)
        return (now.leader_epoch, now.log_start_offset) == (bounds.leader_epoch, bounds.log_start_offset)

    async def _require_kept(self, bounds: LocalLogBounds) -> None:
        if not await self._has_kept(bounds):
            raise BrokerError(
                f"{self._partition}: the leader of epoch {bounds.leader_epoch} was replaced, or has removed records."
                " The next round compares its log again",
                retriable=True,
            )

    async def _record_divergence(self, *, is_diverged: bool) -> None:
        is_recorded = is_diverged == self._services.metadata.is_diverged(self._partition)
        if is_recorded and not is_diverged:
            return
        self._services.require_ownership(self._partition)
        try:
            if not is_recorded:
                await self._services.metadata.put_log_divergence(self._partition, is_diverged=is_diverged)
                self._services.checkpoint("divergence-recorded" if is_diverged else "divergence-ended")
            if is_diverged and not self._manifest.is_accepted:
                # The partition stops now. `rebuild` must know of the divergence too, or it would take it for a gap.
                # An acceptance names the manifest, so an accepted divergence does not change the manifest.
                await self._manifest.run()
        except OwnershipLostError:
            raise
        except RemoteLogError as error:
            if not is_diverged:
                raise
            # The caller stops the partition anyway, and the next round tries again.
            logger.warning(
                "a divergence could not be recorded", extra={"partition": str(self._partition), "error": str(error)}
            )
