"""`RLMCopyTask` cuts one partition's log below the LSO into segments, and copies them (docs/semantics.md 13).

    read batches -> segment file and indexes -> COPY_SEGMENT_STARTED -> objects -> read back -> COPY_SEGMENT_FINISHED

* A segment is rolled when the next batch does not fit, when it is old enough, when the spool is full, or when the
  broker removes its first records. Records that are not rolled yet are only local. The open segment stays open from run
  to run. It is read again after a restart, and from a new leader, which may have another history.
* The first read of a new segment starts at the segment's first offset. So the leader reports exactly the aborted
  transactions of the segment, and no state about them needs to survive a restart.
* The spool keeps a rolled segment until its copy counts. Every attempt has a new uuid. A failed one leaves
  COPY_SEGMENT_STARTED, and `CopyAttempts` goes on with it.
"""

from __future__ import annotations

import logging
from itertools import count
from uuid import uuid4

from protocol.errors import ErrorCode
from protocol.records.record_batch import cut_at_batches, iterate_batches
from tiers.config.paused_work import TierWork
from tiers.config.topic_policy import TopicPolicy
from tiers.errors import BrokerError, LogDivergedError, OffsetGapError
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.log_source import LocalLogBounds, LogRead
from tiers.model.segment_metadata import epoch_of_copy, first_void
from tiers.quota import Reservation
from tiers.segment.segment_builder import BuiltSegment, SegmentBuilder, SegmentOverflowError
from tiers.tasks.copy.append import append_records
from tiers.tasks.copy.copy_attempts import CopyAttempts
from tiers.tasks.copy.kept_segments import KeptSegment
from tiers.tasks.copy.segment_continuation import SegmentContinuation, continuation_at
from tiers.tasks.copy.segment_copy import keep
from tiers.tasks.copy.spool import SpoolError
from tiers.tasks.history.facts_task import FactsTask
from tiers.tasks.hold import Hold, HoldReason
from tiers.tasks.retention.uncopied_watch import HeadBatch, head_of
from tiers.tasks.task_services import TaskServices

logger = logging.getLogger(__name__)


def copy_hold(policy: TopicPolicy) -> Hold | None:
    """Returns why nothing of the topic is copied, whatever its records are."""
    if policy.copy_disable:
        return Hold(HoldReason.COPY_DISABLED)
    if TierWork.COPYING in policy.paused:
        return Hold(HoldReason.COPYING_PAUSED)
    return None


def open_segment_hold(policy: TopicPolicy, opened_at_ms: int, now_ms: int) -> Hold | None:
    """Returns why an open segment that is not full is not copied yet. Both times are of one clock.

    `opened_at_ms` is the time at which the owner read the first record of the segment."""
    if now_ms - opened_at_ms >= policy.segment_ms:
        return None
    values = {"open_for_ms": now_ms - opened_at_ms, "segment.ms": policy.segment_ms}
    return Hold(HoldReason.SEGMENT_OPEN, opened_at_ms + policy.segment_ms, values)


class RLMCopyTask:
    def __init__(
        self, services: TaskServices, topic_id_partition: TopicIdPartition, attempts: CopyAttempts, facts: FactsTask
    ) -> None:
        self._services = services
        self._partition = topic_id_partition
        self._attempts = attempts
        self._facts = facts
        self._builder: SegmentBuilder | None = None
        self._built: BuiltSegment | None = None
        """The finished open segment while the spool could not keep it."""
        self._continuation: SegmentContinuation | None = None
        self._leader_epoch = -1
        """The leader epoch in which the open segment was read."""
        self._copy_epoch = -1
        """The epoch that the copy of the open segment names."""
        self._opened = -1, 0
        """The first offset of the open segment, and the time (ms) at which the task first read from there."""
        self._read_bytes = 0
        self._read_offsets = 0
        self._behind_since_ms: int | None = None
        self._head: HeadBatch | None = None
        """The first batch of the open segment."""
        self.throttled_ms = 0
        """Milliseconds for which the quota stops the copying, as of the last run; 0: it did not stop that run."""
        self.progress_at_ms = services.clock_ms()
        """The last time at which a record was read or written for the first time, or there was nothing to copy."""
        self.lag_bytes = 0
        """An estimate of the bytes below the LSO that are not remote, as of the last look; 0 also if there is none."""
        self._furthest = -1, 0

    async def run(self, policy: TopicPolicy, bounds: LocalLogBounds, start: int) -> bool:
        """Copies the segments that are ready from `start` on, at most `segments_per_run`.

        Returns whether more may be ready. The caller has just checked the remote lineage at the leader of `bounds`, and
        called `follow_leader`. The method reads from no other leader."""
        services = self._services
        self.throttled_ms = 0
        for _ in range(services.settings.segments_per_run):
            if not await self._fill(policy, start, bounds):
                return False
            start = await self._roll()
            if services.metadata.remote_log_segment_metadata(self._partition, start) is not None:
                break  # the copied records lay before others: the next round finds where copying continues
        return True

    async def follow_leader(self, bounds: LocalLogBounds) -> None:
        """Ends the open segment if the broker has removed any of its records, or if another leader has its records.

        The spool keeps records that the broker has removed. Without any, the segment is read again from the leader of
        `bounds`. No copy may be in progress. Raises `SpoolError`."""
        builder = self._builder
        if builder is None or builder.size_bytes == 0:
            return
        if builder.base_offset < bounds.log_start_offset:
            await self._keep(builder)
        elif self._leader_epoch != bounds.leader_epoch:
            self.discard()

    async def _fill(self, policy: TopicPolicy, start: int, bounds: LocalLogBounds) -> bool:
        """Reads until the open segment must be rolled (True), or the LSO or the quota is reached (False)."""
        services = self._services
        if self._builder is not None and self._builder.base_offset != start:
            self.discard()
        if self._built is not None:
            return True
        while True:
            next_offset = start if self._builder is None else self._builder.next_offset
            portion = self._portion()
            if portion is None:
                self._throttle(next_offset < bounds.last_stable_offset)
                return self._is_old(policy)
            try:
                with portion:
                    read = await self._read(next_offset)
                    portion.used_bytes = len(read.records)
            except BrokerError as error:
                # An operator has to remove the damaged batch. The records before it do not wait for that.
                if error.code == ErrorCode.CORRUPT_MESSAGE and self._is_due(policy):
                    return True
                raise
            except OffsetGapError:
                # The broker removed the next records. The records that this task has read may be the last copy.
                return self._open_bytes > 0
            except LogDivergedError:
                self.discard()
                raise
            if read.leader_epoch != bounds.leader_epoch:
                return False  # the next round compares the tier with the new leader's log
            held_bytes = self._open_bytes
            if not held_bytes:
                first = next(iterate_batches(read.records), None)
                self._head = None if first is None else head_of(first)
            fits = cut_at_batches(read.records, policy.segment_bytes - held_bytes, min_one=held_bytes == 0)
            if fits:
                try:
                    self._leader_epoch = read.leader_epoch
                    fits = await self._append_fitting(await self._builder_from(start), read, fits)
                except SpoolError:
                    if self._open_bytes == 0:
                        raise
                    return True  # the disk has room for no more: the records that it has are copied
            builder = self._builder
            if builder is not None and builder.next_offset > next_offset:
                self._progress(builder.next_offset)
            elif not (read.records or self._kept_bytes) and next_offset >= read.last_stable_offset:
                self.progress_at_ms = services.clock_ms()
            self._read_bytes += fits
            self._read_offsets += 0 if builder is None else builder.next_offset - next_offset
            self._observe_lag(start, read.last_stable_offset, policy)
            if fits < len(read.records) or (fits and services.spool.is_full):
                return True
            if not read.records or (builder is not None and builder.next_offset >= read.last_stable_offset):
                return self._is_old(policy)

    async def _read(self, offset: int) -> LogRead:
        """Reads the next batches. If one of them is damaged, reads fewer.

        An operator who removes the damaged batch removes all records before it as well, so they must be copied first.
        """
        services, max_bytes = self._services, self._services.settings.fetch_bytes
        while True:
            try:
                return await services.source.read(
                    self._partition, offset, max_bytes, services.settings.request_timeout_ms
                )
            except BrokerError as error:
                if error.code != ErrorCode.CORRUPT_MESSAGE or max_bytes == 1:
                    raise
            max_bytes = max(1, max_bytes // 8)

    def _portion(self) -> Reservation | None:
        """Reserves a part of the quota before a read. Every byte that is read will be copied."""
        return self._services.copy_quota.reserve(self._services.settings.fetch_bytes)

    def _throttle(self, has_work: bool) -> None:
        if has_work:
            self.throttled_ms = max(1, self._services.copy_quota.throttle_ms())
            self._services.metrics.copy_throttle_time.observe(self.throttled_ms / 1000)

    def _progress(self, next_offset: int, stage: int = 0) -> None:
        """Notes progress. Steps that an earlier failed attempt reached do not count again."""
        if (next_offset, stage) > self._furthest:
            self._furthest = next_offset, stage
            self.progress_at_ms = self._services.clock_ms()

    async def _append_fitting(self, builder: SegmentBuilder, read: LogRead, end: int) -> int:
        """Appends the batches of `read` up to `end` that the segment can hold. Returns where these end."""
        try:
            await self._append(builder, read, end)
        except SegmentOverflowError as overflow:
            if overflow.fits_bytes:
                await self._append(builder, read, overflow.fits_bytes)
            elif builder.size_bytes == 0:
                raise
            return overflow.fits_bytes
        return end

    async def _append(self, builder: SegmentBuilder, read: LogRead, end: int) -> None:
        services, spool = self._services, self._services.spool
        before_bytes = builder.size_bytes
        records = read.records if end == len(read.records) else read.records[:end]
        timeout_ms = services.settings.request_timeout_ms
        try:
            await append_records(
                builder, records, read.aborted_transactions, spool, services.source, self._partition, timeout_ms
            )
        except LogDivergedError:  # the leader's next records begin in an earlier epoch, for example
            self.discard()
            raise
        finally:
            spool.grow(builder.size_bytes - before_bytes)
        services.metrics.spool_bytes.set(spool.used_bytes)

    def _is_due(self, policy: TopicPolicy) -> bool:
        """Whether the open segment has records, and must be rolled though it is not full."""
        return self._open_bytes > 0 and (self._services.spool.is_full or self._is_old(policy))

    def _is_old(self, policy: TopicPolicy) -> bool:
        opened_at_ms, now_ms = self.open_since_ms, self._services.clock_ms()
        return opened_at_ms is not None and open_segment_hold(policy, opened_at_ms, now_ms) is None

    async def _builder_from(self, start: int) -> SegmentBuilder:
        services = self._services
        if self._builder is not None:
            return self._builder
        if self._continuation is None or self._continuation.next_offset != start:
            self._continuation = await continuation_at(services, self._partition, start)
        continuation = self._continuation
        path = services.spool.new_path(self._partition)
        self._copy_epoch = epoch_of_copy(self._leader_epoch, services.metadata.cuts(self._partition))
        if self._opened[0] != start:
            self._opened = start, services.clock_ms()

        def make() -> SegmentBuilder:
            # Assigned in the thread, so that a cancelled caller can discard the builder.
            self._builder = SegmentBuilder(
                path,
                start,
                continuation.leader_epochs,
                continuation.open_transactions,
                continuation.producers,
            )
            return self._builder

        return await services.spool.run(make)

    async def _roll(self) -> int:
        """Finishes the open segment and copies it. Returns the offset after it.

        After a failed attempt, the spool has the segment."""
        builder, services = self._builder, self._services
        assert builder is not None
        try:
            kept = await self._keep(builder)
            next_offset, stages = kept.metadata.end_offset + 1, count(1)
            await self._attempts.copy(kept, lambda: self._progress(next_offset, next(stages)))
        except BaseException:
            services.metrics.copy_errors.labels(self._partition.topic).inc()
            raise
        return next_offset

    def _finish(self, builder: SegmentBuilder) -> None:
        """Finishes the open segment, in a thread. Afterwards the task has it, also if the caller was cancelled."""
        self._built = builder.finish()

    async def _keep(self, builder: SegmentBuilder) -> KeptSegment:
        services = self._services
        if self._built is None:
            await services.spool.run(lambda: self._finish(builder))
        built = self._built
        assert built is not None
        services.checkpoint("segment-built")
        segment_id = RemoteLogSegmentId(self._partition, uuid4())
        try:
            with_facts = built.with_facts(self._facts.for_copy(segment_id.id))
            kept = await keep(services, segment_id, with_facts, self._copy_epoch)
        finally:
            if services.spool.kept_of(segment_id.id) is not None:  # also if the caller was cancelled meanwhile
                self.discard()
        if built.missing_offsets:
            logger.warning(
                "the log has no records for some offsets of a segment",
                extra={"partition": str(self._partition), "missing_offsets": built.missing_offsets},
            )
        self._continuation = SegmentContinuation(
            built.end_offset + 1, built.leader_epochs, built.open_transactions, built.producers
        )
        return kept

    @property
    def _open_bytes(self) -> int:
        return 0 if self._builder is None else self._builder.size_bytes

    @property
    def _kept(self) -> list[KeptSegment]:
        """The segments whose copy has not ended."""
        return [each for each in self._services.spool.kept() if each.partition == self._partition]

    @property
    def _kept_bytes(self) -> int:
        return sum(each.size_bytes for each in self._kept)

    @property
    def local_only_bytes(self) -> int:
        """The bytes that were read and are not remote yet. The local tier alone has at least this many bytes.

        At the end of a copy, the open segment is remote already, and must not count twice."""
        remote_end = self._services.metadata.remote_end_offset(self._partition)
        is_remote = self._builder is not None and remote_end is not None and self._builder.base_offset <= remote_end
        return 0 if is_remote else self._open_bytes

    def observe(self, policy: TopicPolicy, bounds: LocalLogBounds) -> None:
        """Measures the lag while copying is stopped or fails, and so reads nothing."""
        remote_end = self._services.metadata.remote_end_offset(self._partition)
        start = max(bounds.log_start_offset, -1 if remote_end is None else remote_end + 1)
        self._observe_lag(start, bounds.last_stable_offset, policy)

    def _observe_lag(self, start: int, last_stable_offset: int, policy: TopicPolicy) -> None:
        builder = self._builder
        next_offset = start if builder is None else builder.next_offset
        kept = [each.metadata for each in self._kept]
        kept_offsets = sum(max(0, each.end_offset + 1 - max(each.start_offset, next_offset)) for each in kept)
        unread_offsets = max(0, last_stable_offset - next_offset - kept_offsets)
        self.lag_bytes = self._open_bytes + self._kept_bytes + int(unread_offsets * self._bytes_per_offset(start))
        now_ms = self._services.clock_ms()
        first_ms = self.open_since_ms
        if unread_offsets == 0 and not self._kept_bytes:
            self._behind_since_ms = first_ms
        elif self._behind_since_ms is None:
            self._behind_since_ms = now_ms if first_ms is None else first_ms
        labels = self._partition.topic, str(self._partition.partition)
        metrics = self._services.metrics
        metrics.copy_lag_bytes.labels(*labels).set(self.lag_bytes)
        metrics.copy_lag_segments.labels(*labels).set(self.lag_bytes // policy.segment_bytes)
        self.show_age()

    def show_age(self) -> None:
        """Shows how long records have not been remote. The caller calls it also while nothing is read."""
        labels = self._partition.topic, str(self._partition.partition)
        metrics = self._services.metrics
        metrics.copy_lag_seconds.labels(*labels).set(self.behind_ms / 1000)
        metrics.oldest_uncopied_seconds.labels(*labels).set(self._oldest_uncopied_ms / 1000)

    def _bytes_per_offset(self, start: int) -> float:
        """Estimates the bytes per offset of unread records, from the records read so far or from the newest segment."""
        if self._read_offsets:
            return self._read_bytes / self._read_offsets
        newest = self._services.metadata.remote_log_segment_metadata(self._partition, start - 1)
        return 0.0 if newest is None else newest.segment_size_bytes / (newest.end_offset - newest.start_offset + 1)

    @property
    def _oldest_uncopied_ms(self) -> int:
        """The age of the oldest record that is not remote; 0 if all are. Only the open segment's first one was read."""
        head = None if self._builder is None else self._head
        if not self.behind_ms or head is None or head.timestamp_ms is None:
            return self.behind_ms
        return max(self.behind_ms, self._services.wall_clock_ms() - head.timestamp_ms)

    @property
    def open_since_ms(self) -> int | None:
        """The time at which this task first read the first record of the open segment. None: it has none."""
        return self._opened[1] if self._open_bytes else None

    @property
    def behind_ms(self) -> int:
        """How long a record below the LSO has not been remote, in milliseconds."""
        return 0 if self._behind_since_ms is None else self._services.clock_ms() - self._behind_since_ms

    def start_over(self) -> None:
        """Discards what was taken over, and what CUTs void of the open segment.

        The rest of it does not continue the remote log. `follow_leader` keeps what the broker has removed since."""
        builder, void_from = self._builder, first_void(self._services.metadata.cuts(self._partition), self._copy_epoch)
        is_void = builder is not None and void_from is not None and void_from < builder.next_offset
        if is_void or self._open_bytes == 0:
            self.discard()
        self._continuation, self._leader_epoch = None, -1
        self._furthest = -1, 0

    def discard(self) -> None:
        """Discards the open segment and its spool file."""
        builder, self._builder, self._built = self._builder, None, None
        if builder is not None:
            self._services.spool.shrink(builder.size_bytes)
            builder.discard()
