"""Plans what to read from which tier and in which tasks. Pure functions of the metadata and the leader's answers.

A range is read from one segment of the remote tier (`RemoteRange`) or from a broker (`LocalRange`). The ranges of a
partition cover the requested offsets without gap or overlap, split where the remote tier ends. Offsets that neither
tier has are `MissingOffsets`, and `failOnDataLoss` decides what happens. The plan passes over the gaps that the owner
recorded, as a consumer does: their records were lost before they were copied, and an alarm has told so.

Ranges are ranges of offsets, so that any of them can be planned again, whichever segment holds it by then. Large ranges
are cut in proportion to the segment's bytes. Small ranges are packed into one task, because a task costs Spark some
30 ms.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import LogGap
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.model.stored_segment import StoredSegment, decode_answer, stored_segment

ASSUMED_RECORD_BYTES = 1024
"""Assumed when no segment of the log tells the average size."""
SMALLEST_TASK_BYTES = 4 << 20
"""A task of this size takes about as long as Spark needs to start it."""
MAX_TASKS = 100_000
"""Limit of tasks per read. Spark needs an hour for more tasks, whatever they do."""


class RemoteRange(NamedTuple):
    """Offsets of one remote segment. Offsets are inclusive, here and below. The segment is kept as the bytes of the
    metadata state, because a plan may have a million ranges."""

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
        """The approximate size in the log."""
        return int(self.record_bytes * (self.end_offset - self.first_offset + 1))


@dataclass(frozen=True, slots=True)
class LocalRange:
    partition: TopicIdPartition
    first_offset: int
    end_offset: int
    record_bytes: float = ASSUMED_RECORD_BYTES

    @property
    def size_bytes(self) -> int:
        """The approximate size in the log."""
        return int(self.record_bytes * count_of(self))


@dataclass(frozen=True, slots=True)
class MissingOffsets:
    """Requested offsets that neither tier has, and that no recorded gap explains."""

    partition: TopicIdPartition
    first_offset: int
    end_offset: int


ReadRange = RemoteRange | LocalRange


def packed_ranges(ranges: Iterable[ReadRange]) -> bytes:
    """Packs the ranges of a task into bytes. Spark's own pickling calls Python code for every value of a type that is
    not built in."""
    tuples = [
        tuple(one)
        if isinstance(one, RemoteRange)
        else (one.partition, one.first_offset, one.end_offset, one.record_bytes)
        for one in ranges
    ]
    return pickle.dumps(tuples, pickle.HIGHEST_PROTOCOL)


def unpacked_ranges(packed: bytes) -> tuple[ReadRange, ...]:
    """Unpacks the ranges. A driver of this version must have packed them."""
    tuples = pickle.loads(packed)  # trusted: the driver made it for its own executors
    return tuple(RemoteRange(*one) if isinstance(one[0], bytes) else LocalRange(*one) for one in tuples)


@dataclass(frozen=True, slots=True)
class LogView:
    """The state of one partition's log.

    `answering` yields the readable segment that holds an offset, or the first one above it, and then each segment that
    answers for the offsets after it. `log_start` is the log start of both tiers, `local_start` that of the broker.
    `gaps` has the recorded gaps in ascending order."""

    partition: TopicIdPartition
    log_start: int
    local_start: int
    answering: Callable[[int], Iterable[StoredSegment]]
    gaps: Sequence[LogGap] = ()


def cover(view: LogView, first_offset: int, end_offset: int) -> Iterator[ReadRange | MissingOffsets]:
    """Yields the ranges for `[first_offset, end_offset]` in offset order. The remote tier is preferred wherever it has
    the offsets."""
    position = first_offset
    if position < view.log_start and position <= end_offset:
        yield MissingOffsets(view.partition, position, min(end_offset, view.log_start - 1))
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


def _local(
    view: LogView, first_offset: int, end_offset: int, record_bytes: float
) -> Iterator[LocalRange | MissingOffsets]:
    if first_offset < view.local_start:
        yield from _missing(view, first_offset, min(end_offset, view.local_start - 1))
        first_offset = view.local_start
    if first_offset <= end_offset:
        yield LocalRange(view.partition, first_offset, end_offset, record_bytes)


def _missing(view: LogView, first_offset: int, end_offset: int) -> Iterator[MissingOffsets]:
    """Yields the offsets of `[first_offset, end_offset]` that lie in no recorded gap."""
    position = first_offset
    for gap in view.gaps:
        if gap.first_offset > end_offset:
            break
        if gap.first_offset > position:
            yield MissingOffsets(view.partition, position, gap.first_offset - 1)
        position = max(position, gap.next_offset)
    if position <= end_offset:
        yield MissingOffsets(view.partition, position, end_offset)


def split(one: ReadRange, max_bytes: int, max_records: int | None = None) -> Iterator[ReadRange]:
    """Splits a range into pieces of about equal size, each with at most `max_records` offsets."""
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
    parallelism: int = 1,
) -> list[tuple[ReadRange, ...]]:
    """Returns tasks of about `split_bytes`, or smaller ones, so that `parallelism` cores have work.

    There are at least about `min_partitions` tasks, and no task has more than `max_records` offsets. If there would be
    more than about `max_tasks` tasks, the tasks are larger."""
    size_bytes = sum(one.size_bytes for one in ranges)
    split_bytes = min(split_bytes, max(SMALLEST_TASK_BYTES, -(-size_bytes // parallelism)))
    if max_tasks is not None:
        split_bytes = max(split_bytes, size_bytes // max_tasks)
    if min_partitions is not None:
        fair = max(1, sum(map(count_of, ranges)) // min_partitions)
        max_records = fair if max_records is None else min(fair, max_records)
    return list(_packed(ranges, split_bytes, max_records))


def _packed(ranges: Iterable[ReadRange], max_bytes: int, max_records: int | None) -> Iterator[tuple[ReadRange, ...]]:
    """Packs ranges into tasks in their order, and cuts a range that is too large for one task."""
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


def count_of(one: ReadRange | MissingOffsets) -> int:
    return one.end_offset - one.first_offset + 1


def bytes_per_offset(segment: StoredSegment) -> float:
    return segment.segment_size_bytes / (segment.end_offset - segment.start_offset + 1)
