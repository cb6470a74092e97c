"""Checks whether the leader's log continues the copied log, and up to where.

See docs/semantics.md 6.1, 6.5; docs/design.md, safety rule 2.

A divergence deletes nothing. If an unclean election replaced the end of the log, the tier is cut to the common part
of both. If the leader's log lost its beginning too, that broker was emptied or restored, and the partition stops.

A leader whose log begins after all copied records confirms every earlier history (docs/semantics.md 6.1). So the owner
records a divergence when it sees one. From then on, only a leader that has the last remote record ends it, or an
operator does.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from tiers.errors import LogDivergedError, RemoteLogMetadataNotReadyError
from tiers.metadata.attempts import attempts, is_measured, last_attempt
from tiers.metadata.log_history import remote_epoch_before
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataReader
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import EpochEndOffset, LocalLogBounds, LogSource
from tiers.model.log_start import UNKNOWN_EPOCH
from tiers.model.segment_metadata import RemoteLogSegmentMetadata, leader_epoch_at


class CommonEnd(NamedTuple):
    """The last offset (inclusive) that the tier and the leader's log have in common, and its leader epoch."""

    offset: int
    leader_epoch: int


NOTHING_IN_COMMON = CommonEnd(-1, -1)


class _EpochRange(NamedTuple):
    """A range of offsets (inclusive) of one leader epoch that the tier answers for."""

    first_offset: int
    last_offset: int
    leader_epoch: int


async def check_lineage(
    source: LogSource, partition: TopicIdPartition, leader_epoch: int, next_offset: int, timeout_ms: int
) -> None:
    """Raises `LogDivergedError` unless the leader's log has `next_offset - 1` in `leader_epoch`.

    A leader that knows only newer epochs (trims cut its epoch history) answers with the epoch that was asked for and
    the start of its first one (docs/semantics.md 6.1). The same test covers that."""
    answer = await source.end_offset_for_epoch(partition, leader_epoch, timeout_ms)
    if answer.leader_epoch == leader_epoch and answer.end_offset >= next_offset:
        return
    raise LogDivergedError(
        f"{partition} was copied up to offset {next_offset - 1} in leader epoch {leader_epoch}, "
        f"but the leader ends epoch {answer.leader_epoch} at {answer.end_offset}"
    )


async def check_remote_lineage(
    source: LogSource,
    metadata: RemoteLogMetadataReader,
    partition: TopicIdPartition,
    local_log_start: int | None,
    log_start: int | None,
    timeout_ms: int,
) -> None:
    """Runs the check of `check_lineage` for the last remote offset. A tier without segments cannot diverge.

    `log_start` is the one that the leader confirms. The check ignores remote records below it, since they will be
    deleted. The log after a gap does not show whether the records before the gap are the same. So the check also covers
    the last offset before each gap that the local log has. `local_log_start` None: the caller removes nothing.

    A recorded divergence holds until the owner has ended it, whatever the leader answers now."""
    if metadata.is_diverged(partition):
        raise LogDivergedError(
            f"{partition}: the owner found that the leader has another history than the copied records, and no leader"
            " with the copied records has come back"
        )
    await check_leader(source, metadata, partition, local_log_start, log_start, timeout_ms)


async def check_leader(
    source: LogSource,
    metadata: RemoteLogMetadataReader,
    partition: TopicIdPartition,
    local_log_start: int | None,
    log_start: int | None,
    timeout_ms: int,
) -> None:
    """Does the work of `check_remote_lineage` by the present leader's answers alone.

    Attempts count as the segments do: the owner may find them whole."""
    remote_end, begun = metadata.remote_end_offset(partition), last_attempt(metadata, partition)
    ends: dict[int, RemoteLogSegmentMetadata | None] = {}
    if begun is not None:
        ends[begun.valid_end_offset] = begun
    if remote_end is not None:
        before_gaps = [gap.first_offset - 1 for gap in metadata.gaps(partition)] if local_log_start is not None else []
        inner = [end for end in before_gaps if (local_log_start or 0) <= end < remote_end]
        ends |= {end: metadata.remote_log_segment_metadata(partition, end) for end in (remote_end, *inner)}
    counting = {end: last for end, last in ends.items() if end >= (log_start or 0)}
    if not counting:
        return
    for end, last in counting.items():
        if last is not None:
            await check_lineage(
                source, partition, leader_epoch_at(last.segment_leader_epochs, end), end + 1, timeout_ms
            )
    contradicted_end = await _contradicted_end(source, metadata, partition, timeout_ms)
    if contradicted_end is not None:
        raise LogDivergedError(
            f"{partition}: by a recorded log start of the leader's history, offset {contradicted_end + 1} had another"
            " leader epoch than the copied record"
        )


async def _contradicted_end(
    source: LogSource, metadata: RemoteLogMetadataReader, partition: TopicIdPartition, timeout_ms: int
) -> int | None:
    """Returns the offset (inclusive) at which the tier ends at most, by the recorded log starts that it contradicts.

    None: the leader's log has the history of none of them. A leader gives the same end for all epochs that lie below
    its log start (docs/semantics.md 6.1). So the leader had the deleted record only if the end of that record's epoch
    lies above the end of the copied record's epoch."""
    ends: list[int] = []
    for start in metadata.recorded_log_starts(partition):
        if not start.deletes or start.offset == 0 or start.last_epoch == UNKNOWN_EPOCH:
            continue
        if remote_epoch_before(metadata, partition, start.offset) in (start.last_epoch, UNKNOWN_EPOCH):
            continue
        deleted = await source.end_offset_for_epoch(partition, start.last_epoch, timeout_ms)
        if deleted.leader_epoch != start.last_epoch or deleted.end_offset < start.offset:
            continue
        copied_epoch = remote_epoch_before(metadata, partition, start.offset)
        if copied_epoch in (start.last_epoch, UNKNOWN_EPOCH):
            continue  # the segment was replaced or deleted meanwhile
        copied = await source.end_offset_for_epoch(partition, copied_epoch, timeout_ms)
        if copied.leader_epoch != copied_epoch or copied.end_offset < deleted.end_offset:
            ends.append(start.offset - 2)
    return min(ends, default=None)


async def check_history(
    source: LogSource,
    metadata: RemoteLogMetadataReader,
    partition: TopicIdPartition,
    bounds: LocalLogBounds,
    log_start: int | None,
    timeout_ms: int,
) -> None:
    """Runs the check for the owner, which ends a recorded divergence when it passes. Raises `LogDivergedError`.

    `bounds` are the leader's. While a divergence is recorded, only a leader that has the last remote record passes."""
    is_diverged, remote_end = metadata.is_diverged(partition), metadata.remote_end_offset(partition)
    # A leader may confirm a log start only because its log begins after it. So it must not excuse a divergence.
    log_start = None if is_diverged else log_start
    await check_leader(source, metadata, partition, bounds.log_start_offset, log_start, timeout_ms)
    if is_diverged and remote_end is not None and remote_end < bounds.log_start_offset:
        raise LogDivergedError(
            f"{partition}: the leader had another history than the records that were copied up to {remote_end}; its log"
            f" begins at {bounds.log_start_offset} now, so it cannot confirm the copied records"
        )


async def cut_end(
    source: LogSource,
    metadata: RemoteLogMetadataReader,
    partition: TopicIdPartition,
    bounds: LocalLogBounds,
    log_start: int | None,
    timeout_ms: int,
) -> CommonEnd:
    """Returns where the owner cuts the tier, by itself, after `check_history` failed.

    Raises `LogDivergedError` unless an unclean election explains the divergence."""
    is_diverged = metadata.is_diverged(partition)
    log_start = None if is_diverged else log_start
    common = await find_common_end(source, metadata, partition, log_start, timeout_ms)
    end = await _contradicted_end(source, metadata, partition, timeout_ms)
    remote_end = metadata.remote_end_offset(partition)
    is_of_attempts = not is_diverged and remote_end is not None and common.offset >= remote_end
    if common.offset < bounds.log_start_offset and not is_of_attempts and (is_diverged or end is None):
        # The answer may be the start of the leader's log, and not the end of a common history (docs/semantics.md 6.1).
        # A recorded log start that contradicts the tier shows an end by itself, unless a divergence is recorded.
        raise LogDivergedError(
            f"{partition}: the leader has another history than the copied records, and its log begins at"
            f" {bounds.log_start_offset}, so it shows none of them: was the broker emptied or restored?"
        )
    if end is None or common.offset <= end:
        return common
    return CommonEnd(end, remote_epoch_before(metadata, partition, end + 1))


async def accepted_end(
    source: LogSource,
    metadata: RemoteLogMetadataReader,
    partition: TopicIdPartition,
    bounds: LocalLogBounds,
    log_start: int | None,
    timeout_ms: int,
) -> CommonEnd | None:
    """Returns where the owner cuts the tier if an operator accepts the leader's log; None: it needs no operator."""
    try:
        await check_history(source, metadata, partition, bounds, log_start, timeout_ms)
    except LogDivergedError:
        try:
            await cut_end(source, metadata, partition, bounds, log_start, timeout_ms)
        except LogDivergedError:
            return await surviving_end(source, metadata, partition, bounds.log_start_offset, timeout_ms)
    return None


async def check_before_deletion(
    source: LogSource,
    metadata: RemoteLogMetadataReader,
    partition: TopicIdPartition,
    local_log_start: int,
    log_start: int | None,
    timeout_ms: int,
) -> None:
    """Runs `check_remote_lineage` before a user deletes records of this leader's log.

    Raises `LogDivergedError` when the partition stops, and `RemoteLogMetadataNotReadyError` until the owner has cut
    the tier or recorded the divergence: the user can try again after that."""
    try:
        await check_remote_lineage(source, metadata, partition, local_log_start, log_start, timeout_ms)
    except LogDivergedError as error:
        if metadata.is_diverged(partition):
            raise
        await find_common_end(source, metadata, partition, log_start, timeout_ms)
        raise RemoteLogMetadataNotReadyError(f"{error}; the owner cuts the tier, or stops the partition") from error


def lowest_common_end(metadata: RemoteLogMetadataReader, partition: TopicIdPartition) -> int:
    """Returns the lowest end that an unclean election can give the log, by the trims that leaders have confirmed.

    A log start does not count. If a leader confirms one and ends an epoch below it, the records between them are of a
    newer epoch. This is no sign of an emptied broker. `cut_end` recognizes that one by the start of its log."""
    trimmed_to = metadata.local_log_start(partition)
    return max(1, 0 if trimmed_to is None else trimmed_to.offset)


def is_cut(answer: EpochEndOffset, leader_epoch: int, lowest_end: int) -> bool:
    """Returns whether an unclean election explains where the leader ends `leader_epoch`.

    Otherwise the broker was emptied or restored."""
    return 0 <= answer.leader_epoch <= leader_epoch and answer.end_offset >= lowest_end


async def find_common_end(
    source: LogSource,
    metadata: RemoteLogMetadataReader,
    partition: TopicIdPartition,
    log_start: int | None,
    timeout_ms: int,
) -> CommonEnd:
    """Asks for the tier's leader epochs from the newest down until the leader's answer confirms an offset.

    `log_start` is the recorded one that the leader confirms: the records below it do not count. An unclean election
    cannot lead to an offset below the last trim, or to one that leaves no remote record. The function then raises
    `LogDivergedError`. The epoch is -1 if the offset lies before all remote records that count."""
    ranges = _answering_epochs(metadata, partition, log_start)
    if not ranges:
        raise LogDivergedError(f"{partition}: the remote tier has no record to compare with the leader's log")
    lowest_end = lowest_common_end(metadata, partition)
    offset = ranges[-1].last_offset
    while True:
        place = bisect_right(ranges, offset, key=lambda one: one.first_offset) - 1
        if place < 0 and offset + 1 >= lowest_end:
            return CommonEnd(offset, -1)
        if place < 0:
            raise LogDivergedError(f"{partition}: the leader's log has no record in common with the copied log")
        # An offset between two segments belongs to the segment before it.
        offset, epoch = min(offset, ranges[place].last_offset), ranges[place].leader_epoch
        answer = await source.end_offset_for_epoch(partition, epoch, timeout_ms)
        if not is_cut(answer, epoch, lowest_end):
            raise LogDivergedError(
                f"{partition}: the leader ends epoch {answer.leader_epoch} (asked for {epoch}) at "
                f"{answer.end_offset}, below {lowest_end}: was the broker emptied or restored?"
            )
        if answer.leader_epoch == epoch and answer.end_offset > offset:
            return CommonEnd(offset, epoch)
        offset = min(offset, answer.end_offset - 1)
        # The leader has no record of the epochs between that of its answer and the one asked for.
        known = [one for one in ranges if one.leader_epoch <= answer.leader_epoch]
        offset = min(offset, known[-1].last_offset if known else ranges[0].first_offset - 1)


async def surviving_end(
    source: LogSource,
    metadata: RemoteLogMetadataReader,
    partition: TopicIdPartition,
    local_log_start: int,
    timeout_ms: int,
) -> CommonEnd:
    """Returns the end of the records that the leader's log surely shares with the tier, for an operator's acceptance.

    A record is surely common if it lies in the local log and both have it in one leader epoch. The records below it
    are of the same history. `NOTHING_IN_COMMON`: no record is surely common."""
    ranges = _answering_epochs(metadata, partition, None)
    while ranges:
        newest = ranges.pop()
        answer = await source.end_offset_for_epoch(partition, newest.leader_epoch, timeout_ms)
        if answer.leader_epoch == newest.leader_epoch:
            end = min(newest.last_offset, answer.end_offset - 1)
            if end >= max(newest.first_offset, local_log_start):
                return CommonEnd(end, newest.leader_epoch)
            if answer.end_offset <= local_log_start:
                break  # the log begins in a later epoch: the answers for all earlier epochs are the same
        ranges = [one for one in ranges if one.leader_epoch <= answer.leader_epoch]
    return NOTHING_IN_COMMON


def _answering_epochs(
    metadata: RemoteLogMetadataReader, partition: TopicIdPartition, log_start: int | None
) -> list[_EpochRange]:
    """Returns the ranges that clients can read, and those of the attempts above them, ascending."""
    ranges: list[_EpochRange] = []
    offset = log_start or 0
    while (segment := metadata.next_segment(partition, offset)) is not None:
        ranges += _epoch_ranges(segment, offset)
        offset = segment.valid_end_offset + 1
    for attempt in attempts(metadata, partition, offset):
        if is_measured(attempt):
            ranges += _epoch_ranges(attempt, offset)
            offset = max(offset, attempt.valid_end_offset + 1)
    return ranges


def _epoch_ranges(segment: RemoteLogSegmentMetadata, offset: int) -> Iterator[_EpochRange]:
    """Yields the ranges of a segment from `offset` on."""
    ends = [*(entry.start_offset - 1 for entry in segment.segment_leader_epochs[1:]), segment.valid_end_offset]
    for entry, end in zip(segment.segment_leader_epochs, ends, strict=True):
        first, last = max(offset, entry.start_offset), min(end, segment.valid_end_offset)
        if first <= last:
            yield _EpochRange(first, last, entry.epoch)
