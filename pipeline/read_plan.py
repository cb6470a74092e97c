"""Which part of a log is read where, and in which tasks: pure functions of what the metadata and the leader said.

A range is read from one segment of the remote tier (`RemoteRange`) or from a broker (`LocalRange`); together the ranges
of a partition are what was asked for, without gap or overlap, split where the remote tier ends. What neither tier has
is a `Gap`, which only `failOnDataLoss` decides about. Ranges are of offsets, so that any of them can be planned anew,
whatever segment holds it by then; large ones are cut by their share of the segment's bytes, small ones packed into one
task: a task costs Spark some 30 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar
from uuid import UUID

from tiers.metadata.quick_values import quick
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.segment_metadata import LeaderEpochEntry, RemoteLogSegmentMetadata
from tiers.model.segment_state import RemoteLogSegmentState

ASSUMED_RECORD_BYTES = 1024
"""Of a log of which no segment tells more."""


@dataclass(frozen=True, slots=True)
class RemoteRange:
    """Offsets are inclusive, here and below."""

    segment: RemoteLogSegmentMetadata
    first_offset: int
    end_offset: int

    def __reduce__(self) -> tuple[Callable[..., RemoteRange], tuple[object, ...]]:
        """Flat: a plan may have a million of these, and pickle takes ten times as long over nested dataclasses."""
        segment = self.segment
        partition = segment.topic_id_partition
        return _remote_range, (
            *(partition.topic_id.bytes, partition.partition, partition.topic, segment.segment_id.id.bytes),
            *(segment.start_offset, segment.end_offset, segment.broker_id, segment.max_timestamp_ms),
            *(segment.event_timestamp_ms, segment.segment_size_bytes, segment.state.value, segment.custom_metadata),
            *(segment.txn_index_empty, segment.clamped_to, self.first_offset, self.end_offset),
            *(number for entry in segment.segment_leader_epochs for number in (entry.epoch, entry.start_offset)),
        )

    @property
    def partition(self) -> TopicIdPartition:
        return self.segment.topic_id_partition

    @property
    def size_bytes(self) -> int:
        """About."""
        return int(self.segment.segment_size_bytes * count_of(self) / _offsets_of(self.segment))


_quick_range = quick(RemoteRange)


def _remote_range(
    topic_id: bytes,
    partition: int,
    topic: str,
    uuid: bytes,
    start_offset: int,
    end_offset: int,
    broker_id: int,
    max_timestamp_ms: int,
    event_timestamp_ms: int,
    size_bytes: int,
    state: int,
    custom_metadata: bytes | None,
    txn_index_empty: bool,
    clamped_to: int | None,
    first: int,
    end: int,
    *epochs: int,
) -> RemoteRange:
    segment_id = RemoteLogSegmentId(TopicIdPartition(UUID(bytes=topic_id), partition, topic), UUID(bytes=uuid))
    segment = RemoteLogSegmentMetadata(
        segment_id,
        start_offset,
        end_offset,
        broker_id,
        max_timestamp_ms,
        event_timestamp_ms,
        tuple(map(LeaderEpochEntry, epochs[::2], epochs[1::2])),
        size_bytes,
        RemoteLogSegmentState(state),
        custom_metadata,
        txn_index_empty,
        clamped_to,
    )
    return RemoteRange(segment, first, end)


@dataclass(frozen=True, slots=True)
class LocalRange:
    partition: TopicIdPartition
    first_offset: int
    end_offset: int
    record_bytes: float = ASSUMED_RECORD_BYTES

    @property
    def size_bytes(self) -> int:
        """About."""
        return int(self.record_bytes * count_of(self))


@dataclass(frozen=True, slots=True)
class Gap:
    """Offsets that were asked for, and that exist nowhere any more."""

    partition: TopicIdPartition
    first_offset: int
    end_offset: int


ReadRange = RemoteRange | LocalRange
R = TypeVar("R", bound=ReadRange)


@dataclass(frozen=True, slots=True)
class LogView:
    """Of one partition. `next_segment`: the readable segment that holds an offset, else the first one above it.

    `log_start` is that of both tiers together, `local_start` the broker's."""

    partition: TopicIdPartition
    log_start: int
    local_start: int
    next_segment: Callable[[int], RemoteLogSegmentMetadata | None]


def earliest_readable(
    recorded_start: int | None, local_start: int, next_segment: Callable[[int], RemoteLogSegmentMetadata | None]
) -> int:
    """The log start of both tiers together. `recorded_start` is the tier's; None: the partition is not tiered."""
    if recorded_start is None:
        return local_start
    if recorded_start >= local_start:
        return recorded_start
    segment = next_segment(recorded_start)
    return local_start if segment is None else min(max(recorded_start, segment.start_offset), local_start)


def cover(view: LogView, first_offset: int, end_offset: int) -> Iterator[ReadRange | Gap]:
    """What to read for `[first_offset, end_offset]`, in offset order: the remote tier wherever it has the offsets."""
    position = first_offset
    if position < view.log_start and position <= end_offset:
        yield Gap(view.partition, position, min(end_offset, view.log_start - 1))
        position = view.log_start
    record_bytes: float = ASSUMED_RECORD_BYTES
    while position <= end_offset:
        segment = view.next_segment(position)
        if segment is None or segment.start_offset > end_offset:
            break
        if segment.start_offset > position:
            yield from _local(view, position, segment.start_offset - 1, record_bytes)
        last = min(segment.valid_end_offset, end_offset)
        record_bytes = segment.segment_size_bytes / _offsets_of(segment)
        yield _quick_range(segment, max(position, segment.start_offset), last)
        position = last + 1
    if position <= end_offset:
        yield from _local(view, position, end_offset, record_bytes)


def _local(view: LogView, first_offset: int, end_offset: int, record_bytes: float) -> Iterator[LocalRange | Gap]:
    if first_offset < view.local_start:
        yield Gap(view.partition, first_offset, min(end_offset, view.local_start - 1))
        first_offset = view.local_start
    if first_offset <= end_offset:
        yield LocalRange(view.partition, first_offset, end_offset, record_bytes)


def split(one: R, max_bytes: int, max_records: int | None = None) -> Iterator[R]:
    """Pieces of about equal size, none above `max_records` offsets."""
    count = count_of(one)
    pieces = min(count, max(1, -(-one.size_bytes // max_bytes)))
    if max_records is not None:
        pieces = max(pieces, -(-count // max_records))
    for number in range(pieces):
        first = one.first_offset + count * number // pieces
        last = one.first_offset + count * (number + 1) // pieces - 1
        yield one if pieces == 1 else replace(one, first_offset=first, end_offset=last)


def pack(
    ranges: Iterable[ReadRange], max_bytes: int, max_records: int | None = None
) -> Iterator[tuple[ReadRange, ...]]:
    """Tasks of ranges in their order; a range that is larger than `max_bytes` is a task of its own."""
    task: list[ReadRange] = []
    size_bytes = records = 0
    for one in ranges:
        count, of_one_bytes = count_of(one), one.size_bytes
        is_full = size_bytes + of_one_bytes > max_bytes or (max_records is not None and records + count > max_records)
        if task and is_full:
            yield tuple(task)
            task, size_bytes, records = [], 0, 0
        task.append(one)
        size_bytes += of_one_bytes
        records += count
    if task:
        yield tuple(task)


def tasks_of(
    ranges: Sequence[ReadRange], split_bytes: int, min_partitions: int | None = None, max_records: int | None = None
) -> list[tuple[ReadRange, ...]]:
    """At least about `min_partitions` tasks, none with more than `max_records` offsets, of about `split_bytes`."""
    if min_partitions is not None:
        fair = max(1, sum(map(count_of, ranges)) // min_partitions)
        max_records = fair if max_records is None else min(fair, max_records)
    pieces = (piece for one in ranges for piece in split(one, split_bytes, max_records))
    return list(pack(pieces, split_bytes, max_records))


def count_of(one: ReadRange | Gap) -> int:
    return one.end_offset - one.first_offset + 1


def _offsets_of(segment: RemoteLogSegmentMetadata) -> int:
    return segment.end_offset - segment.start_offset + 1
