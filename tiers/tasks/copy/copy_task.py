"""`RLMCopyTask` copies one partition's log below the LSO in segments (docs/semantics.md 13).

* A copy begins when a segment is due (`copy_due`), and reads up to `segment.bytes` or the LSO in one leader epoch. If a
  read fails or the disk is full, the segment ends there.
* If the leader changes, the owner discards the file. But if the broker has removed the first of its records, the file
  may be the last copy: the owner keeps it, however short it is.
* The first read begins at the segment's first offset, so the leader reports exactly the segment's aborted transactions.
* The spool keeps a built segment until its copy counts. `CopyAttempts` goes on with a failed attempt.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from uuid import uuid4

from protocol.errors import ErrorCode
from protocol.records.record_batch import cut_at_batches
from tiers.config.topic_policy import TopicPolicy
from tiers.errors import BrokerError, OffsetGapError
from tiers.metadata.remote_log import RemoteLog
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.log_source import LocalLogBounds, LogRead
from tiers.quota import Reservation
from tiers.segment.segment_builder import SegmentBuilder, SegmentOverflowError
from tiers.tasks.copy.copy_attempts import CopyAttempts
from tiers.tasks.copy.segment_copy import SegmentContinuation, announce, append_records, continuation_at, keep
from tiers.tasks.copy.spool import KeptSegment, SpoolError
from tiers.tasks.copy.uncopied import (
    DUE_SHARE,
    Uncopied,
    UncopiedRecords,
    age_of_oldest,
    copy_due,
    has_lag,
    is_any_size,
    is_full,
    newest_segment,
)
from tiers.tasks.history.stored_facts import FactsTask
from tiers.tasks.hold import Hold
from tiers.tasks.task_services import TaskServices

logger = logging.getLogger(__name__)


class RLMCopyTask:
    def __init__(
        self, services: TaskServices, topic_id_partition: TopicIdPartition, attempts: CopyAttempts, facts: FactsTask
    ) -> None:
        self._services = services
        self._partition = topic_id_partition
        self._labels = topic_id_partition.topic, str(topic_id_partition.partition)
        self._attempts = attempts
        self._facts = facts
        self.uncopied = UncopiedRecords(services, topic_id_partition)
        self._continuation: SegmentContinuation | None = None
        """What the next segment takes over, if it begins where the last one ends."""
        self._behind_since_ms: int | None = None
        self._first = 0
        self.hold: Hold | None = None
        """Why nothing was copied, as of the last run. None: something was due."""
        self.throttled_ms = 0
        """Milliseconds for which the quota stops the copying, as of the last run; 0: it does not."""
        self.progress_at_ms = services.clock_ms()
        """The last time at which a record was read or written for the first time, or nothing was due and no attempt
        failed."""
        self._furthest = -1, 0

    async def run(
        self, policy: TopicPolicy, bounds: LocalLogBounds, start: int, *, retention_share: float = 0.0
    ) -> bool:
        """Copies the segments that are due from `start` on, at most `segments_per_run`. Returns whether more may be.

        It reads in the leader epoch of `bounds` alone, whose history was checked. `retention_share`: see `Uncopied`."""
        services, self.throttled_ms = self._services, 0
        try:
            for _ in range(services.settings.segments_per_run):
                uncopied = await self._uncopied(policy, bounds, start, retention_share)
                self.hold = copy_due(policy, uncopied, services.wall_clock_ms())
                if self.hold is not None:
                    if self._attempts.error is None:
                        self.progress_at_ms = services.clock_ms()
                    self._behind_since_ms = None
                    return False
                if services.spool.is_full and retention_share < DUE_SHARE:
                    raise SpoolError("copying waits: the spool is full of segments whose copies have not ended")
                kept = await self._make(policy, bounds, start, uncopied)
                if kept is None:
                    return False
                if retention_share >= DUE_SHARE:
                    # The broker may soon remove the next records. `CopyAttempts.run` asks the store, which may be slow.
                    await announce(services, kept.metadata)
                else:
                    await self._attempts.copy(kept, partial(self._progress, kept.metadata.end_offset + 1, count(1)))
                start = kept.metadata.end_offset + 1
                if services.state.remote_log_segment_metadata(self._partition, start) is not None:
                    break  # the copied records lay before others: the next round finds where copying continues
            return True
        finally:
            self.observe(policy, bounds)

    async def _uncopied(
        self, policy: TopicPolicy, bounds: LocalLogBounds, start: int, retention_share: float
    ) -> Uncopied:
        """Reads the first batch only if the size alone does not decide."""
        services, offsets = self._services, max(0, bounds.last_stable_offset - start)
        size_bytes = self.uncopied.between(start, bounds.last_stable_offset)
        uncopied = Uncopied(offsets, size_bytes, retention_share=retention_share)
        if offsets == 0 or (is_full(policy, uncopied) and not has_lag(policy)):
            return uncopied
        timestamp_ms, now_ms = await self.uncopied.look(start), services.wall_clock_ms()
        newest = newest_segment(services.state, self._partition)
        finished_ms = None if newest is None else newest.event_timestamp_ms
        age_ms = age_of_oldest(timestamp_ms, finished_ms, self.uncopied.known_for_ms(start), now_ms)
        return replace(uncopied, age_ms=age_ms, lag_ms=max(age_ms, self.uncopied.age_ms(start)))

    async def _make(
        self, policy: TopicPolicy, bounds: LocalLogBounds, start: int, uncopied: Uncopied
    ) -> KeptSegment | None:
        """Reads a segment and keeps it in the spool. Returns None if its records are not copied now.

        A segment that is due by its size alone, and has less than half of it, corrects the estimate."""
        services, is_urgent = self._services, uncopied.retention_share >= DUE_SHARE
        try:
            read = await self._read(start, is_begun=False, is_urgent=is_urgent)
        except OffsetGapError:
            return None  # the next round finds where copying continues
        if read is None or read.leader_epoch != bounds.leader_epoch or not read.records:
            return None  # the next round compares the tier with the new leader's log
        async with self._builder(start) as builder:
            limit_bytes = min(policy.segment_bytes, await services.spool.room_bytes())
            last = await self._fill(builder, read, limit_bytes, bounds, is_urgent=is_urgent)
            if last is None:
                return None
            is_at_end = builder.next_offset >= last.last_stable_offset
            is_small = is_at_end and builder.size_bytes < policy.segment_bytes / 2
            if is_small and not is_any_size(policy, uncopied) and builder.base_offset >= last.log_start_offset:
                self.uncopied.measured(start, builder.next_offset, builder.size_bytes)
                return None
            built = await services.spool.run(builder.finish)
            services.checkpoint("segment-built")
            segment_id = RemoteLogSegmentId(self._partition, uuid4())
            with_facts = built.with_facts(self._facts.for_copy(segment_id.id))
            kept = await keep(services, segment_id, with_facts, bounds.leader_epoch)
        self.uncopied.measured(start, built.end_offset + 1, built.size_bytes)
        if built.missing_offsets:
            logger.warning(
                "the log has no records for some offsets of a segment",
                extra={"partition": str(self._partition), "missing_offsets": built.missing_offsets},
            )
        self._continuation = SegmentContinuation.behind(built)
        return kept

    @asynccontextmanager
    async def _builder(self, start: int) -> AsyncIterator[SegmentBuilder]:
        """The file of the builder is removed at the end, unless the spool keeps the segment."""
        services, made = self._services, list[SegmentBuilder]()
        if self._continuation is None or self._continuation.next_offset != start:
            self._continuation = await continuation_at(services, self._partition, start)
        taken = self._continuation
        path = services.spool.new_path(self._partition)

        def make() -> None:
            # Listed in the thread, so that a cancelled caller can discard the builder.
            made.append(taken.builder(path, start))

        try:
            await services.spool.run(make)
            yield made[0]
        finally:
            for builder in made:
                builder.discard()

    async def _fill(
        self, builder: SegmentBuilder, read: LogRead, limit_bytes: int, bounds: LocalLogBounds, *, is_urgent: bool
    ) -> LogRead | None:
        """Reads until the segment has `limit_bytes` or the LSO is reached. Returns the last read.

        If a later read fails, the segment ends there. If the broker has removed the first record, the segment ends at
        once: it may be the last copy. None: the leader changed, and has the first records of the segment."""
        while True:
            is_last_copy = builder.base_offset < read.log_start_offset
            if read.leader_epoch != bounds.leader_epoch:
                return read if is_last_copy else None
            end = cut_at_batches(read.records, limit_bytes - builder.size_bytes, min_one=builder.size_bytes == 0)
            try:
                fits = await self._append_fitting(builder, read, end) if end else 0
            except SpoolError:
                if builder.size_bytes == 0:
                    raise
                return read  # the disk has room for no more: the records that it has are copied
            self._progress(builder.next_offset, count())
            is_full = fits < len(read.records) or builder.next_offset >= read.last_stable_offset
            if is_last_copy or is_full or not read.records:
                return read
            try:
                following = await self._read(builder.next_offset, is_begun=True, is_urgent=is_urgent)
            except (BrokerError, OffsetGapError):
                return read  # the broker may remove the records that were read, so they are copied
            assert following is not None
            read = following

    async def _read(self, offset: int, *, is_begun: bool, is_urgent: bool) -> LogRead | None:
        """Reads the next batches. If one of them is damaged, reads fewer. None: the quota is used up.

        An operator who removes the damaged batch removes all records before it as well, so they must be copied first.
        """
        services, max_bytes = self._services, self._services.settings.fetch_bytes
        portion = await self._portion(is_begun=is_begun, is_urgent=is_urgent)
        if portion is None:
            return None
        with portion:
            while True:
                try:
                    timeout_ms = services.settings.request_timeout_ms
                    read = await services.source.read(self._partition, offset, max_bytes, timeout_ms)
                except BrokerError as error:
                    if error.code != ErrorCode.CORRUPT_MESSAGE or max_bytes == 1:
                        raise
                else:
                    portion.used_bytes = len(read.records)
                    return read
                max_bytes = max(1, max_bytes // 8)

    async def _portion(self, *, is_begun: bool, is_urgent: bool) -> Reservation | None:
        """Reserves a part of the quota. A copy that has begun waits for it, and an urgent one never does.

        None: the copy does not begin."""
        services = self._services
        if is_urgent:
            return services.copy_quota.exceed(services.settings.fetch_bytes)
        while (portion := services.copy_quota.reserve(services.settings.fetch_bytes)) is None:
            self.throttled_ms = max(1, services.copy_quota.throttle_ms())
            services.metrics.copy_throttle_time.observe(self.throttled_ms / 1000)
            if not is_begun:
                return None
            await asyncio.sleep(self.throttled_ms / 1000)
        self.throttled_ms = 0
        return portion

    def _progress(self, next_offset: int, steps: Iterator[int]) -> None:
        """Notes progress. Steps that an earlier failed act reached do not count again."""
        reached = next_offset, next(steps)
        if reached > self._furthest:
            self._furthest = reached
            self.progress_at_ms = self._services.clock_ms()

    async def _append_fitting(self, builder: SegmentBuilder, read: LogRead, end: int) -> int:
        """Appends the batches of `read` up to `end` that the segment can hold. Returns where these end."""
        services, aborted = self._services, read.aborted_transactions
        timeout_ms, records = services.settings.request_timeout_ms, read.records[:end]
        try:
            await append_records(
                builder, records, aborted, services.spool, services.source, self._partition, timeout_ms
            )
        except SegmentOverflowError as overflow:
            if overflow.fits_bytes:
                return await self._append_fitting(builder, read, overflow.fits_bytes)
            if builder.size_bytes == 0:
                raise
            return 0
        return end

    def observe(self, policy: TopicPolicy, bounds: LocalLogBounds) -> None:
        """Measures the lag, whether or not anything is copied."""
        services, lso = self._services, bounds.last_stable_offset
        self._first = start = RemoteLog(services.state, self._partition).first_uncopied(bounds)
        if start >= lso:
            self._behind_since_ms = None
        elif self._behind_since_ms is None:
            self._behind_since_ms = services.clock_ms() - self.uncopied.known_for_ms(start)
        size_bytes = self.uncopied.size_bytes
        services.metrics.spool_bytes.set(services.spool.used_bytes)
        services.metrics.copy_lag_bytes.labels(*self._labels).set(size_bytes)
        services.metrics.copy_lag_segments.labels(*self._labels).set(size_bytes // policy.segment_bytes)
        self.show_age()

    def show_age(self) -> None:
        """Shows how long records have not been remote. The caller calls it also while nothing is read."""
        oldest_ms = self.uncopied.age_ms(self._first) if self.behind_ms else 0
        self._services.metrics.oldest_uncopied_seconds.labels(*self._labels).set(oldest_ms / 1000)

    @property
    def behind_ms(self) -> int:
        """How long a record below the LSO has not been remote, in milliseconds."""
        return 0 if self._behind_since_ms is None else self._services.clock_ms() - self._behind_since_ms

    def start_over(self) -> None:
        """Drops what the next segment would take over, after a CUT. No copy may be in progress."""
        self._continuation = None
        self._furthest = -1, 0
