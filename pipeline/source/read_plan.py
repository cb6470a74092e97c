"""Which part of a log is read where, and in which tasks: pure functions of what the metadata and the leader said.

A range is read from one segment of the remote tier (`RemoteRange`) or from a broker (`LocalRange`); together the ranges
of a partition are what was asked for, without gap or overlap, split where the remote tier ends. What neither tier has
is a `Gap`, which only `failOnDataLoss` decides about. Ranges are of offsets, so that any of them can be planned anew,
whatever segment holds it by then; large ones are cut by their share of the segment's bytes, small ones packed into one
task: a task costs Spark some 30 ms.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tiers.metadata.stored_segment import StoredSegment, decode_answer, stored_segment
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata

ASSUMED_RECORD_BYTES = 1024
"""Of a log of which no segment tells more."""
MAX_TASKS = 100_000
"""Of a read. More cost Spark an hour by themselves."""


class RemoteRange(NamedTuple):
    """Offsets are inclusive, here and below. The segment is as the state has it, for a plan may have a million."""

    partition_key: bytes
    stored: bytes
    first_offset: int
    end_offset: int
    record_bytes: float

    @property
    def segment(self) -> RemoteLogSegmentMetadata:
        return decode_answer(self.partition_key, self.stored)

    @property
    def max_timestamp_ms(self) -> int:
        return stored_segment(self.partition_key, self.stored).max_timestamp_ms

    @property
    def partition(self) -> TopicIdPartition:
        return self.segment.topic_id_partition

    @property
    def size_bytes(self) -> int:
        """About."""
        return int(self.record_bytes * (self.end_offset - self.first_offset + 1))


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


def packed_ranges(ranges: Iterable[ReadRange]) -> bytes:
    """For a task: Spark's pickle asks Python code about every value that is of no built-in type."""
    tuples = [
        tuple(one)
        if isinstance(one, RemoteRange)
        else (one.partition, one.first_offset, one.end_offset, one.record_bytes)
        for one in ranges
    ]
    return pickle.dumps(tuples, pickle.HIGHEST_PROTOCOL)


def unpacked_ranges(packed: bytes) -> tuple[ReadRange, ...]:
    """Of a driver of this version."""
    tuples = pickle.loads(packed)  # what a driver has made for its own executors
    return tuple(RemoteRange(*one) if isinstance(one[0], bytes) else LocalRange(*one) for one in tuples)


@dataclass(frozen=True, slots=True)
class LogView:
    """Of one partition. `answering`: the readable segment that holds an offset, or the first one above it, and then
    each that answers for what is behind.

    `log_start` is that of both tiers together, `local_start` the broker's."""

    partition: TopicIdPartition
    log_start: int
    local_start: int
    answering: Callable[[int], Iterable[StoredSegment]]


def cover(view: LogView, first_offset: int, end_offset: int) -> Iterator[ReadRange | Gap]:
    """What to read for `[first_offset, end_offset]`, in offset order: the remote tier wherever it has the offsets."""
    position = first_offset
    if position < view.log_start and position <= end_offset:
        yield Gap(view.partition, position, min(end_offset, view.log_start - 1))
        position = view.log_start
    record_bytes: float = ASSUMED_RECORD_BYTES
    for segment in view.answering(position) if position <= end_offset else ():
        if segment.start_offset > position:
            if segment.start_offset > end_offset:
                break
            yield from _local(view, position, segment.start_offset - 1, record_bytes)
            position = segment.start_offset
        last = min(segment.kept_end_offset, segment.end_offset, end_offset)
        record_bytes = bytes_per_offset(segment)
        yield RemoteRange(segment.partition_key, segment.answer, position, last, record_bytes)
        position = last + 1
        if position > end_offset:
            break
    if position <= end_offset:
        yield from _local(view, position, end_offset, record_bytes)


def _local(view: LogView, first_offset: int, end_offset: int, record_bytes: float) -> Iterator[LocalRange | Gap]:
    if first_offset < view.local_start:
        yield Gap(view.partition, first_offset, min(end_offset, view.local_start - 1))
        first_offset = view.local_start
    if first_offset <= end_offset:
        yield LocalRange(view.partition, first_offset, end_offset, record_bytes)


def split(one: ReadRange, max_bytes: int, max_records: int | None = None) -> Iterator[ReadRange]:
    """Pieces of about equal size, none above `max_records` offsets."""
    count = count_of(one)
    pieces = min(count, max(1, -(-one.size_bytes // max_bytes)))
    if max_records is not None:
        pieces = max(pieces, -(-count // max_records))
    for number in range(pieces):
        first = one.first_offset + count * number // pieces
        last = one.first_offset + count * (number + 1) // pieces - 1
        if isinstance(one, RemoteRange):
            yield one._replace(first_offset=first, end_offset=last)
        else:
            yield replace(one, first_offset=first, end_offset=last)


def tasks_of(
    ranges: Sequence[ReadRange],
    split_bytes: int,
    min_partitions: int | None = None,
    max_records: int | None = None,
    max_tasks: int | None = None,
) -> list[tuple[ReadRange, ...]]:
    """At least about `min_partitions` tasks, none with more than `max_records` offsets, of about `split_bytes`; of more
    where these would be more than about `max_tasks`."""
    if max_tasks is not None:
        split_bytes = max(split_bytes, sum(one.size_bytes for one in ranges) // max_tasks)
    if min_partitions is not None:
        fair = max(1, sum(map(count_of, ranges)) // min_partitions)
        max_records = fair if max_records is None else min(fair, max_records)
    return list(_packed(ranges, split_bytes, max_records))


def _packed(ranges: Iterable[ReadRange], max_bytes: int, max_records: int | None) -> Iterator[tuple[ReadRange, ...]]:
    """Tasks of ranges in their order, which are cut where one is too large for a task."""
    most = sys.maxsize if max_records is None else max_records
    task: list[ReadRange] = []
    size_bytes = records = 0
    for one in ranges:
        count = one.end_offset - one.first_offset + 1
        of_one_bytes = int(one.record_bytes * count)
        is_small = of_one_bytes <= max_bytes and count <= most
        for piece in (one,) if is_small else split(one, max_bytes, max_records):
            if not is_small:
                count, of_one_bytes = count_of(piece), piece.size_bytes
            if task and (size_bytes + of_one_bytes > max_bytes or records + count > most):
                yield tuple(task)
                task, size_bytes, records = [], 0, 0
            task.append(piece)
            size_bytes += of_one_bytes
            records += count
    if task:
        yield tuple(task)


def count_of(one: ReadRange | Gap) -> int:
    return one.end_offset - one.first_offset + 1


def bytes_per_offset(segment: StoredSegment) -> float:
    return segment.segment_size_bytes / (segment.end_offset - segment.start_offset + 1)
