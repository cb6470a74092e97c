"""The bounds of a log over both tiers: `earliest_readable` is its start, `next_local_offset` the end of its copy.

`explained_to` finds the first offset that the metadata does not explain, and `unexplained_runs` finds all of them.
"""

from __future__ import annotations

import asyncio
from itertools import islice, takewhile

from tiers.metadata.attempts import attempt_at_head
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataReader
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LocalLogBounds
from tiers.model.log_start import LogGap, OffsetAndEpoch

_RUNS_BETWEEN_YIELDS = 512


def recorded_log_start(
    metadata: RemoteLogMetadataReader, partition: TopicIdPartition, local_log_start: int | None = None
) -> int | None:
    """Returns the highest log start that is recorded and deletes records; None without one.

    With `local_log_start`, a higher one does not count: the broker has the records, until the owner deletes them again
    or ends that log start. A slow proxy may have recorded it for the log of another leader."""
    offsets = (start.offset for start in metadata.log_starts(partition))
    return next((offset for offset in offsets if local_log_start is None or offset <= local_log_start), None)


def earliest_readable(
    metadata: RemoteLogMetadataReader, partition: TopicIdPartition, local_log_start: int
) -> int | None:
    """Returns the log start of both tiers together: the first offset that a fetch can read. None: not tiered.

    A recorded log start counts as in `recorded_log_start`. The result lies after a gap at the head of the log, recorded
    or not."""
    if not metadata.is_known(partition):
        return None
    log_start = recorded_log_start(metadata, partition, local_log_start) or 0
    segment = metadata.next_segment(partition, log_start)
    return local_log_start if segment is None else min(max(log_start, segment.start_offset), local_log_start)


def next_local_offset(metadata: RemoteLogMetadataReader, partition: TopicIdPartition, local: LocalLogBounds) -> int:
    """NEXT_LOCAL_TIMESTAMP (docs/founding.md): returns the offset below which every record of the log is remote.

    It is the remote end + 1. The local log holds the offset, so it lies in [local log start, last stable offset]
    (docs/semantics.md 5.1)."""
    end_offset = metadata.remote_end_offset(partition)
    offset = 0 if end_offset is None else end_offset + 1
    # The local log begins behind a gap that follows the remote end. If it begins inside the gap, a new leader has
    # records of the gap, and the owner copies them. So the end of the gap does not count.
    return max(local.log_start_offset, min(offset, local.last_stable_offset))


async def explained_to(
    metadata: RemoteLogMetadataReader, partition: TopicIdPartition, log_start: int, end: int | None = None
) -> int | None:
    """Returns the first offset above `log_start` that neither a readable segment nor a recorded gap has.

    It looks no further than `end`, and may return any explained offset that is at least `end`. None: no readable
    segment lies at or above the recorded `log_start`. The offsets between `log_start` and the first
    segment count as explained: no record of them was copied, or `attempt_at_head` finds its attempt. If the local log
    does not have the returned offset, its records were lost, or the metadata of their copy was."""
    position = _covered_to(metadata, partition, log_start)
    if position is not None:
        return _behind_gaps(metadata, partition, position)
    for number, (first, following) in enumerate(metadata.answered_offsets(partition, log_start), 1):
        if position is not None and first > position:
            position = _behind_gaps(metadata, partition, position)
            if first > position:
                return position
        position = following
        if end is not None and position >= end:
            return position
        if number % _RUNS_BETWEEN_YIELDS == 0:
            await asyncio.sleep(0)
    return None if position is None else _behind_gaps(metadata, partition, position)


def _covered_to(metadata: RemoteLogMetadataReader, partition: TopicIdPartition, log_start: int) -> int | None:
    """Returns the offset behind the remote end if readable segments have all offsets from the first one on.

    The first one is at or above `log_start`. None: they have not, or many runs lie below."""
    size = metadata.cover_size(partition)
    first, last = metadata.next_segment(partition, log_start), metadata.remote_end_offset(partition)
    if first is None or last is None:
        return None
    begin = max(first.start_offset, log_start)
    runs = takewhile(lambda run: run[0] < begin, metadata.answered_offsets(partition))
    below = list(islice(runs, _RUNS_BETWEEN_YIELDS))
    if len(below) == _RUNS_BETWEEN_YIELDS:
        return None
    covered = size.offsets - sum(min(following, begin) - start for start, following in below)
    # The look-ups are of one state only if no record has changed the sums meanwhile.
    is_whole = covered == last + 1 - begin and metadata.cover_size(partition) == size
    return last + 1 if is_whole else None


def next_uncopied(metadata: RemoteLogMetadataReader, partition: TopicIdPartition, offset: int) -> int:
    """Returns the first offset, from `offset` on, that neither a readable segment nor a recorded gap has."""
    for first, following in metadata.answered_offsets(partition, offset):
        offset = _behind_gaps(metadata, partition, offset)
        if first > offset:
            return offset
        offset = max(offset, following)
    return _behind_gaps(metadata, partition, offset)


async def unexplained_runs(
    metadata: RemoteLogMetadataReader, partition: TopicIdPartition, log_start: int, end: int
) -> list[LogGap]:
    """Returns the runs of offsets below `end` that neither a readable segment nor a recorded gap has, ascending.

    `end` is the start of the local log. The offsets between `log_start` and the first segment are in a run only from
    the first attempt there on."""
    found: list[LogGap] = []
    begun_at = attempt_at_head(metadata, partition, log_start, end)
    if begun_at is not None:
        following = metadata.next_segment(partition, log_start)
        found.append(LogGap(begun_at, end if following is None else min(end, following.start_offset)))
    while (first := await explained_to(metadata, partition, log_start, end)) is not None and first < end:
        following = metadata.next_segment(partition, first)
        log_start = end if following is None else min(end, following.start_offset)
        found.append(LogGap(first, log_start))
    return found


def unexplained_trim(
    metadata: RemoteLogMetadataReader, partition: TopicIdPartition, log_start: int
) -> OffsetAndEpoch | None:
    """Returns the recorded trim if it ends above `log_start` and the recorded gaps there, and no segment from
    `log_start` on begins below its end.

    The owner never trims the newest segment, so segments existed below such a trim. The metadata has lost them if the
    leader confirms both `log_start` and the trim. If an operator accepts the loss, another trim is recorded."""
    trim = last_trim(metadata, partition)
    if trim is None or trim.offset <= _behind_gaps(metadata, partition, log_start):
        return None
    first = metadata.next_segment(partition, log_start)
    return trim if first is None or first.start_offset >= trim.offset else None


def last_trim(metadata: RemoteLogMetadataReader, partition: TopicIdPartition) -> OffsetAndEpoch | None:
    """Returns the end of the last trim, below which all records are remote; None after a deletion of these records."""
    trim = metadata.local_log_start(partition)
    if trim is None or any(start.covers(trim) for start in metadata.recorded_log_starts(partition)):
        return None
    return trim


def _behind_gaps(metadata: RemoteLogMetadataReader, partition: TopicIdPartition, offset: int) -> int:
    while (gap := metadata.gap_at(partition, offset)) is not None:
        offset = gap.next_offset
    return offset
