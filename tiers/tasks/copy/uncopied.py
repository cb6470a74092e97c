"""The size of the records of one partition that are not remote, as far as its owner knows it."""

from __future__ import annotations

from itertools import takewhile
from typing import Final, NamedTuple

from tiers.metadata.remote_log import RemoteLog
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataReader
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LocalLogBounds
from tiers.tasks.copy.uncopied_heads import UncopiedHeads
from tiers.tasks.task_services import TaskServices

_MIN_BATCH_BYTES: Final = 61
"""The size of a batch without a record, so the least that one uncopied offset can have."""


def estimated_bytes(metadata: RemoteLogMetadataReader, partition: TopicIdPartition, offsets: int) -> int | None:
    """Returns the size of `offsets` offsets at the bytes per offset of the newest segment; None without a segment."""
    density = _bytes_per_offset(metadata, partition)
    return None if density is None else int(offsets * density)


def _bytes_per_offset(metadata: RemoteLogMetadataReader, partition: TopicIdPartition) -> float | None:
    remote_end = metadata.remote_end_offset(partition)
    newest = None if remote_end is None else metadata.remote_log_segment_metadata(partition, remote_end)
    return None if newest is None else newest.segment_size_bytes / (newest.end_offset + 1 - newest.start_offset)


class UncopiedSize(NamedTuple):
    """`is_bound` is true if the records have at most `size_bytes`. Otherwise this is an estimate."""

    size_bytes: int
    is_bound: bool


class _Estimate(NamedTuple):
    """So many bytes are not remote, from `first_offset` (inclusive) to `end_offset` (exclusive)."""

    first_offset: int
    end_offset: int
    size_bytes: float


class UncopiedBytes:
    """Estimates the size of the records that are not remote. The estimate decides when they fill a segment.

    A broker removes whole files, so its replica also has records below the log start: the size of the replica is not
    that of the uncopied records, but its growth is. An owner begins with the number of offsets, times the bytes per
    offset of the newest segment, or of the first uncopied batch if that has more. The estimate then grows with the
    replica, a copy lowers it, and a read up to the last stable offset replaces it. While the size is unknown or falls,
    the estimate grows with the offsets.

    An estimate that is too high costs a read of less than a segment, which corrects it. One that is too low delays a
    copy, until the records' age or the broker's retention (`at_most`) begins it. No deletion depends on the estimate:
    see `at_least`."""

    def __init__(self, services: TaskServices, topic_id_partition: TopicIdPartition, heads: UncopiedHeads) -> None:
        self._services = services
        self._heads = heads
        self._partition = topic_id_partition
        self._replica_bytes: int | None = None
        self._leader_epoch = -1
        self._log_start = 0
        self._estimate: _Estimate | None = None

    def survey(self, replica_bytes: int | None, bounds: LocalLogBounds) -> None:
        """Takes the leader's answers. `replica_bytes` is None if the leader does not answer the size of its replica."""
        known, before, epoch = self._estimate, self._replica_bytes, self._leader_epoch
        self._replica_bytes, self._leader_epoch = replica_bytes, bounds.leader_epoch
        self._log_start = bounds.log_start_offset
        first = RemoteLog(self._services.metadata, self._partition).first_uncopied(bounds)
        end = max(first, bounds.high_watermark)
        if known is None or epoch != bounds.leader_epoch or first < known.first_offset or end < known.end_offset:
            size_bytes = self._first_estimate(first, end)
        else:
            grown_bytes = (end - known.end_offset) * self._bytes_per_offset()
            if replica_bytes is not None and before is not None and replica_bytes >= before:
                grown_bytes = replica_bytes - before
            size_bytes = known.size_bytes + grown_bytes
            if first > known.first_offset:
                rest_bytes = size_bytes - self._copied_bytes(known.first_offset, first)
                size_bytes = max(rest_bytes, (end - first) * self._bytes_per_offset())
        self._estimate = _Estimate(first, end, size_bytes if first < end else 0)

    def read_to_end(self, offset: int, end_offset: int, read_bytes: int) -> None:
        """Takes what a read found: the log has `read_bytes` from `offset` up to the last stable offset `end_offset`.

        The records behind it, of open transactions, count with the same bytes per offset."""
        known = self._estimate
        if known is None or end_offset <= offset:
            return
        end = max(known.end_offset, end_offset)
        size_bytes = read_bytes * (end - offset) / (end_offset - offset) + self._kept_bytes(known.first_offset, offset)
        self._estimate = _Estimate(known.first_offset, end, size_bytes)

    def start_over(self) -> None:
        """Drops the estimate, after a CUT."""
        self._estimate = None

    def behind(self, offset: int, end_offset: int | None = None) -> int:
        """Returns the size of the records from `offset` up to `end_offset` (exclusive); None: to the high watermark.

        Segments in the spool that begin below `offset` do not count."""
        known = self._estimate
        if known is None or offset >= known.end_offset:
            return 0
        size_bytes = max(0.0, known.size_bytes - self._kept_bytes(known.first_offset, offset))
        end = known.end_offset if end_offset is None else max(offset, min(end_offset, known.end_offset))
        return int(size_bytes * (end - offset) / (known.end_offset - offset))

    def at_most(self, offset: int) -> UncopiedSize:
        """Returns an upper bound of the size of the records from `offset` on.

        It returns the estimate while the size of the replica is unknown.

        A segment counts as nothing if another one has some of its records, or if some lie below the log start or above
        a CUT. The records that the replica has below its log start count."""
        if self._replica_bytes is None:
            return UncopiedSize(self.behind(offset), is_bound=False)
        rest_bytes, next_offset = self._replica_bytes, self._log_start
        for segment in self._services.metadata.answering_segments(self._partition, next_offset):
            if segment.start_offset >= next_offset:
                rest_bytes -= segment.retained_bytes
            next_offset = segment.valid_end_offset + 1
        first = offset if self._estimate is None else self._estimate.first_offset
        return UncopiedSize(max(0, rest_bytes - self._kept_bytes(first, offset)), is_bound=True)

    @property
    def size_bytes(self) -> int:
        return 0 if self._estimate is None else int(self._estimate.size_bytes)

    def at_least(self) -> int:
        """Returns a lower bound of the bytes that are not remote, by which segments may expire."""
        metadata, known = self._services.metadata, self._estimate
        if known is None or known.first_offset >= known.end_offset:
            return 0
        remote_end = metadata.remote_end_offset(self._partition)
        kept_bytes = self._kept_bytes(0 if remote_end is None else remote_end + 1, known.end_offset)
        return kept_bytes or _MIN_BATCH_BYTES

    def _first_estimate(self, first: int, end: int) -> float:
        is_all = self._services.metadata.remote_end_offset(self._partition) is None
        if is_all and self._replica_bytes is not None:
            return self._replica_bytes
        return (end - first) * self._bytes_per_offset()

    def _bytes_per_offset(self) -> float:
        of_segment = _bytes_per_offset(self._services.metadata, self._partition) or 0.0
        return max(of_segment, self._heads.bytes_per_offset) or _MIN_BATCH_BYTES

    def _copied_bytes(self, first: int, end: int) -> int:
        """Returns the size of the readable segments that begin from `first` (inclusive) to `end` (exclusive)."""
        found = self._services.metadata.answering_segments(self._partition, first)
        return sum(each.segment_size_bytes for each in takewhile(lambda one: one.start_offset < end, found))

    def _kept_bytes(self, first: int, end: int) -> int:
        """Returns the size of the segments in the spool that begin from `first` (inclusive) to `end` (exclusive)."""
        kept = (each.metadata for each in self._services.spool.kept() if each.partition == self._partition)
        return sum(each.segment_size_bytes for each in kept if first <= each.start_offset < end)
