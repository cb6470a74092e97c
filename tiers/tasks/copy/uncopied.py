"""The records of one partition that are not remote: when they are copied, how old they are, and how large.

An owner that restarts decides the same: `copy_due` depends on its arguments alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from protocol.records.record_batch import RecordBatch, iterate_batches
from tiers.config.topic_policy import COPY_LAG_BYTES, COPY_LAG_MS, TierWork, TopicPolicy
from tiers.errors import RemoteLogError
from tiers.metadata.remote_log import RemoteLog
from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LocalLogBounds
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.tasks.hold import Hold, HoldReason
from tiers.tasks.task_services import TaskServices

MIN_BATCH_BYTES: Final = 61
"""The size of a batch without a record, so the least that any records have."""
DUE_SHARE: Final = 0.4
"""The part of the broker's retention after which records are copied. The alarm `broker-retention-50` follows at 0.5, so
it is raised only when copying fails."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Uncopied:
    """The records from where copying continues up to the LSO.

    `size_bytes` is an estimate. `age_ms` is the age of the oldest record (`age_of_oldest`), and `lag_ms` that by its
    timestamp, whatever that is: behind a lag, each record is older than the last copy. `retention_share` is the part of
    the broker's retention that records which are not copied have used, if that retention is not the total."""

    offsets: int
    size_bytes: int
    age_ms: int = 0
    retention_share: float = 0.0
    lag_ms: int = 0


def copy_hold(policy: TopicPolicy) -> Hold | None:
    """Returns why nothing of the topic is copied, whatever its records are."""
    if policy.copy_disable:
        return Hold(HoldReason.COPY_DISABLED)
    if TierWork.COPYING in policy.paused:
        return Hold(HoldReason.COPYING_PAUSED)
    return None


def copy_due(policy: TopicPolicy, uncopied: Uncopied, now_ms: int) -> Hold | None:
    """Returns why the records are not copied yet. None: they are due."""
    is_due = is_any_size(policy, uncopied) or is_full(policy, uncopied)
    if uncopied.offsets > 0 and is_due and (uncopied.retention_share >= DUE_SHARE or not _is_delayed(policy, uncopied)):
        return None
    values = {"size_bytes": uncopied.size_bytes, "segment.bytes": policy.segment_bytes}
    values |= {"age_ms": uncopied.age_ms, "segment.ms": policy.segment_ms}
    waits_ms = [policy.segment_ms - uncopied.age_ms]
    if has_lag(policy):
        values |= {COPY_LAG_MS: policy.copy_lag_ms, COPY_LAG_BYTES: policy.copy_lag_bytes}
        waits_ms.append(policy.copy_lag_ms - uncopied.lag_ms)
    is_known = uncopied.offsets > 0 and not (has_lag(policy) and policy.copy_lag_ms < 0)
    return Hold(HoldReason.NOT_DUE, now_ms + max(waits_ms) if is_known else None, values)


def is_any_size(policy: TopicPolicy, uncopied: Uncopied) -> bool:
    """Whether the records are copied even if they do not fill a segment."""
    return uncopied.age_ms >= policy.segment_ms or uncopied.retention_share >= DUE_SHARE


def has_lag(policy: TopicPolicy) -> bool:
    """Whether records stay on the broker alone for a while (KIP-1241)."""
    return policy.copy_lag_ms != 0 and policy.copy_lag_bytes != 0


def _is_delayed(policy: TopicPolicy, uncopied: Uncopied) -> bool:
    """Whether neither lag is over. Kafka compares the newest record of a segment, and this method the oldest one."""
    lag_ms, lag_bytes = policy.copy_lag_ms, policy.copy_lag_bytes
    if 0 < lag_ms <= uncopied.lag_ms:
        return False
    return has_lag(policy) and not 0 < lag_bytes <= uncopied.size_bytes - policy.segment_bytes


def is_full(policy: TopicPolicy, uncopied: Uncopied) -> bool:
    """Whether the records fill a segment."""
    return uncopied.size_bytes >= policy.segment_bytes


def age_of_oldest(timestamp_ms: int | None, finished_ms: int | None, known_for_ms: int, now_ms: int) -> int:
    """Returns the age of the oldest record that is not remote.

    `finished_ms` is the time of the last COPY_SEGMENT_FINISHED, and `known_for_ms` how long this owner has known the
    record. Clients may set any timestamp: it counts if it lies between the last copy and now. Otherwise the record is
    as old as that copy. A restart resets the age only if there is no copy."""
    if finished_ms is None:
        return known_for_ms
    if timestamp_ms is None or not finished_ms <= timestamp_ms <= now_ms:
        timestamp_ms = finished_ms
    return max(known_for_ms, now_ms - timestamp_ms)


def timestamp_of(batch: RecordBatch) -> int | None:
    timestamp_ms = batch.max_timestamp if batch.is_log_append_time else batch.base_timestamp
    return timestamp_ms if timestamp_ms >= 0 else None


def newest_segment(metadata: RemoteLogMetadataState, partition: TopicIdPartition) -> RemoteLogSegmentMetadata | None:
    remote_end = metadata.remote_end_offset(partition)
    return None if remote_end is None else metadata.remote_log_segment_metadata(partition, remote_end)


def _bytes_per_offset(metadata: RemoteLogMetadataState, partition: TopicIdPartition) -> float | None:
    newest = newest_segment(metadata, partition)
    return None if newest is None else newest.segment_size_bytes / (newest.end_offset + 1 - newest.start_offset)


def estimated_bytes(metadata: RemoteLogMetadataState, partition: TopicIdPartition, offsets: int) -> int | None:
    """Returns the size of `offsets` offsets at the bytes per offset of the newest segment; None without a segment."""
    density = _bytes_per_offset(metadata, partition)
    return None if density is None else int(offsets * density)


class _Known(NamedTuple):
    """The records from `offset` up to `end` have `size_bytes`. With them, the replica has `replica_bytes`, if known."""

    offset: int
    size_bytes: float
    end: int
    replica_bytes: float | None


class UncopiedRecords:
    """What the owner of a partition knows of the records that are not remote: the ages of the first ones, and the size.

    The size is an estimate (docs/design.md, "Log range"), which grows with the leader's replica, or with the offsets if
    that is more. Each read and each copy measures a part of it. No deletion depends on it: see `at_least`."""

    def __init__(self, services: TaskServices, topic_id_partition: TopicIdPartition) -> None:
        self._services = services
        self._partition = topic_id_partition
        self._first = self._end = 0
        """The first offset that is not remote, and the high watermark."""
        self._known = _Known(0, 0.0, 0, None)
        self._bytes_per_offset: float | None = None
        self._replica_bytes: int | None = None
        self._replica_end = 0
        """The high watermark when the leader answered `_replica_bytes`. Later answers of the leader may be the same."""
        self._replica_end_before = 0
        """The high watermark of the survey before that one: the answer, to whichever partition, came after it. At the
        first survey, it is the first offset that is not remote."""
        self._leader_epoch = -1
        self._log_start = 0
        self._since_ms: dict[int, int] = {}
        self._timestamps_ms: dict[int, int | None] = {}
        """By the offsets from which records are not remote: since when this owner knows that, and the timestamps."""

    def survey(self, replica_bytes: int | None, bounds: LocalLogBounds) -> None:
        """Takes the leader's answers. `replica_bytes` is None if the leader does not answer the size of its replica."""
        self._log_start = bounds.log_start_offset
        is_same_leader, self._leader_epoch = bounds.leader_epoch == self._leader_epoch, bounds.leader_epoch
        first = RemoteLog(self._services.state, self._partition).first_uncopied(bounds)
        end = max(first, bounds.high_watermark)
        if not is_same_leader:
            self._timestamps_ms.clear()  # other records may have the offsets
        for ages in (self._since_ms, self._timestamps_ms):
            for at in [at for at in ages if at < first]:
                del ages[at]
        known, before = self._known, self._replica_bytes
        is_continued = is_same_leader and self._first <= first and self._end <= end
        size_bytes = self._from(known.offset) + self._guess(end - self._end)
        if not is_continued or replica_bytes != before:
            self._replica_end, self._replica_end_before = end, self._end if is_continued else first
        self._first, self._end, self._replica_bytes = first, end, replica_bytes
        if not is_continued or (known.replica_bytes is None and replica_bytes is not None):
            self._begin()
        elif replica_bytes is None or replica_bytes < (before or 0):  # the broker has removed a file
            self._known = _Known(known.offset, size_bytes, end, replica_bytes)
        elif first > known.offset:  # a job has copied records: what the log grows by from now on lies behind them
            self._known = _Known(first, self._from(first), end, self._whole_replica_bytes())

    def _begin(self) -> None:
        offsets, replica_bytes = self._end - self._first, self._replica_bytes
        size_bytes = self._guess(offsets)
        if replica_bytes is not None and self._services.state.remote_end_offset(self._partition) is None:
            size_bytes = replica_bytes  # some of its records may lie above the high watermark
            self._bytes_per_offset = size_bytes / offsets if offsets else None
        self._known = _Known(self._first, size_bytes, self._end, replica_bytes)
        for each in self._kept():
            self.measured(each.start_offset, each.end_offset + 1, each.segment_size_bytes)

    def _guess(self, offsets: int) -> float:
        if self._bytes_per_offset is None:
            self._bytes_per_offset = _bytes_per_offset(self._services.state, self._partition)
        return offsets * (self._bytes_per_offset or MIN_BATCH_BYTES)

    def measured(self, first: int, end: int, size_bytes: int) -> None:
        """Takes the size of the records from `first` (inclusive) to `end` (exclusive), which were read."""
        known_end = min(end, self._end)
        rest_bytes = max(0.0, self._from(first) - size_bytes) if known_end < self._end else 0.0
        replica_bytes = self._whole_replica_bytes()
        self._bytes_per_offset = size_bytes / (end - first)
        if self._first <= first < self._end:
            self._known = _Known(known_end, rest_bytes, self._end, replica_bytes)

    def between(self, first: int, end: int | None = None) -> int:
        """Returns the size of the records from `first` to `end` (exclusive); None: to the high watermark."""
        return max(0, int(self._from(first) - self._from(self._end if end is None else end)))

    def _from(self, offset: int) -> float:
        """Returns the size of the records from `offset` to the high watermark."""
        if offset >= self._end:
            return 0.0
        known, replica_bytes = self._known, self._whole_replica_bytes()
        grown_bytes = self._guess(self._end - known.end)
        if known.replica_bytes is not None and replica_bytes is not None:
            grown_bytes = max(grown_bytes, replica_bytes - known.replica_bytes)
        size_bytes = known.size_bytes + grown_bytes
        if offset <= known.offset:
            return size_bytes + self._guess(known.offset - offset)
        return size_bytes * (self._end - offset) / (self._end - known.offset)

    def _whole_replica_bytes(self) -> float | None:
        """Returns the size of the replica with all records. The leader is asked only now and then."""
        if self._replica_bytes is None:
            return None
        return self._replica_bytes + self._guess(self._end - self._replica_end)

    def at_most(self, offset: int) -> int | None:
        """Returns an upper bound of the size of the records from `offset` on.

        None: the size of the replica is unknown, or contradicts the metadata.

        A segment counts as nothing if another one has some of its records, or if some lie below the log start or above
        a CUT. The records that the replica has below its log start count."""
        grown_bytes = int(self._guess(self._end - self._replica_end_before))
        rest_bytes, next_offset = (self._replica_bytes or -grown_bytes) + grown_bytes, self._log_start
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
        return None if rest_bytes < MIN_BATCH_BYTES else rest_bytes

    @property
    def size_bytes(self) -> int:
        """The size of all records that are not remote."""
        return self.between(self._next_uncopied)

    @property
    def _next_uncopied(self) -> int:
        """The first offset that is not remote by now: copies may have ended since the survey."""
        return RemoteLog(self._services.state, self._partition).next_uncopied(self._first)

    def at_least(self) -> int:
        """Returns a lower bound of the bytes that are not remote, by which segments may expire: those of one batch."""
        return MIN_BATCH_BYTES if self._end > self._next_uncopied else 0

    def _kept(self) -> Iterator[RemoteLogSegmentMetadata]:
        return (each.metadata for each in self._services.spool.kept_in(self._partition))

    def known_for_ms(self, offset: int) -> int:
        """Returns how long this owner has known a record at `offset`, which is not remote."""
        now_ms = self._services.clock_ms()
        return now_ms - self._since_ms.setdefault(offset, now_ms)

    def age_ms(self, offset: int) -> int:
        """Returns the age of the record at `offset`: by its timestamp once it was read, or as long as it is known."""
        timestamp_ms, known_ms = self._timestamps_ms.get(offset), self.known_for_ms(offset)
        return known_ms if timestamp_ms is None else max(known_ms, self._services.wall_clock_ms() - timestamp_ms)

    async def look(self, offset: int) -> int | None:
        """Reads the batch at `offset`, unless it was read. Returns its timestamp, None while it cannot be read."""
        services, partition = self._services, self._partition
        if offset not in self._timestamps_ms:
            try:
                read = await services.source.read(partition, offset, 1, services.settings.request_timeout_ms)
                batch = next(iterate_batches(read.records), None)
                if batch is not None:
                    self._timestamps_ms[offset] = timestamp_of(batch)
            except RemoteLogError as error:
                fields = {"partition": str(partition), "error": str(error)}
                logger.debug("the first record that is not copied cannot be read", extra=fields)
        return self._timestamps_ms.get(offset)
