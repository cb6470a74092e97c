"""The size of the records of one partition that are not remote, as far as its owner knows it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Final, NamedTuple

from tiers.metadata.remote_log import RemoteLog
from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LocalLogBounds
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.tasks.task_services import TaskServices

MIN_BATCH_BYTES: Final = 61
"""The size of a batch without a record, so the least that any records have."""
_MAX_POINTS: Final = 64
"""With more points, every second one goes: the curve is a straight line between two points."""


def estimated_bytes(metadata: RemoteLogMetadataState, partition: TopicIdPartition, offsets: int) -> int | None:
    """Returns the size of `offsets` offsets at the bytes per offset of the newest segment; None without a segment."""
    density = _bytes_per_offset(metadata, partition)
    return None if density is None else int(offsets * density)


def _bytes_per_offset(metadata: RemoteLogMetadataState, partition: TopicIdPartition) -> float | None:
    remote_end = metadata.remote_end_offset(partition)
    newest = None if remote_end is None else metadata.remote_log_segment_metadata(partition, remote_end)
    return None if newest is None else newest.segment_size_bytes / (newest.end_offset + 1 - newest.start_offset)


class UncopiedSize(NamedTuple):
    """`is_bound` is true if the records have at most `size_bytes`. Otherwise this is an estimate."""

    size_bytes: int
    is_bound: bool


class _Point(NamedTuple):
    """The records before `offset` have `size_bytes`, counted from any origin."""

    offset: int
    size_bytes: float


class UncopiedBytes:
    """Estimates the size of the records that are not remote. The estimate decides when they fill a segment.

    It is a curve: the bytes that the log has before an offset. Each survey adds the point of the high watermark. A
    broker removes whole files, so its replica also has records below the log start. Its size is not that of the
    uncopied records, but its growth is. So the curve grows with the replica, or with the offsets if that is more.
    It begins with the bytes per offset of the newest segment. Each read and each copy measures a part of the curve.

    If the estimate is too high, a segment is smaller, or a read of less than half a segment corrects the estimate. One
    that is too low delays a copy, until the records' age or the broker's retention (`at_most`) begins it. No deletion
    depends on the estimate: see `at_least`."""

    def __init__(self, services: TaskServices, topic_id_partition: TopicIdPartition) -> None:
        self._services = services
        self._partition = topic_id_partition
        self._points: list[_Point] = []
        self._bytes_per_offset: float | None = None
        self._replica_bytes: int | None = None
        self._origin_bytes: float | None = None
        """The point of the curve at which the replica would have no byte; None while its size is unknown."""
        self._leader_epoch = -1
        self._log_start = 0

    def survey(self, replica_bytes: int | None, bounds: LocalLogBounds) -> None:
        """Takes the leader's answers. `replica_bytes` is None if the leader does not answer the size of its replica."""
        before, self._replica_bytes = self._replica_bytes, replica_bytes
        self._log_start = bounds.log_start_offset
        is_same_leader, self._leader_epoch = bounds.leader_epoch == self._leader_epoch, bounds.leader_epoch
        first = RemoteLog(self._services.state, self._partition).first_uncopied(bounds)
        end = max(first, bounds.high_watermark)
        points, is_size_new = self._points, self._origin_bytes is None and replica_bytes is not None
        is_continued = points and points[0].offset <= first and points[-1].offset <= end
        if is_size_new or not (is_continued and is_same_leader):
            self._begin(first, end)
            return
        last = points.pop()
        size_bytes = last.size_bytes + self._guess(end - last.offset)
        if replica_bytes is None:
            self._origin_bytes = None
        elif self._origin_bytes is None or replica_bytes < (before or 0):  # the broker has removed a file
            self._origin_bytes = size_bytes - replica_bytes
        else:
            size_bytes = max(size_bytes, self._origin_bytes + replica_bytes)
        points += [last, _Point(end, size_bytes)] if end > last.offset else [_Point(end, size_bytes)]
        self._points = [_Point(first, self._at(first)), *(each for each in points if each.offset > first)]
        if len(self._points) > _MAX_POINTS:
            del self._points[1:-1:2]

    def _begin(self, first: int, end: int) -> None:
        is_all = self._services.state.remote_end_offset(self._partition) is None
        if is_all and self._replica_bytes is not None and end > first:
            self._bytes_per_offset = self._replica_bytes / (end - first)
        size_bytes = self._guess(end - first)
        self._points = [_Point(first, 0.0)] + [_Point(end, size_bytes)] * (end > first)
        self._origin_bytes = None if self._replica_bytes is None else size_bytes - self._replica_bytes
        for each in self._kept():
            self.measured(each.start_offset, each.end_offset + 1, each.segment_size_bytes)

    def _guess(self, offsets: int) -> float:
        if self._bytes_per_offset is None:
            self._bytes_per_offset = _bytes_per_offset(self._services.state, self._partition)
        return offsets * (self._bytes_per_offset or MIN_BATCH_BYTES)

    def measured(self, first: int, end: int, size_bytes: int) -> None:
        """Takes the size of the records from `first` (inclusive) to `end` (exclusive), which were read."""
        self._bytes_per_offset = density = size_bytes / (end - first)
        if not self._points or not self._points[0].offset <= first < self._points[-1].offset:
            return
        begin = _Point(first, self._at(first))
        known_end = min(end, self._points[-1].offset)
        found = _Point(known_end, begin.size_bytes + density * (known_end - first))
        later = [_Point(at, max(size, found.size_bytes)) for at, size in self._points if at > known_end]
        end_bytes = self._points[-1].size_bytes
        self._points = [*(each for each in self._points if each.offset < first), begin, found, *later]
        if self._origin_bytes is not None:
            self._origin_bytes += self._points[-1].size_bytes - end_bytes

    def between(self, first: int, end: int | None = None) -> int:
        """Returns the size of the records from `first` to `end` (exclusive); None: to the high watermark."""
        if not self._points:
            return 0
        return max(0, int(self._at(self._points[-1].offset if end is None else end) - self._at(first)))

    def _at(self, offset: int) -> float:
        following = bisect_right(self._points, offset, key=lambda each: each.offset)
        if following in (0, len(self._points)):
            return self._points[max(0, following - 1)].size_bytes
        below, above = self._points[following - 1], self._points[following]
        share = (offset - below.offset) / (above.offset - below.offset)
        return below.size_bytes + share * (above.size_bytes - below.size_bytes)

    def at_most(self, offset: int) -> UncopiedSize:
        """Returns an upper bound of the size of the records from `offset` on.

        It returns the estimate while the size of the replica is unknown, or contradicts the metadata.

        A segment counts as nothing if another one has some of its records, or if some lie below the log start or above
        a CUT. The records that the replica has below its log start count."""
        rest_bytes, next_offset = self._replica_bytes or 0, self._log_start
        for segment in self._services.state.answering_segments(self._partition, next_offset):
            if segment.start_offset >= next_offset:
                rest_bytes -= segment.retained_bytes
            next_offset = segment.valid_end_offset + 1
        for kept in self._kept():
            known = self._services.state.remote_log_segment_metadata_by_id(kept.segment_id)
            is_cut = known is not None and known.cut_at is not None
            if next_offset <= kept.start_offset < offset and not is_cut:
                rest_bytes -= kept.segment_size_bytes
                next_offset = kept.end_offset + 1
        if rest_bytes < MIN_BATCH_BYTES:
            return UncopiedSize(self.between(offset), is_bound=False)
        return UncopiedSize(rest_bytes, is_bound=True)

    @property
    def size_bytes(self) -> int:
        """The size of all records that are not remote."""
        if not self._points:
            return 0
        return self.between(RemoteLog(self._services.state, self._partition).next_uncopied(self._points[0].offset))

    def at_least(self) -> int:
        """Returns a lower bound of the bytes that are not remote, by which segments may expire: those of one batch."""
        return MIN_BATCH_BYTES if len(self._points) > 1 else 0

    def _kept(self) -> Iterator[RemoteLogSegmentMetadata]:
        return (each.metadata for each in self._services.spool.kept_in(self._partition))
