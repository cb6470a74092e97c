"""Whether the leader's log continues what was copied, and up to where (semantics 6.1, 6.5; DESIGN, safety rule 2).

A divergence deletes nothing. Where an unclean election replaced the end of the log, the tier is clamped to what both
have in common; where the leader's log lost its beginning too, the partition stops: that broker was emptied or restored.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from tiers.errors import LogDivergedError
from tiers.log.log_source import LogSource
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataReader
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata


class CommonEnd(NamedTuple):
    """The last offset (inclusive) that the tier and the leader's log have in common, and its leader epoch."""

    offset: int
    leader_epoch: int


class _EpochRange(NamedTuple):
    """Offsets (inclusive) that the tier answers for, of one leader epoch."""

    first_offset: int
    last_offset: int
    leader_epoch: int


async def check_lineage(
    source: LogSource, partition: TopicIdPartition, leader_epoch: int, next_offset: int, timeout_ms: int
) -> None:
    """Raises `LogDivergedError` unless the leader's log holds `next_offset - 1` in `leader_epoch`.

    A leader that knows only newer epochs (our trims cut its epoch history) answers with the epoch that was asked for
    and the start of its first one (semantics 6.1): that is the same test."""
    answer = await source.end_offset_for_epoch(partition, leader_epoch, timeout_ms)
    if answer.leader_epoch == leader_epoch and answer.end_offset >= next_offset:
        return
    raise LogDivergedError(
        f"{partition}: epoch {leader_epoch} was copied up to offset {next_offset - 1}, "
        f"the leader ends epoch {answer.leader_epoch} at {answer.end_offset}"
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

    `log_start` is the one that the leader confirms. The check ignores remote records below it: they are only still to
    be deleted. The log behind a gap says nothing of the records before that gap. So the check also asks for the last
    offset before each gap that the local log has. `local_log_start` None: the caller removes nothing."""
    remote_end = metadata.remote_end_offset(partition)
    if remote_end is None or remote_end < (log_start or 0):
        return
    ends = [remote_end]
    if local_log_start is not None:
        before_gaps = [gap.first_offset - 1 for gap in metadata.gaps(partition)]
        ends += [end for end in before_gaps if max(local_log_start, log_start or 0) <= end < remote_end]
    for end in ends:
        last = metadata.remote_log_segment_metadata(partition, end)
        if last is not None:
            await check_lineage(source, partition, leader_epoch_at(last, end), end + 1, timeout_ms)


async def find_common_end(
    source: LogSource,
    metadata: RemoteLogMetadataReader,
    partition: TopicIdPartition,
    local_log_start: int | None,
    log_start: int | None,
    timeout_ms: int,
) -> CommonEnd:
    """Asks for the tier's leader epochs from the newest down until the leader's answer confirms an offset.

    `local_log_start` and `log_start` are the last ones that a leader confirmed; None: no leader did. An unclean
    election cannot lead to an offset below them, or to one that leaves no remote record: the function then raises
    `LogDivergedError`. The epoch is -1 if the offset lies before all remote records."""
    ranges = _answering_epochs(metadata, partition, log_start)
    if not ranges:
        raise LogDivergedError(f"{partition}: there is nothing remote to compare")
    lowest_end = max(1, local_log_start or 0, log_start or 0)
    offset = ranges[-1].last_offset
    while True:
        place = bisect_right(ranges, offset, key=lambda one: one.first_offset) - 1
        if place < 0 and offset + 1 >= lowest_end:
            return CommonEnd(offset, -1)
        if place < 0:
            raise LogDivergedError(f"{partition}: the leader's log has nothing in common with what was copied")
        # In a hole between segments, what lies before it decides.
        offset, epoch = min(offset, ranges[place].last_offset), ranges[place].leader_epoch
        answer = await source.end_offset_for_epoch(partition, epoch, timeout_ms)
        if not 0 <= answer.leader_epoch <= epoch or answer.end_offset < lowest_end:
            raise LogDivergedError(
                f"{partition}: asked for epoch {epoch} the leader ends epoch {answer.leader_epoch} at "
                f"{answer.end_offset}, below {lowest_end}: was the broker emptied or restored?"
            )
        if answer.leader_epoch == epoch and answer.end_offset > offset:
            return CommonEnd(offset, epoch)
        offset = min(offset, answer.end_offset - 1)
        # The leader has nothing of the epochs between its answer's and the one asked for.
        known = [one for one in ranges if one.leader_epoch <= answer.leader_epoch]
        offset = min(offset, known[-1].last_offset if known else ranges[0].first_offset - 1)


def leader_epoch_at(segment: RemoteLogSegmentMetadata, offset: int) -> int:
    """The leader epoch that wrote `offset`, which the segment holds."""
    epochs = segment.segment_leader_epochs
    return epochs[max(0, bisect_right(epochs, offset, key=lambda entry: entry.start_offset) - 1)].epoch


def _answering_epochs(
    metadata: RemoteLogMetadataReader, partition: TopicIdPartition, log_start: int | None
) -> list[_EpochRange]:
    """Of what clients may read, ascending."""
    ranges: list[_EpochRange] = []
    offset = log_start or 0
    while (segment := metadata.next_segment(partition, offset)) is not None:
        offset = max(offset, segment.start_offset)
        epochs = segment.segment_leader_epochs
        for place, entry in enumerate(epochs):
            last = segment.valid_end_offset
            if place + 1 < len(epochs):
                last = min(last, epochs[place + 1].start_offset - 1)
            first = max(offset, entry.start_offset)
            if first <= last:
                ranges.append(_EpochRange(first, last, entry.epoch))
        offset = segment.valid_end_offset + 1
    return ranges
