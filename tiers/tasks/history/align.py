"""Compares the leader epochs of the tier and the leader's log, and cuts the tier where both histories part.

See docs/design.md, safety rules 2 and 5; docs/semantics.md 6.1, 6.5.

A leader whose log begins behind all copied records confirms them, unless it begins with an older leader epoch than
theirs. A leader that has removed all records of an epoch confirms that epoch up to the start of its log, which proves
nothing.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from operator import attrgetter
from typing import NamedTuple

from protocol.records.record_batch import iterate_batches
from tiers.errors import BrokerError, LogDivergedError, OffsetGapError, RemoteLogMetadataNotReadyError
from tiers.metadata.log_history import disproved_log_starts, kept_log_start
from tiers.metadata.remote_log import RemoteLog, is_measured
from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import EpochEndOffset, LocalLogBounds, LogSource
from tiers.model.log_start import UNKNOWN_EPOCH, LogStart, OffsetAndEpoch
from tiers.model.segment_metadata import Cut, RemoteLogSegmentMetadata, RemoteLogSegmentState, leader_epoch_at
from tiers.tasks.alarms import AlarmReason
from tiers.tasks.task_services import TaskServices

logger = logging.getLogger(__name__)
AskEpoch = Callable[[int], Awaitable[EpochEndOffset]]


class Parting(NamedTuple):
    """The first offset of the tier that the leader's answers disprove.

    `is_proved`: the leader's log has records before `offset`, and the tier has no other record there. `is_ambiguous`:
    the leader's epochs prove nothing. One begins at different offsets in both logs, or its records contradict them."""

    offset: int
    is_proved: bool
    is_ambiguous: bool = False


class EpochRange(NamedTuple):
    """A range of offsets (inclusive) of one leader epoch that the tier has."""

    first_offset: int
    last_offset: int
    leader_epoch: int


async def check_lineage(
    source: LogSource, partition: TopicIdPartition, leader_epoch: int, next_offset: int, timeout_ms: int
) -> None:
    """Raises `LogDivergedError` unless the leader's log has `next_offset - 1` in `leader_epoch`, or begins behind it.

    Raises `BrokerError`."""
    answer = await source.end_offset_for_epoch(partition, leader_epoch, timeout_ms)
    if answer.leader_epoch != leader_epoch or answer.end_offset < next_offset:
        raise LogDivergedError(
            f"{partition} was copied up to offset {next_offset - 1} in leader epoch {leader_epoch}, "
            f"but the leader ends epoch {answer.leader_epoch} at {answer.end_offset}"
        )


async def check_epochs(
    source: LogSource, segment: RemoteLogSegmentMetadata, first_offset: int, last_offset: int, timeout_ms: int
) -> None:
    """Raises the errors of `check_lineage` unless the leader's log has these offsets of the segment, or begins behind
    them."""
    for each in _ranges_of(segment, first_offset, last_offset):
        await check_lineage(source, segment.topic_id_partition, each.leader_epoch, each.last_offset + 1, timeout_ms)


async def align(
    source: LogSource,
    metadata: RemoteLogMetadataState,
    partition: TopicIdPartition,
    bounds: LocalLogBounds,
    timeout_ms: int,
) -> Parting | None:
    """Compares the tier's leader epochs with the leader's. None: the leader's log continues the tier.

    `bounds` are the leader's. The records below a recorded log start do not count, unless the leader disproves it.
    Costs one question if nothing parts, and one for each recorded log start above the leader's. Raises `BrokerError`,
    and `LogDivergedError` if the leader was cut off before the newest CUT, if leader epochs were used again, or if its
    log ends below the tier's end, and its epochs do not explain it: the broker was emptied or restored."""
    require_later_than_cuts(metadata, partition, bounds.leader_epoch)
    parting = await find_parting(source, metadata, partition, bounds, timeout_ms)
    if parting is not None and parting.is_ambiguous:
        now = await source.bounds(partition, timeout_ms)
        require_unchanged(partition, bounds, now)
        raise LogDivergedError(
            f"{partition}: the leader's epochs do not show from which offset it has other records than the tier. Were"
            f" brokers or controllers restored from an older copy? {cut_command(partition)} names the offset"
        )
    end = RemoteLog(metadata, partition).begun_end()
    if parting is None or parting.is_proved or end is None or bounds.high_watermark > end:
        return parting
    raise LogDivergedError(
        f"{partition}: the leader of epoch {bounds.leader_epoch} has the offsets {bounds.log_start_offset} to"
        f" {bounds.high_watermark - 1}, and shows no record that was copied up to {end}: was the broker emptied or"
        f" restored? {cut_command(partition)} goes on with its log"
    )


async def require_aligned(
    source: LogSource,
    metadata: RemoteLogMetadataState,
    partition: TopicIdPartition,
    bounds: LocalLogBounds,
    timeout_ms: int,
) -> None:
    """Raises the errors of `align`, and `RemoteLogMetadataNotReadyError` until the owner has recorded a CUT."""
    parting = await align(source, metadata, partition, bounds, timeout_ms)
    if parting is not None:
        raise RemoteLogMetadataNotReadyError(
            f"{partition}: the leader has other records than the tier from offset {parting.offset} on, and the owner"
            " has not cut the tier yet"
        )


async def find_parting(
    source: LogSource,
    metadata: RemoteLogMetadataState,
    partition: TopicIdPartition,
    bounds: LocalLogBounds,
    timeout_ms: int,
) -> Parting | None:
    """Returns what `align` returns, also for a leader that was emptied or restored. Raises `BrokerError`."""
    # A log start at or below the leader's hides no record of the leader's log.
    known = [each for each in metadata.log_starts(partition) if each.offset <= bounds.log_start_offset]
    log_start = await kept_log_start(source, metadata, partition, timeout_ms, known)
    remote, found, ranges = RemoteLog(metadata, partition), list[Parting](), list[EpochRange]()

    async def ask(leader_epoch: int) -> EpochEndOffset:
        return await source.end_offset_for_epoch(partition, leader_epoch, timeout_ms)

    async def epoch_of_record(offset: int) -> int | None:
        """Returns the leader epoch of the leader's record at `offset`, by the record itself; None without a record."""
        try:
            read = await source.read(partition, offset, 1, timeout_ms)
        except (OffsetGapError, LogDivergedError):  # the offset lies below or above the leader's log
            return None
        first = next(iterate_batches(read.records), None)
        return first.leader_epoch if first is not None and first.base_offset <= offset else None

    for end, epoch in _ends(remote, bounds, log_start):
        is_alike = await _has_end(ask, bounds, end, epoch)
        begin = await _other_begin(ask, epoch_of_record, remote, bounds, end, epoch) if is_alike else None
        if is_alike and begin is None:
            continue
        ranges = ranges or _epoch_ranges(remote, log_start)
        if begin is not None:
            end = min([begin, *(each.first_offset for each in ranges if each.leader_epoch == epoch)])
            end = max(end, bounds.log_start_offset)  # below it, the tier may have the only records
            found.append(Parting(end, is_proved=False, is_ambiguous=True))
        parting = await _parting_below(ask, ranges, bounds, end)
        found += [] if parting is None else [parting]
    if found:
        # The records decide: a broker may have lost leader epochs that its records still have.
        first = max(min(found).offset, bounds.log_start_offset)
        if remote.has(first) and await epoch_of_record(first) == remote.epoch_at(first):
            found.append(min(found)._replace(is_ambiguous=True))
    found += await _deleted_otherwise(ask, remote, bounds)
    return min(found)._replace(is_ambiguous=any(each.is_ambiguous for each in found)) if found else None


def _ends(log: RemoteLog, bounds: LocalLogBounds, log_start: int) -> list[tuple[int, int]]:
    """Returns the offset behind the last record, and behind the last one before each gap that the local log has.

    Each has the leader epoch of the record before it. The records behind a gap show nothing about those before it.
    Attempts count as segments do: the owner may find them whole."""
    begun, end, ends = log.last_attempt(), log.end(), list[tuple[int, int]]()
    if begun is not None:
        ends.append((begun.valid_end_offset, leader_epoch_at(begun.segment_leader_epochs, begun.valid_end_offset)))
    if end is not None:
        before_gaps = (gap.first_offset - 1 for gap in log.gaps())
        offsets = (end, *(each for each in before_gaps if bounds.log_start_offset <= each < end))
        ends += [(offset, log.epoch_at(offset)) for offset in offsets if log.has(offset)]
    return [(offset + 1, epoch) for offset, epoch in ends if offset >= log_start]


async def _has_end(ask: AskEpoch, bounds: LocalLogBounds, end: int, epoch: int) -> bool:
    """Whether the leader has the record before `end` in this epoch, or has removed it."""
    if 0 < epoch == bounds.leader_epoch and end <= bounds.high_watermark:
        return True  # the answer would be the end of the leader's log; `_other_begin` asks a question
    answer = await ask(epoch)
    return answer.leader_epoch == epoch and answer.end_offset >= end


async def _other_begin(
    ask: AskEpoch,
    epoch_of_record: Callable[[int], Awaitable[int | None]],
    remote: RemoteLog,
    bounds: LocalLogBounds,
    end: int,
    epoch: int,
) -> int | None:
    """Returns the offset of a leader's record that has this epoch in one of both logs alone; None: they agree.

    Leaders of a cluster that was restored from an older copy use leader epochs again, for other records. If a broker
    has lost its log start, or its log was compacted, its epochs begin later for the same records. The records decide.
    """
    if epoch <= 0:
        return None
    begin = (await ask(epoch - 1)).end_offset
    if begin < 0:  # the leader does not know its own epoch
        said = f"{remote.partition}: the leader of epoch {bounds.leader_epoch} names no epoch of its log"
        raise BrokerError(said, retriable=True)
    below = min(begin, end) - 1
    if begin > bounds.log_start_offset and remote.epoch_at(below) == epoch:
        return below if await epoch_of_record(below) not in (None, epoch) else None
    is_later = bounds.log_start_offset <= begin and UNKNOWN_EPOCH < remote.epoch_at(begin) < epoch
    return begin if is_later and await epoch_of_record(begin) == epoch else None


async def _parting_below(
    ask: AskEpoch, ranges: Sequence[EpochRange], bounds: LocalLogBounds, end: int
) -> Parting | None:
    """Asks from the newest epoch below `end` down, until the leader confirms one. None: it confirms the newest."""
    start = end
    while place := bisect_left(ranges, end, key=attrgetter("first_offset")):
        newest = ranges[place - 1]
        asked, last = newest.leader_epoch, min(newest.last_offset + 1, end)
        answer = await ask(asked)
        if answer.leader_epoch == asked and answer.end_offset >= last:
            # An end above the start of the log is the end of an epoch of which the leader has records.
            return None if end == start else Parting(end, answer.end_offset > bounds.log_start_offset)
        known, known_to = answer.leader_epoch, answer.end_offset
        if known < 0:  # the asked epoch is above all that the leader knows
            known, known_to = min(bounds.leader_epoch, asked - 1), end
        elif known != asked:
            known = min(known, asked - 1)
        # The leader has no record of the epochs between that of its answer and the one asked for. The answer says
        # nothing of later epochs: below an attempt, a later owner may have copied other records.
        disproved = (each.first_offset for each in ranges[:place] if known < each.leader_epoch <= asked)
        later = max((each.last_offset + 1 for each in ranges[:place] if each.leader_epoch > asked), default=0)
        end = min([end, max(known_to, later), *disproved])
    return None if end == start else Parting(end, bounds.log_start_offset < end <= bounds.high_watermark)


async def _deleted_otherwise(ask: AskEpoch, remote: RemoteLog, bounds: LocalLogBounds) -> list[Parting]:
    """Returns the offsets of copied records that a log start of the leader's history deleted in another leader epoch.

    The leader had the deleted record if that record's epoch ends above the start of its log. All records below are
    deleted, so the offset is proved."""
    found: list[Parting] = []
    for start in remote.metadata.recorded_log_starts(remote.partition):
        copied_epoch = remote.epoch_at(start.offset - 1)
        if start.deletes and UNKNOWN_EPOCH not in (start.last_epoch, copied_epoch) and copied_epoch != start.last_epoch:
            answer = await ask(start.last_epoch)
            end = answer.end_offset if answer.leader_epoch == start.last_epoch else -1
            if end >= start.offset and end > bounds.log_start_offset:
                found.append(Parting(start.offset - 1, is_proved=True))
    return found


def _epoch_ranges(remote: RemoteLog, offset: int) -> list[EpochRange]:
    """Returns the ranges from `offset` on that clients can read, and those of the attempts above them, ascending."""
    readable = (each.metadata for each in remote.metadata.answering_segments(remote.partition, offset))
    ranges: list[EpochRange] = []
    for segment in (*readable, *filter(is_measured, remote.attempts(offset))):
        ranges += _ranges_of(segment, offset, segment.valid_end_offset)
        offset = max(offset, segment.valid_end_offset + 1)
    return ranges


def _ranges_of(segment: RemoteLogSegmentMetadata, first: int, last: int) -> Iterator[EpochRange]:
    """Yields the ranges of a segment's leader epochs that have offsets from `first` to `last` (inclusive)."""
    for entry, following in zip_longest(segment.segment_leader_epochs, segment.segment_leader_epochs[1:]):
        end = last if following is None else min(following.start_offset - 1, last)
        found = EpochRange(max(first, entry.start_offset), end, entry.epoch)
        if found.first_offset <= found.last_offset:
            yield found


def require_unchanged(partition: TopicIdPartition, bounds: LocalLogBounds, now: LocalLogBounds) -> None:
    """Raises `BrokerError` if the leader or its log start has changed since `bounds`."""
    if (now.leader_epoch, now.log_start_offset) != (bounds.leader_epoch, bounds.log_start_offset):
        raise BrokerError(
            f"{partition}: the leader of epoch {bounds.leader_epoch} was replaced, or has removed records. The next"
            " round compares its log again",
            retriable=True,
        )


def require_later_than_cuts(metadata: RemoteLogMetadataState, partition: TopicIdPartition, leader_epoch: int) -> None:
    """Raises `LogDivergedError` if the tier was cut for a leader of a later epoch: this one has the void records."""
    newest = max((cut.leader_epoch for cut in metadata.cuts(partition)), default=leader_epoch)
    if leader_epoch < newest:
        raise LogDivergedError(
            f"{partition}: the tier was cut in leader epoch {newest}. {_too_old(leader_epoch, newest)}"
        )


def require_later_than_copies(
    metadata: RemoteLogMetadataState, partition: TopicIdPartition, offset: int, leader_epoch: int
) -> None:
    """Raises `LogDivergedError` if a CUT of this leader epoch does not void what was copied from `offset` on."""
    parts = [
        each.metadata
        for each in metadata.stored_segments(partition, offset)
        if each.valid_end_offset >= offset and each.state < RemoteLogSegmentState.DELETE_SEGMENT_STARTED
    ]
    first = metadata.next_segment(partition, offset) or next(iter(parts), None)
    newest = max((each.leader_epoch for each in parts), default=leader_epoch)
    if newest > leader_epoch or (first is not None and first.leader_epoch == leader_epoch):
        raise LogDivergedError(
            f"{partition}: the leader has other records from offset {offset} on than a copy of leader epoch {newest}."
            f" {_too_old(leader_epoch, newest)}"
        )


def _too_old(leader_epoch: int, newest: int) -> str:
    return (
        f"The broker that answers leads in epoch {leader_epoch}. If it is cut off from the controllers, let it rejoin."
        f" If the cluster was restored from an older copy, restart brokers until the leader epoch is above {newest}"
    )


def unsettled_cuts(metadata: RemoteLogMetadataState, partition: TopicIdPartition) -> list[Cut]:
    """Returns the CUTs that are not proved.

    A proved CUT at or below one of them, of the same leader epoch or a later one, settles it."""
    cuts = metadata.cuts(partition)
    proved = [each for each in cuts if each.is_proved]
    return [
        each
        for each in cuts
        if not each.is_proved
        and not any(one.leader_epoch >= each.leader_epoch and one.offset <= each.offset for one in proved)
    ]


def open_cut(metadata: RemoteLogMetadataState, partition: TopicIdPartition, log_start: int) -> Cut | None:
    """Returns the lowest unsettled CUT above a record of the tier; None without one.

    `log_start` is the recorded one. While there is such a CUT, nothing of the partition expires or is deleted."""
    cuts = sorted(unsettled_cuts(metadata, partition), key=attrgetter("offset"))
    if not cuts:
        return None
    first = metadata.next_segment(partition, log_start)
    begun = [*([] if first is None else [first]), *RemoteLog(metadata, partition).attempts(log_start)]
    begins_at = min((max(log_start, each.start_offset) for each in begun if not each.is_cut_off), default=None)
    return next((each for each in cuts if begins_at is not None and begins_at < each.offset), None)


def require_no_open_cut(metadata: RemoteLogMetadataState, partition: TopicIdPartition, log_start: int) -> None:
    """Raises `LogDivergedError` if `open_cut` finds a CUT."""
    cut = open_cut(metadata, partition, log_start)
    if cut is not None:
        raise LogDivergedError(
            f"{partition}: the leader of epoch {cut.leader_epoch} has forgotten where its log parts from the copied"
            f" records below offset {cut.offset}: nothing expires until {cut_command(partition)} names the offset"
        )


def cut_command(partition: TopicIdPartition) -> str:
    return f"`tidegate tier cut {partition.topic}:{partition.partition} OFFSET`"


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
        require_later_than_copies(services.state, partition, parting.offset, bounds.leader_epoch)
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
        require_unchanged(self._partition, bounds, now)

    def _recorded(self) -> set[OffsetAndEpoch]:
        return {OffsetAndEpoch(each.offset, each.leader_epoch) for each in self._services.state.cuts(self._partition)}

    def _log(self) -> None:
        """Logs and counts each CUT once, whoever wrote it. A write that failed may take effect in any later round."""
        recorded = self._recorded()
        if self._logged is None:
            self._logged = self._returned = recorded
        for cut in sorted(recorded - self._logged):
            self._services.metrics.alarms.happened(self._partition.topic, AlarmReason.CUT)
            logger.error(
                "another leader's records replaced copied records",
                extra={"partition": str(self._partition), "from_offset": cut.offset, "leader_epoch": cut.leader_epoch},
            )
        self._logged = recorded
