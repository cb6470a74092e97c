"""`LogGapTask` finds the offset at which copying continues, and records gaps of the log.

See docs/design.md, safety rule 5. If neither tier has offsets that lie behind copied ones, the broker's retention or a
user removed the records before they were copied. A gap costs only its own records: the log start does not move, and
copying continues after it.

Lost metadata looks the same. So the owner records a gap only when the recorded trims, the stored facts and a listing of
the store agree that no record of it was ever copied, and no attempt may have one. Otherwise the owner doubts the past
(`doubt`) until an operator decides. Copying goes on behind the offsets, and clients get an error that they retry.

Before the first segment no gap is recorded: a client goes on at the start of the local log. But the owner lists the
store there, too. If it finds a segment that the metadata does not know, it records the segment's end as that of a trim,
so that every process can see that the metadata has lost segments there.
"""

from __future__ import annotations

import logging

from tiers.errors import MetadataLostError, RemoteStorageError
from tiers.metadata.log_history import confirms
from tiers.metadata.remote_log import RemoteLog
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LocalLogBounds
from tiers.model.log_start import LogGap, LogStart, LogStartReason, OffsetAndEpoch
from tiers.model.segment_metadata import leader_epoch_at
from tiers.tasks.alarms import AlarmReason
from tiers.tasks.copy.copy_attempts import CopyAttempts
from tiers.tasks.history.stored_facts import FIRST_PAUSE_MS, WAY_BACK, FactsTask, Look
from tiers.tasks.task_services import TaskServices

MEMBER_RETURNS_WITHIN_MS = 600_000
"""How long no gap is recorded over an attempt whose objects are missing. A member may have the only copy in its spool,
and restart meanwhile. Clients get an error that they retry."""
logger = logging.getLogger(__name__)


class LogGapTask:
    """Keeps the gaps of one partition, for as long as this process owns it."""

    def __init__(
        self,
        services: TaskServices,
        topic_id_partition: TopicIdPartition,
        facts: FactsTask,
        attempts: CopyAttempts,
    ) -> None:
        self._services = services
        self._partition = topic_id_partition
        self._remote = RemoteLog(services.state, topic_id_partition)
        self._facts = facts
        self._attempts = attempts
        self.doubt: MetadataLostError | None = None
        """Why the last `copy_start` doubts that the metadata knows all copies; None: it does not."""
        self._seen: dict[int, int] = {}
        """The first offsets of the gaps that are not recorded yet, and the times (ms) since which the checks agree."""
        self._untold: tuple[int, LogGap | None] | None = None
        """The first offset of a gap whose write has begun, and the record of the gap before that. A write that failed
        with an unknown outcome may take effect in any later round."""
        self._listed_to = 0
        """The start of the local log up to which the store was listed before the first segment."""
        self._listing = Look()
        """The next listing before the first segment."""
        self._looks: dict[int, Look] = {}
        """The next looks at the holes, by their first offsets."""

    async def make_known(self, bounds: LocalLogBounds, log_start: int) -> bool:
        """Writes the first record of a partition. Returns False while the store cannot be listed.

        The first record makes clients begin at the local log. Without one, a proxy cannot know whether the metadata was
        lost, so clients wait. So the owner writes nothing else about the partition before that."""
        services, partition, local_start = self._services, self._partition, bounds.log_start_offset
        if not services.state.is_known(partition) and local_start > log_start:
            await self._check_head(log_start, bounds)  # records lost segments
        if not services.state.is_known(partition):
            if local_start > max(log_start, self._listed_to):
                return False
            self._check_ownership()
            seen = LogStart(local_start, bounds.leader_epoch, LogStartReason.SEEN)
            await services.metadata.put_log_start(partition, seen)
        return True

    async def copy_start(self, bounds: LocalLogBounds, log_start: int) -> int | None:
        """Returns the offset at which the next segment begins. Records and ends gaps, and sets `doubt`.

        The caller has just checked the remote lineage, and the metadata knows the partition (`make_known`). `log_start`
        is the recorded one.
        It is the first offset of the local log that neither a readable segment nor a recorded gap has. Returns None
        while the task has seen a gap behind the last segment for less than `gap_alarm_ms`: the broker executes a
        DeleteRecords before the proxy records its log start."""
        remote, local_start = self._remote, bounds.log_start_offset
        self._tell_of_effect()
        self.doubt = None
        remote_end = remote.end()
        covered_to = 0 if remote_end is None else remote_end + 1
        await self._end_gaps(bounds, log_start)
        if local_start > log_start:
            await self._check_head(log_start, bounds)
        found = await remote.holes(log_start, local_start)
        first_offsets = {hole.first_offset for hole in found}
        self._seen = {offset: since for offset, since in self._seen.items() if offset in first_offsets}
        self._looks = {offset: look for offset, look in self._looks.items() if offset in first_offsets}
        for hole in found:
            if not await self._behind_hole(hole, bounds) and hole.first_offset >= covered_to:
                return None
        return remote.next_uncopied(max(local_start, log_start))

    async def _check_head(self, log_start: int, bounds: LocalLogBounds) -> None:
        """Checks that the store has no segment between the log start and the first segment, or the local log.

        While the store cannot be listed, the broker's answers pass, unless the metadata does not know the partition."""
        services, metadata, partition = self._services, self._services.state, self._partition
        first = metadata.next_segment(partition, log_start)
        head = LogGap(log_start, bounds.log_start_offset if first is None else first.start_offset)
        trim = self._remote.lost_trim(log_start)
        if trim is not None:
            await self._check_trim(trim, log_start)
            if self.doubt is not None and first is None and trim.offset < head.next_offset:
                await self._mark_lost(head.next_offset, bounds.leader_epoch)
        is_due = max(self._listed_to, log_start) < head.next_offset and services.clock_ms() >= self._listing.at_ms
        if self.doubt is not None or not is_due:
            return
        try:
            has_unknown = await self._facts.has_unknown(head)
        except RemoteStorageError as error:
            self._listing = Look(services.clock_ms() + FIRST_PAUSE_MS)
            fields = {"partition": str(partition), "error": str(error)}
            logger.debug("the store cannot be listed before the first segment", extra=fields)
            return
        if not has_unknown:
            self._listed_to, self._listing = head.next_offset, Look(services.clock_ms() + FIRST_PAUSE_MS)
            return
        await self._mark_lost(head.next_offset, bounds.leader_epoch)
        await self._check_trim(OffsetAndEpoch(head.next_offset, bounds.leader_epoch), log_start)

    async def _mark_lost(self, offset: int, leader_epoch: int) -> None:
        """Records that segments below `offset`, where copying continues, are lost: as the end of a trim."""
        self._check_ownership()
        await self._services.metadata.put_local_log_start(self._partition, OffsetAndEpoch(offset, leader_epoch))
        self._services.checkpoint("lost-segments-recorded")

    async def _behind_hole(self, hole: LogGap, bounds: LocalLogBounds) -> bool:
        """Records a gap over the hole, or doubts the past. Returns False while it is not decided."""
        services, metadata, partition = self._services, self._services.state, self._partition
        following = metadata.next_segment(partition, hole.first_offset)
        if self._attempts.blocking(*hole) is not None:
            return True  # copying waits for the attempt, or goes on behind it
        if not await self._is_sure(hole, bounds):
            return True
        now_ms = services.clock_ms()
        seen_for_ms = now_ms - self._seen.setdefault(hole.first_offset, now_ms)
        if self._attempts.may_return(*hole) and seen_for_ms < MEMBER_RETURNS_WITHIN_MS:
            return True  # copying goes on behind the hole
        continues_gap = self._gap_before(hole) is not None
        if seen_for_ms < services.settings.gap_alarm_ms and not continues_gap:
            return False
        await self._attempts.read_again(bounds, *hole)
        if self._attempts.blocking(*hole) is None and metadata.next_segment(partition, hole.first_offset) == following:
            await self._record(hole, bounds)
        return True

    async def _record(self, hole: LogGap, bounds: LocalLogBounds) -> None:
        """Records a gap over the hole, together with the gap before it."""
        earlier = self._gap_before(hole)
        gap = hole if earlier is None else LogGap(earlier.first_offset, hole.next_offset)
        if self._untold is None or self._untold[0] != gap.first_offset:
            self._untold = gap.first_offset, earlier
        self._check_ownership()
        await self._services.metadata.put_log_gap(self._partition, gap, bounds.leader_epoch)
        self._services.checkpoint("gap-written")
        self._seen.pop(hole.first_offset, None)
        self._tell_of_effect()

    def _gap_before(self, hole: LogGap) -> LogGap | None:
        return next((gap for gap in self._remote.gaps() if gap.next_offset == hole.first_offset), None)

    async def _is_sure(self, hole: LogGap, bounds: LocalLogBounds) -> bool:
        """Whether no record of the hole was ever copied. Otherwise the method sets `doubt`, unless the store does not
        answer. Copying goes on behind the hole meanwhile."""
        trim = self._remote.last_trim()
        # A trim that ends above the hole was made of the segments above it.
        if trim is not None and hole.first_offset < trim.offset <= hole.next_offset:
            await self._check_trim(trim, hole.first_offset)
        await self._check_void(hole, bounds)
        look, now_ms = self._looks.get(hole.first_offset, Look()), self._services.clock_ms()
        if self.doubt is None and now_ms >= look.at_ms:
            try:
                await self._facts.check_gap(hole)
                look = Look()
            except MetadataLostError as found:
                look.again(now_ms, found)
            except RemoteStorageError as error:
                look.at_ms = now_ms + FIRST_PAUSE_MS  # a doubt of an earlier look stays
                fields = {"partition": str(self._partition), "error": str(error)}
                logger.debug("it is not known whether the store has records of a hole", extra=fields)
            self._looks[hole.first_offset] = look
        self.doubt = self.doubt or look.doubt
        if self.doubt is not None:
            self._seen.pop(hole.first_offset, None)
        return self.doubt is None and now_ms >= look.at_ms

    def _tell_of_effect(self) -> None:
        """Tells of a gap if the task wrote it, and it is new or has grown since."""
        if self._untold is None:
            return
        first_offset, before = self._untold
        gap = next((gap for gap in self._remote.gaps() if gap.first_offset == first_offset), None)
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
        return {"partition": str(self._partition), **gap._asdict()}

    async def _check_trim(self, trim: OffsetAndEpoch, known_to: int) -> None:
        """Compares a trim with the remote records, which end at `known_to`: all records that were trimmed are remote.

        Sets `doubt` if the leader confirms the trim."""
        services, partition = self._services, self._partition
        if await confirms(services.source, partition, trim, services.settings.request_timeout_ms):
            self.doubt = MetadataLostError(
                f"{partition} was trimmed to {trim.offset}, but the metadata knows no remote records from {known_to}"
                f" on: metadata was lost: {WAY_BACK}"
            )

    async def _check_void(self, hole: LogGap, bounds: LocalLogBounds) -> None:
        """Asks the leader about the copies of the hole that a CUT voids.

        Sets `doubt` if the leader has records of their epoch behind them: they are of its history. A former leader has
        come back, and the leader for which the tier was cut is gone."""
        services, partition = self._services, self._partition
        for each in self._remote.void_copies(hole):
            first = max(each.start_offset, hole.first_offset, each.cut_at or 0)
            epoch = leader_epoch_at(each.segment_leader_epochs, first)
            answer = await services.source.end_offset_for_epoch(partition, epoch, services.settings.request_timeout_ms)
            # An end above the start of the log is the end of an epoch of which the leader has records.
            if answer.leader_epoch == epoch and answer.end_offset > max(first, bounds.log_start_offset):
                self.doubt = MetadataLostError(
                    f"{partition}: the tier was cut at {each.cut_at}, but the leader of epoch {bounds.leader_epoch} has"
                    f" the history of the void copies again. Clients wait for the offsets {hole.first_offset} to"
                    f" {hole.next_offset - 1}: `tidegate tier accept` goes on without them (docs/recovery.md)"
                )
                return

    async def _end_gaps(self, bounds: LocalLogBounds, log_start: int) -> None:
        """Ends the gaps below the log start, and the parts of gaps whose records the leader has.

        A leader has such records again after a CUT, or when a broker lost its log start."""
        metadata, partition = self._services.metadata, self._partition
        for gap in self._remote.gaps():
            if log_start < gap.next_offset <= bounds.log_start_offset:
                continue
            self._check_ownership()
            if log_start < gap.next_offset and gap.first_offset < bounds.log_start_offset:
                rest = LogGap(gap.first_offset, bounds.log_start_offset)
                await metadata.put_log_gap(partition, rest, bounds.leader_epoch)
            else:
                await metadata.end_log_gap(partition, gap)
                logger.info("a gap of the log has ended", extra=self._fields(gap))

    def _check_ownership(self) -> None:
        # To a former owner, the records that the present owner copied and trimmed look like a gap.
        self._services.require_ownership(self._partition)
