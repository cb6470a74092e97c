"""`RemoteLog`: what the metadata knows of one partition's log over both tiers. It asks no broker and no store.

The log begins at the *log start*: the highest recorded one that deletes records, or the first copied record. From there
on, each offset is in a readable segment, in a recorded gap, in the local log, or it is unknown: its records were lost,
or the metadata of their copy was. CUTs are in the metadata's answers already: a void offset is in no readable segment.

An *attempt* is a segment in COPY_SEGMENT_STARTED: of a copy in progress, or of one whose owner or job failed. Its
objects may be whole, also if the owner that wrote them is gone (docs/design.md, "Attempts").
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import islice, takewhile
from typing import NamedTuple

from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.model.copy_plan import NOT_MEASURED_BYTES
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LocalLogBounds
from tiers.model.log_start import UNKNOWN_EPOCH, LogGap, OffsetAndEpoch
from tiers.model.segment_metadata import RemoteLogSegmentMetadata, RemoteLogSegmentState, leader_epoch_at

_RUNS_BETWEEN_YIELDS = 512
LEFT_AFTER_MS = 60_000
"""The age at which an attempt at a copy counts as left."""


class GapExit(NamedTuple):
    """The place where a log continues behind a recorded gap."""

    end: int
    """The end (exclusive) of the gap, or of the last one of the gaps that follow without a record between them."""
    segment_start: int | None
    """The start offset of the first remote segment behind the requested offset; None: no segment is there."""

    @property
    def is_remote(self) -> bool:
        """Whether the remote tier has the record that follows the gap.

        The local log may have that record too, or an earlier one."""
        return self.segment_start is not None and self.segment_start <= self.end


class RemoteLog:
    """A view of one partition. Each call reads the state as it is then.

    A caller that needs several answers of one state must not await anything between them."""

    __slots__ = ("metadata", "partition")

    def __init__(self, metadata: RemoteLogMetadataState, topic_id_partition: TopicIdPartition) -> None:
        self.metadata = metadata
        self.partition = topic_id_partition

    # The bounds

    def log_start(self, local_log_start: int | None = None) -> int:
        """Returns the highest log start that is recorded and deletes records; 0 without one.

        With `local_log_start`, a higher one does not count: the broker has the records, until the owner deletes them
        again or ends that log start. A slow proxy may have recorded it for the log of another leader."""
        offsets = (start.offset for start in self.metadata.log_starts(self.partition))
        return next((offset for offset in offsets if local_log_start is None or offset <= local_log_start), 0)

    def earliest(self, local_log_start: int) -> int | None:
        """Returns the first offset that a Fetch can read from either tier. None: the partition is not tiered.

        It lies after a gap at the head of the log, recorded or not."""
        if not self.metadata.is_known(self.partition):
            return None
        log_start = self.log_start(local_log_start)
        segment = self.metadata.next_segment(self.partition, log_start)
        return local_log_start if segment is None else min(max(log_start, segment.start_offset), local_log_start)

    def end(self, log_start: int = 0) -> int | None:
        """Returns the last remote offset. None: no remote record lies at or above `log_start`.

        The head of a segment that is cut may remain below the log start. It does not count."""
        end_offset = self.metadata.remote_end_offset(self.partition)
        return None if end_offset is None or end_offset < log_start else end_offset

    def next_remote(self, local_log_start: int) -> int:
        """Returns the end (exclusive) of the remote records; without any, the log start, or that of the local log."""
        log_start, end_offset = self.metadata.log_start_offset(self.partition), self.end()
        begin = local_log_start if log_start is None else log_start
        return begin if end_offset is None else max(begin, end_offset + 1)

    def next_local(self, local: LocalLogBounds) -> int:
        """NEXT_LOCAL_TIMESTAMP (docs/founding.md): returns the offset below which every record of the log is remote.

        It is the remote end + 1. The local log holds the offset, so it lies in [local log start, last stable offset]
        (docs/semantics.md 5.1)."""
        end_offset = self.end()
        offset = 0 if end_offset is None else end_offset + 1
        # The local log begins behind a gap that follows the remote end. If it begins inside the gap, a new leader has
        # records of the gap, and the owner copies them. So the end of the gap does not count.
        return max(local.log_start_offset, min(offset, local.last_stable_offset))

    def last_trim(self) -> OffsetAndEpoch | None:
        """Returns the end of the last trim, below which all records are remote; None after a deletion of them."""
        trim = self.metadata.local_log_start(self.partition)
        if trim is None or any(start.covers(trim) for start in self.metadata.recorded_log_starts(self.partition)):
            return None
        return trim

    def lost_trim(self, log_start: int) -> OffsetAndEpoch | None:
        """Returns the recorded trim if it ends above `log_start` and the recorded gaps there, and no segment from
        `log_start` on begins below its end.

        The owner never trims the newest segment, so segments existed below such a trim. The metadata has lost them if
        the leader confirms both `log_start` and the trim. If an operator accepts the loss, another trim is recorded."""
        trim = self.last_trim()
        if trim is None or trim.offset <= self.behind_gaps(log_start):
            return None
        first = self.metadata.next_segment(self.partition, log_start)
        return trim if first is None or first.start_offset >= trim.offset else None

    # One offset

    def has(self, offset: int) -> bool:
        """Whether a readable segment has the offset."""
        return self.metadata.remote_log_segment_metadata(self.partition, offset) is not None

    def remote_position(self, offset: int) -> int | None:
        """Returns the offset at which a remote read begins: `offset`, or the next one behind the gap that holds it.

        None: the tier is not known to have that offset, or a recorded log start lies above `offset`."""
        log_start = self.metadata.log_start_offset(self.partition)
        if log_start is None or offset < log_start:
            return None
        if self.has(offset):
            return offset
        gap = self.gap_exit(offset)
        return gap.segment_start if gap is not None and gap.is_remote else None

    def gap_exit(self, offset: int) -> GapExit | None:
        """Returns where the log continues behind the recorded gap that holds the offset. None: no gap holds it."""
        end = self.behind_gaps(offset)
        if end == offset:
            return None
        segment = self.metadata.next_segment(self.partition, offset)
        return GapExit(end, None if segment is None else segment.start_offset)

    def is_at_head(self, offset: int, log_start: int) -> bool:
        """Whether no remote segment lies between the recorded `log_start` and the offset.

        An owner records no gap there: the log begins behind those offsets."""
        segment = self.metadata.next_segment(self.partition, log_start)
        return segment is None or offset < segment.start_offset

    def gaps(self) -> list[LogGap]:
        """Returns the recorded gaps."""
        return self.metadata.gaps(self.partition)

    def void_copies(self, gap: LogGap) -> Iterator[RemoteLogSegmentMetadata]:
        """Yields the finished segments with offsets of `gap` that a CUT voids."""
        segments = self.metadata.stored_segments(self.partition, gap.first_offset)
        for each in takewhile(lambda one: one.start_offset < gap.next_offset, segments):
            cut_at = each.metadata.cut_at if each.is_finished else None
            if cut_at is not None and each.end_offset >= max(cut_at, gap.first_offset) and cut_at < gap.next_offset:
                yield each.metadata

    def has_gap_behind(self) -> bool:
        """Whether a recorded gap lies between the remote tier and the local log."""
        end_offset = self.end()
        return any(end_offset is None or gap.next_offset > end_offset for gap in self.gaps())

    # Leader epochs

    def epoch_at(self, offset: int) -> int:
        """Returns the leader epoch of a record. `UNKNOWN_EPOCH`: no readable segment has the record."""
        segment = self.metadata.remote_log_segment_metadata(self.partition, offset)
        return UNKNOWN_EPOCH if segment is None else leader_epoch_at(segment.segment_leader_epochs, offset)

    def epoch_below(self, offset: int) -> int:
        """Returns the leader epoch of the last readable record below `offset`, with or without a hole behind it."""
        last = self.metadata.last_below(self.partition, offset)
        return UNKNOWN_EPOCH if last is None else last.leader_epoch

    def epoch_before_gap(self, offset: int) -> int:
        """Returns the leader epoch of the last record before the recorded gap that holds the offset.

        `UNKNOWN_EPOCH`: that record is not known to be remote."""
        gap = self.metadata.gap_at(self.partition, offset)
        return UNKNOWN_EPOCH if gap is None else self.epoch_at(gap.first_offset - 1)

    def last_epoch(self) -> int | None:
        """Returns the newest leader epoch that has a remote record. None: no record is remote."""
        end_offset = self.end()
        return None if end_offset is None else self.epoch_at(end_offset)

    # What neither a segment nor a gap has

    async def explained_to(self, log_start: int, end: int | None = None) -> int | None:
        """Returns the first offset above `log_start` that neither a readable segment nor a recorded gap has.

        It looks no further than `end`, and may return any explained offset that is at least `end`. None: no readable
        segment lies at or above the recorded `log_start`. The offsets between `log_start` and the first segment count
        as explained: no record of them was copied, or `attempt_at_head` finds its attempt. If the local log does not
        have the returned offset, its records were lost, or the metadata of their copy was."""
        first = self.metadata.next_segment(self.partition, log_start)
        if first is None:
            return None
        begin = max(first.start_offset, log_start)
        position = self._covered_to(begin)
        if position is not None:
            return self.behind_gaps(position)
        for number, position in enumerate(self._explained(begin), 1):
            if end is not None and position >= end:
                break
            if number % _RUNS_BETWEEN_YIELDS == 0:
                await asyncio.sleep(0)
        return position

    def _explained(self, offset: int) -> Iterator[int]:
        """Yields ends (exclusive) of explained offsets from `offset` on, up to the first hole: that end comes last."""
        for first, following in self.metadata.answered_offsets(self.partition, offset):
            if first > offset:
                offset = self.behind_gaps(offset)
                if first > offset:
                    break
            offset = max(offset, following)
            yield offset
        yield self.behind_gaps(offset)

    def _covered_to(self, begin: int) -> int | None:
        """Returns the offset behind the remote end if readable segments have all offsets from `begin` on.

        None: they have not, or many runs lie below."""
        size, last = self.metadata.cover_size(self.partition), self.end()
        runs = takewhile(lambda run: run[0] < begin, self.metadata.answered_offsets(self.partition))
        below = list(islice(runs, _RUNS_BETWEEN_YIELDS))
        if last is None or len(below) == _RUNS_BETWEEN_YIELDS:
            return None
        covered = size.offsets - sum(min(following, begin) - start for start, following in below)
        # The look-ups are of one state only if no record has changed the sums meanwhile.
        is_whole = covered == last + 1 - begin and self.metadata.cover_size(self.partition) == size
        return last + 1 if is_whole else None

    def first_uncopied(self, local: LocalLogBounds) -> int:
        """Returns the first offset of the local log that is not remote; the high watermark if all of it is remote.

        Records below the tier's log start count as remote."""
        start = max(local.log_start_offset, self.log_start())
        return min(self.next_uncopied(start), local.high_watermark)

    def next_uncopied(self, offset: int) -> int:
        """Returns the first offset, from `offset` on, that neither a readable segment nor a recorded gap has."""
        *_, end = self._explained(offset)
        return end

    async def holes(self, log_start: int, local_log_start: int) -> list[LogGap]:
        """Returns the runs of offsets below the local log that neither a readable segment nor a gap has, ascending.

        The offsets between `log_start` and the first segment are in a run only from the first attempt there on."""
        found: list[LogGap] = []
        begun_at = self.attempt_at_head(log_start, local_log_start)
        if begun_at is not None:
            found.append(LogGap(begun_at, self.hole_end(log_start, local_log_start)))
        while (first := await self.explained_to(log_start, local_log_start)) is not None and first < local_log_start:
            log_start = self.hole_end(first, local_log_start)
            found.append(LogGap(first, log_start))
        return found

    def remote_holes(self) -> Iterator[LogGap]:
        """Yields the runs of offsets that neither a readable segment nor a gap has, from the log start to the remote
        end, without those before the first segment."""
        end, earliest = self.end(), self.metadata.earliest_offset(self.partition)
        if end is None or earliest is None:
            return
        offset = max(self.log_start(), earliest)
        while (first := self.next_uncopied(offset)) <= end:
            offset = self.hole_end(first, end + 1)
            yield LogGap(first, offset)

    async def unknown_offsets(self, log_start: int, local_log_start: int) -> list[LogGap]:
        """Returns the `holes`, with the whole head if a trim shows that its records were copied."""
        if self.lost_trim(log_start) is None:
            return await self.holes(log_start, local_log_start)
        end = self.hole_end(log_start, local_log_start)
        head = LogGap(self.next_uncopied(log_start), end)
        behind = await self.holes(end, local_log_start)
        return [head, *behind] if head.first_offset < end else behind

    def is_head_unknown(self, log_start: int, local_log_start: int) -> bool:
        """Whether records from `log_start` to the first readable segment are in an attempt, or in the local log."""
        first = self.metadata.next_segment(self.partition, log_start)
        is_local = first is not None and max(log_start, local_log_start) < first.start_offset
        return is_local or self._is_begun(log_start, self.hole_end(log_start, local_log_start))

    def gone_to(self, offset: int, local_log_start: int) -> int:
        """Returns the first offset, from `offset` on, whose record is not known to be gone.

        A record of a gap is gone, unless the local log or an attempt has it: then the gap ends later."""
        while offset < local_log_start and (gap := self.metadata.gap_at(self.partition, offset)) is not None:
            if self._is_begun(offset, gap.next_offset):
                break
            offset = min(gap.next_offset, local_log_start)
        return offset

    def _is_begun(self, offset: int, end: int) -> bool:
        """Whether an attempt has offsets from `offset` to `end` (exclusive)."""
        return offset < end and any(
            each.start_offset < end and offset <= each.valid_end_offset for each in self.attempts(offset)
        )

    def hole_end(self, offset: int, local_log_start: int) -> int:
        """Returns where the first readable segment from `offset` on, or the local log begins."""
        following = self.metadata.next_segment(self.partition, offset)
        return local_log_start if following is None else min(local_log_start, following.start_offset)

    def behind_gaps(self, offset: int) -> int:
        """Returns the first offset, from `offset` on, that no recorded gap has."""
        while (gap := self.metadata.gap_at(self.partition, offset)) is not None:
            offset = gap.next_offset
        return offset

    # Attempts

    def attempts(self, min_offset: int = 0) -> Iterator[RemoteLogSegmentMetadata]:
        """Yields the attempts that end at `min_offset` or later, by ascending start offset."""
        for segment in self.metadata.segments_apart(self.partition):
            if segment.state == RemoteLogSegmentState.COPY_SEGMENT_STARTED and segment.end_offset >= min_offset:
                yield segment.metadata

    def attempt_at_head(self, log_start: int, local_log_start: int) -> int | None:
        """Returns the first offset below both the first readable segment and the local log that an attempt holds.

        None: no attempt does, or recorded gaps have its offsets."""
        end = self.hole_end(log_start, local_log_start)
        for each in self.attempts(log_start):
            offset = max(each.start_offset, log_start)
            gap = self.metadata.gap_at(self.partition, offset)
            offset = offset if gap is None else gap.next_offset
            if offset < end and offset <= each.valid_end_offset:
                return offset
        return None

    def last_attempt(self) -> RemoteLogSegmentMetadata | None:
        """Returns the attempt with known leader epochs that ends highest above the remote end; None without one."""
        remote_end = self.end()
        next_offset = 0 if remote_end is None else remote_end + 1
        above = (each for each in self.attempts(next_offset) if is_measured(each) and not each.is_cut_off)
        last = max(above, key=lambda each: each.valid_end_offset, default=None)
        return last if last is not None and last.valid_end_offset >= next_offset else None

    def begun_end(self) -> int | None:
        """Returns the end (inclusive) of the readable segments and the attempts; None without any."""
        last = self.last_attempt()
        return self.end() if last is None else last.valid_end_offset

    def unread_from(self, attempt: RemoteLogSegmentMetadata, offset: int) -> int | None:
        """Returns the first offset of the attempt, from `offset` on, that no readable segment has; None without one."""
        offset = max(attempt.start_offset, offset)
        while offset <= attempt.end_offset:
            segment = self.metadata.remote_log_segment_metadata(self.partition, offset)
            if segment is None:
                return offset
            offset = segment.valid_end_offset + 1
        return None

    def copy_failing_since_ms(self, now_ms: int) -> int | None:
        """Returns since when (ms) copying fails, by the metadata alone, so that any process can compute it.

        It is the time of the oldest attempt at the next segment to copy, if that is a minute old or more. None: the
        last copy succeeded, or one is in progress."""
        remote_end = self.end()
        next_offset = max(0 if remote_end is None else remote_end + 1, self.log_start())
        oldest_ms = min((each.event_timestamp_ms for each in self.attempts(next_offset)), default=now_ms)
        return oldest_ms if now_ms - oldest_ms >= LEFT_AFTER_MS else None

    def agrees(self, segment: RemoteLogSegmentMetadata, end: int) -> bool:
        """Returns whether the records of a segment up to `end` (inclusive) can be of the readable segments' history.

        Leader epochs ascend in a log, and one leader epoch has one record at an offset."""
        epochs = segment.segment_leader_epochs
        if self.epoch_below(segment.start_offset) > epochs[0].epoch:
            return False
        after = self.metadata.next_segment(self.partition, end + 1)
        if after is not None:
            first = max(after.start_offset, end + 1)
            if leader_epoch_at(after.segment_leader_epochs, first) < leader_epoch_at(epochs, end):
                return False
        for other in self.metadata.answering_segments(self.partition, segment.start_offset):
            first, last = max(other.start_offset, segment.start_offset), min(other.valid_end_offset, end)
            if first > end:
                break
            known = other.metadata.segment_leader_epochs
            if any(leader_epoch_at(known, at) != leader_epoch_at(epochs, at) for at in (first, last)):
                return False
        return True


def is_measured(attempt: RemoteLogSegmentMetadata) -> bool:
    """Returns False for an attempt that only the plan of a job announces. Its leader epochs are not known yet."""
    return attempt.segment_size_bytes != NOT_MEASURED_BYTES
