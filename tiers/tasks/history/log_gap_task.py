"""`LogGapTask` finds the offset at which copying continues, and records gaps of the log.

See docs/design.md, safety rule 5.

If the local log begins after the remote end, the broker's retention or a user removed the records between them before
they were copied. The owner records these offsets as a gap and continues to copy after it. A gap costs only its own
records: the log start does not move, and no other record is deleted for it.

Lost metadata looks the same: the store has the records, and the metadata does not know them. So the owner records a gap
only when three witnesses agree that no record of it was ever copied: the recorded trims, the partition manifest, and
the lineage of the metadata topic. Otherwise the owner stops the partition, and an operator decides.
"""

from __future__ import annotations

import logging

from tiers.errors import MetadataLostError
from tiers.metadata.log_history import confirms
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LocalLogBounds
from tiers.model.log_start import LogGap, LogStart, LogStartReason, OffsetAndEpoch
from tiers.tasks.alarms import AlarmReason
from tiers.tasks.history.partition_manifest import PartitionManifestTask
from tiers.tasks.task_services import TaskServices

logger = logging.getLogger(__name__)


class LogGapTask:
    """Keeps the gaps of one partition, for as long as this process owns it."""

    def __init__(
        self, services: TaskServices, topic_id_partition: TopicIdPartition, manifest: PartitionManifestTask
    ) -> None:
        self._services = services
        self._partition = topic_id_partition
        self._manifest = manifest
        self._seen: tuple[int, int] | None = None
        """The first offset of a gap that is not recorded yet, and the time (ms) since which no witness disagrees."""
        self._untold: tuple[int, LogGap | None] | None = None
        """The first offset of a gap whose write has begun, and the record of the gap before that. A write that failed
        with an unknown outcome may take effect in any later round."""

    async def copy_start(self, bounds: LocalLogBounds, log_start: int | None) -> int | None:
        """Returns the offset at which the next segment begins. Records and ends gaps.

        The caller has just checked the remote lineage. `log_start` is the recorded one that the leader confirms.
        Returns None while the task has seen a gap for less than `gap_alarm_ms`: the broker executes a DeleteRecords
        before the proxy records its log start. Raises `MetadataLostError` when a witness does not agree to a gap."""
        metadata, partition = self._services.metadata, self._partition
        self._tell_of_effect()
        remote_end = metadata.remote_end_offset(partition)
        covered_to = 0 if remote_end is None else remote_end + 1
        next_offset = max(covered_to, log_start or 0)
        await self._end_gaps(bounds, next_offset, log_start or 0)
        if bounds.log_start_offset > next_offset:
            await self._check_trims(next_offset, bounds.leader_epoch)
        await self._record_seen(bounds)
        if covered_to <= (log_start or 0):
            # The remote tier has no record that counts. So no log lies before the local one, and there is no gap.
            return max(bounds.log_start_offset, next_offset)
        if bounds.log_start_offset <= next_offset:
            self._seen = None
            return next_offset
        return await self._behind_gap(LogGap(next_offset, bounds.log_start_offset), bounds.leader_epoch)

    async def _record_seen(self, bounds: LocalLogBounds) -> None:
        """Records the first log start that an owner saw.

        Without a record, a proxy cannot know whether the metadata of the partition was lost, so clients wait."""
        metadata, partition = self._services.metadata, self._partition
        if not metadata.is_known(partition):
            self._check_ownership()
            seen = LogStart(bounds.log_start_offset, bounds.leader_epoch, LogStartReason.SEEN)
            await metadata.put_log_start(partition, seen)

    async def _behind_gap(self, gap: LogGap, leader_epoch: int) -> int | None:
        services, metadata, partition = self._services, self._services.metadata, self._partition
        recorded = metadata.gaps(partition)
        if gap in recorded:
            return gap.next_offset
        now_ms = services.clock_ms()
        is_new = all(known.first_offset != gap.first_offset for known in recorded)
        if not self._manifest.is_accepted:
            judged_to = max(
                [gap.first_offset, *(one.next_offset for one in recorded if one.first_offset == gap.first_offset)]
            )
            try:
                await self._manifest.check_gap(LogGap(judged_to, gap.next_offset))
            except MetadataLostError:
                self._seen = None
                raise
        if is_new:
            if self._seen is None or self._seen[0] != gap.first_offset:
                self._seen = gap.first_offset, now_ms
            is_sure = self._manifest.is_accepted or now_ms - self._seen[1] >= services.settings.gap_alarm_ms
            if not is_sure:
                return None
        if self._untold is None or self._untold[0] != gap.first_offset:
            self._untold = gap.first_offset, self._recorded_at(gap.first_offset)
        self._check_ownership()
        await metadata.put_log_gap(partition, gap, leader_epoch)
        services.checkpoint("gap-written")
        self._seen = None
        self._tell_of_effect()
        return gap.next_offset

    def _recorded_at(self, first_offset: int) -> LogGap | None:
        gaps = self._services.metadata.gaps(self._partition)
        return next((gap for gap in gaps if gap.first_offset == first_offset), None)

    def _tell_of_effect(self) -> None:
        """Tells of a gap if the task wrote it, and it is new or has grown since."""
        if self._untold is None:
            return
        first_offset, before = self._untold
        gap = self._recorded_at(first_offset)
        if gap is None:
            self._untold = first_offset, None  # an earlier record of the gap has ended
        if gap is None or gap == before:
            return
        self._untold = None
        if before is None:
            self._services.metrics.alarms.happened(self._partition.topic, AlarmReason.GAP)
            logger.error(
                "the broker removed records before they were copied: the log has a gap, and copying continues after it",
                extra=self._fields(gap),
            )
        elif gap.next_offset > before.next_offset:
            logger.warning("a gap of the log has grown", extra=self._fields(gap))

    def _fields(self, gap: LogGap) -> dict[str, object]:
        return {
            "partition": str(self._partition),
            "first_offset": gap.first_offset,
            "next_offset": gap.next_offset,
        }

    async def _check_trims(self, next_offset: int, leader_epoch: int) -> None:
        """Asks the first witness: every record that was ever trimmed is known to be remote, or was deleted.

        Raises `MetadataLostError` if the leader confirms a trim whose records the metadata does not explain so."""
        services, partition = self._services, self._partition
        trimmed_to = services.metadata.local_log_start(partition)
        if trimmed_to is None or trimmed_to.offset <= next_offset:
            return
        if any(start.offset >= trimmed_to.offset for start in services.metadata.log_starts(partition)):
            return
        if self._manifest.is_accepted:
            self._check_ownership()
            await services.metadata.put_local_log_start(partition, OffsetAndEpoch(next_offset, leader_epoch))
            return
        if await confirms(services.source, partition, trimmed_to, services.settings.request_timeout_ms):
            raise MetadataLostError(
                f"{partition} was trimmed to {trimmed_to.offset}, but the metadata knows remote records only up to"
                f" {next_offset}: metadata was lost: `tidegate tier rebuild` restores it from the store"
                " (docs/operations.md, 'A partition stops')"
            )

    async def _end_gaps(self, bounds: LocalLogBounds, next_offset: int, log_start: int) -> None:
        """Ends the gaps that lie below the log start, and the gaps whose records the leader has.

        A leader has such records again after a clamp, or when a broker lost its log start."""
        for gap in self._services.metadata.gaps(self._partition):
            is_passed = gap.next_offset <= log_start
            is_before_local_log = gap.first_offset == next_offset < bounds.log_start_offset
            if is_passed or (gap.first_offset >= next_offset and not is_before_local_log):
                self._check_ownership()
                await self._services.metadata.end_log_gap(self._partition, gap)
                logger.info("a gap of the log has ended", extra=self._fields(gap))

    def _check_ownership(self) -> None:
        # To a former owner, the records that the present owner copied and trimmed look like a gap.
        self._services.require_ownership(self._partition)
