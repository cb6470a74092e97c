"""`CopyAttempts` makes the attempts of one partition, and finishes those that have not ended, or lets them go.

See docs/design.md, "Attempts". An attempt is COPY_SEGMENT_STARTED without COPY_SEGMENT_FINISHED: of this owner, of an
earlier one, or of a job. The owner reads both of its objects back. There are three answers:

* *whole*: the owner finishes the attempt, if it adds a record and its leader epochs agree with the other segments;
* *not known*: the owner reads it back again, and neither deletes nor replaces it, nor records a gap over it;
* *not whole*: two reads, T_vis apart, find no object, a short one or a wrong checksum. If the spool has the segment, it
  is stored again, with another uuid if its objects are damaged. Otherwise the records are read from the leader again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from uuid import UUID, uuid4

from tiers.errors import (
    CorruptSegmentError,
    CustomMetadataTooLargeError,
    EncryptionKeyError,
    InvalidTransitionError,
    LaterFormatError,
    LogDivergedError,
    RemoteResourceNotFoundError,
    RemoteStorageError,
    RetriableRemoteStorageError,
)
from tiers.metadata.log_history import kept_log_start
from tiers.metadata.remote_log import RemoteLog, is_measured
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.log_source import LocalLogBounds
from tiers.model.segment_metadata import RemoteLogSegmentMetadata, RemoteLogSegmentState
from tiers.tasks.copy.segment_copy import Progress, announce, finish, keep, no_progress, read_attempt, store
from tiers.tasks.copy.spool import KeptSegment, SpoolError
from tiers.tasks.deletion.segment_deletion import delete_segment
from tiers.tasks.history.align import check_epochs, check_lineage
from tiers.tasks.task_services import TaskServices
from tiers.verify.read_back import check_stored

KEPT_WITHOUT_RECORDS_MS = 12 * 3_600_000
"""How long an attempt that is not whole stays when no leader has its records. A member whose machine was down meanwhile
may still store it from its spool."""
_FAILURES_PER_RUN = 3
"""After this many answers that are not known, the store is in trouble, and is not asked again before the next run."""
_FIRST_PAUSE_MS, _MAX_PAUSE_MS = 60_000, 3_600_000
_UNREADABLE = EncryptionKeyError, LaterFormatError
logger = logging.getLogger(__name__)


_NotWhole = CorruptSegmentError | RemoteResourceNotFoundError
"""Why an attempt is not whole: an object is damaged, or the store does not have it."""


@dataclass(slots=True)
class _Reading:
    """The result of the last read of an attempt, by the monotonic clock."""

    due_ms: int = 0
    pause_ms: int = 0
    """How long the next answer that it is not whole counts. The first one is followed by another copy at once."""
    not_whole_since_ms: int | None = None
    is_not_whole: bool = False
    is_given_up: bool = False
    """Whether its objects are being deleted, or are about to be."""
    is_renewed: bool = False
    """Whether an attempt with another uuid has its records."""
    refused_end: int | None = None
    """The valid end of the attempt when its records were of another history than the log. A CUT may lower it."""
    is_stored: bool = False
    """Whether the store has confirmed both objects to this process."""
    error: RemoteStorageError | None = None
    """Why the last read has no answer."""
    failures: int = 0


class CopyAttempts:
    """Works on the attempts of one partition for as long as this process owns it."""

    def __init__(self, services: TaskServices, topic_id_partition: TopicIdPartition) -> None:
        self._services = services
        self._partition = topic_id_partition
        self._remote = RemoteLog(services.state, topic_id_partition)
        self._readings: defaultdict[UUID, _Reading] = defaultdict(_Reading)
        self._reading = asyncio.Lock()
        """Held while an attempt is read back and finished, or given up."""
        self.in_progress: RemoteLogSegmentId | None = None
        """The attempt whose copy is in progress."""

    async def run(self, bounds: LocalLogBounds, log_start: int) -> bool:
        """Reads the attempts that are due, the lowest offsets first, and finishes those that are whole.

        `bounds` are the leader's, and `log_start` is the recorded one. It stores one segment of the spool at most:
        later records may be read meanwhile. Errors of the store stay with the attempt (`error`). Returns whether a
        survey comes before the next copy: an attempt was finished, or has another history than the log."""
        services = self._services
        known = list(self._remote.attempts())
        for uuid in self._readings.keys() - {each.segment_id.id for each in known}:
            del self._readings[uuid]
        failures, needs_survey = 0, False
        for attempt in known:
            remote_end = services.state.remote_end_offset(self._partition)
            next_offset = 0 if remote_end is None else remote_end + 1
            if attempt.start_offset > max(bounds.log_start_offset, log_start, next_offset):
                break  # the records before it come first
            reading = self._readings[attempt.segment_id.id]
            if reading.refused_end not in (None, attempt.valid_end_offset):
                reading.refused_end, reading.due_ms = None, 0  # it was cut since
            if reading.due_ms > services.clock_ms() or self._adds_nothing(attempt, log_start):
                continue
            refused_end, was_stored = reading.refused_end, reading.is_stored
            needs_survey |= await self._read(attempt, reading, bounds) or reading.refused_end != refused_end
            if reading.is_stored and not was_stored:
                break
            # An error of this process says nothing about the store.
            failures += isinstance(reading.error, RemoteStorageError) and not isinstance(reading.error, _UNREADABLE)
            if failures == _FAILURES_PER_RUN:
                break
        await self._end_filled_gaps()
        return needs_survey

    async def read_again(self, bounds: LocalLogBounds, first_offset: int, next_offset: int) -> None:
        """Reads the attempts with records of `[first_offset, next_offset)` before the owner records a gap there."""
        for attempt in self._remote.attempts(first_offset):
            reading = self._readings[attempt.segment_id.id]
            if reading.is_not_whole and attempt.start_offset < next_offset:
                await self._read(attempt, reading, bounds)

    async def copy(self, kept: KeptSegment, progress: Progress) -> None:
        """Makes one attempt. Raises the errors of each step, and leaves the attempt to `run`.
        It ends before the metadata drops a deletion of its segment."""
        metrics, topic = self._services.metrics, self._partition.topic
        limit_ms = self._services.settings.remote_log.deleted_segment_retention_ms // 2
        metrics.copy_requests.labels(topic).inc()
        self.in_progress = kept.metadata.segment_id
        try:
            with metrics.copy_errors.labels(topic).count_exceptions(BaseException):
                async with asyncio.timeout(limit_ms / 1000):
                    await announce(self._services, kept.metadata)
                    reading = self._readings[self.in_progress.id]
                    segment = await store(self._services, kept, progress)
                    reading.is_stored = True
                    found = await self._read_back(segment, progress)
                    await self._check_history(found)
                    await finish(self._services, found, progress)
        except TimeoutError as error:
            raise RetriableRemoteStorageError(f"the copy did not end within {limit_ms} ms") from error
        except CustomMetadataTooLargeError:
            # The spool still has the segment. One attempt is enough (KIP-917): the DELETE record stays.
            with suppress(RemoteStorageError):
                await delete_segment(self._services, kept.metadata, segment.custom_metadata)
            raise
        finally:
            self.in_progress = None

    async def _check_history(self, segment: RemoteLogSegmentMetadata) -> None:
        """Raises `LogDivergedError` if the leader, which may be another one by now, lacks the last record."""
        epoch, timeout_ms = segment.segment_leader_epochs[-1].epoch, self._services.settings.request_timeout_ms
        await check_lineage(self._services.source, self._partition, epoch, segment.end_offset + 1, timeout_ms)

    def blocking(self, first_offset: int, next_offset: int) -> RemoteLogSegmentMetadata | None:
        """Returns an attempt with a record of `[first_offset, next_offset)` that may be whole."""
        return next((each for each in self._undecided(first_offset) if each.start_offset < next_offset), None)

    def may_return(self, first_offset: int, next_offset: int) -> bool:
        """Whether a member may have a record of `[first_offset, next_offset)` in its spool: the only copy of it."""
        return any(each.start_offset < next_offset for each in self._unfinished(first_offset))

    def _undecided(self, offset: int) -> Iterator[RemoteLogSegmentMetadata]:
        """Yields the attempts that may be whole and have the only copy of a record from `offset` on, in order."""
        return (each for each in self._unfinished(offset) if not self._readings[each.segment_id.id].is_not_whole)

    def _unfinished(self, offset: int) -> Iterator[RemoteLogSegmentMetadata]:
        """Yields the attempts of the log's history with a record from `offset` on that no segment has, in order."""
        known = {each.segment_id: each for each in self._remote.attempts(offset)}
        for kept in self._services.spool.kept_in(self._partition):
            known.setdefault(kept.metadata.segment_id, kept.metadata)  # the owner is about to announce it
        for attempt in sorted(known.values(), key=lambda each: each.start_offset):
            end, reading = attempt.valid_end_offset, self._readings[attempt.segment_id.id]
            is_there = max(attempt.start_offset, offset) <= end and reading.refused_end != end
            if is_there and self._remote.unread_from(attempt, offset) is not None:
                yield attempt

    def start_behind(self, start: int, *, is_urgent: bool) -> int:
        """Returns where copying continues: at `start`, or behind the attempts from there on that may be whole.

        Copying goes on behind an attempt only if the spool has its segment, which the next one continues. If the
        store does not have it, or the spool is full, copying goes on only if `is_urgent`. Raises
        `RetriableRemoteStorageError` while copying has to wait."""
        for attempt in self._undecided(start):
            if attempt.start_offset > start:
                break
            if attempt.valid_end_offset < start:
                continue
            reading = self._readings[attempt.segment_id.id]
            is_kept = self._services.spool.kept_of(attempt.segment_id) is not None
            has_room = reading.is_stored and not self._services.spool.is_full
            if not (is_kept and (is_urgent or has_room)):
                reason = reading.error or "it is read again soon"
                raise RetriableRemoteStorageError(
                    f"copying waits: it is not known whether the store has segment {attempt.segment_id.id}"
                    f" ({attempt.start_offset} to {attempt.end_offset}): {reason}"
                ) from reading.error
            start = self._remote.next_uncopied(attempt.valid_end_offset + 1)
        return start

    @property
    def error(self) -> RemoteStorageError | None:
        """Why an attempt could not be read back; None: each one was."""
        return next((each.error for each in self._readings.values() if each.error is not None), None)

    @property
    def due_ms(self) -> int | None:
        """The next time, by the monotonic clock, at which an attempt is read again; None: there is none."""
        now_ms = self._services.clock_ms()
        return min((each.due_ms for each in self._readings.values() if each.due_ms > now_ms), default=None)

    async def give_up(self, bounds: LocalLogBounds, log_start: int) -> list[RemoteLogSegmentMetadata]:
        """Returns the attempts whose objects are not needed any more. They are not finished from then on."""
        given_up: list[RemoteLogSegmentMetadata] = []
        for attempt in self._remote.attempts():
            reading = self._readings[attempt.segment_id.id]
            reading.is_given_up = False
            if attempt.segment_id == self.in_progress or not self._is_needless(attempt, bounds, log_start):
                continue
            if self._remote.unread_from(attempt, log_start) is not None:
                await self._read(attempt, reading, bounds)  # a member may have stored it from its spool
            elif not await self._is_stored_elsewhere(attempt, log_start):
                continue
            async with self._reading:
                reading.is_given_up = self._is_needless(attempt, bounds, log_start)
            given_up += [attempt] * reading.is_given_up
        return given_up

    def _is_needless(self, attempt: RemoteLogSegmentMetadata, bounds: LocalLogBounds, log_start: int) -> bool:
        known = self._services.state.remote_log_segment_metadata_by_id(attempt.segment_id)
        if known is None or known.state is not RemoteLogSegmentState.COPY_SEGMENT_STARTED:
            return False
        if self._adds_nothing(attempt, log_start):
            return True
        missing = self._remote.unread_from(attempt, log_start)
        reading = self._readings[attempt.segment_id.id]
        if not reading.is_not_whole:
            return False
        age_ms = self._services.wall_clock_ms() - attempt.event_timestamp_ms
        if reading.is_renewed or missing is None:
            return True
        return age_ms >= KEPT_WITHOUT_RECORDS_MS and missing < bounds.log_start_offset

    def _adds_nothing(self, attempt: RemoteLogSegmentMetadata, log_start: int) -> bool:
        """Whether readable segments have all of its records. No other segment has the records that a CUT voids."""
        return attempt.cut_at is None and self._remote.unread_from(attempt, log_start) is None

    async def _is_stored_elsewhere(self, attempt: RemoteLogSegmentMetadata, log_start: int) -> bool:
        """Whether the store has the readable segments that have the records of an attempt.

        The metadata may have lost the deletions of these segments."""
        services, offset = self._services, max(attempt.start_offset, log_start)
        try:
            while offset <= attempt.end_offset:
                segment = services.state.remote_log_segment_metadata(self._partition, offset)
                if segment is None:
                    return False
                await check_stored(services.storage, segment, services.key_ring)
                offset = segment.valid_end_offset + 1
        except RemoteStorageError:
            return False
        return True

    async def announce_kept(self, log_start: int) -> bool:
        """Announces the segments in the spool that the metadata does not know, and removes those that add nothing.

        A process may have died, or lost the ownership, before it could write COPY_SEGMENT_STARTED. Returns whether it
        announced one. Nothing is copied behind it before a survey has compared it with the leader's log."""
        services, has_announced = self._services, False
        for kept in services.spool.kept_in(self._partition):
            segment_id = kept.metadata.segment_id
            known = services.state.remote_log_segment_metadata_by_id(segment_id)
            if await removed_if_needless(services, kept, log_start) or (known and known.state == kept.metadata.state):
                continue
            deleted = services.state.deleted_segments(self._partition)
            is_used_up = known is not None or any(each.segment_id == segment_id for each in deleted)
            announced = await self._renewed(kept) if is_used_up else kept
            if announced is not None:
                services.require_ownership(self._partition)
                await announce(services, announced.metadata)
                has_announced = True
        return has_announced

    async def _read(self, attempt: RemoteLogSegmentMetadata, reading: _Reading, bounds: LocalLogBounds) -> bool:
        """Reads an attempt back. Returns whether it is whole and finished now."""
        async with self._reading:
            self._services.require_ownership(self._partition)
            known = self._services.state.remote_log_segment_metadata_by_id(attempt.segment_id)
            if reading.is_given_up or known is None or known.state is not RemoteLogSegmentState.COPY_SEGMENT_STARTED:
                return False
            return await self._judge(known, reading, bounds)

    async def _judge(self, attempt: RemoteLogSegmentMetadata, reading: _Reading, bounds: LocalLogBounds) -> bool:
        services = self._services
        now_ms, visible_after_ms = services.clock_ms(), services.settings.remote_log.visible_after_ms
        try:
            found = await self._found(attempt, reading)
        except (RemoteStorageError, SpoolError) as error:
            reading.error = error if isinstance(error, RemoteStorageError) else RetriableRemoteStorageError(str(error))
            reading.failures, reading.is_not_whole = reading.failures + 1, False
            reading.due_ms = services.retry_at_ms(reading.failures)
            return False
        reading.error, reading.failures = None, 0
        if not isinstance(found, _NotWhole):
            reading.is_not_whole = False
            return await self._adopt(attempt, found, reading, bounds)
        if reading.not_whole_since_ms is None:
            reading.not_whole_since_ms = now_ms
        if now_ms - reading.not_whole_since_ms < visible_after_ms:
            reading.due_ms = reading.not_whole_since_ms + visible_after_ms
            return False
        reading.is_not_whole = True
        reading.due_ms = now_ms + reading.pause_ms
        reading.pause_ms = min(max(_FIRST_PAUSE_MS, 2 * reading.pause_ms), _MAX_PAUSE_MS)
        kept = services.spool.kept_of(attempt.segment_id)
        if kept is not None and isinstance(found, CorruptSegmentError):
            renewed = await self._renewed(kept)
            if renewed is None:
                return False
            reading.is_renewed = True
            self._readings[renewed.metadata.segment_id.id] = _Reading(reading.due_ms, reading.pause_ms)
            services.require_ownership(self._partition)
            await announce(services, renewed.metadata)
        return False

    async def _found(
        self, attempt: RemoteLogSegmentMetadata, reading: _Reading
    ) -> RemoteLogSegmentMetadata | _NotWhole:
        """Reads an attempt back, and stores it first if the spool has it and the store does not.

        Raises `RemoteStorageError` when it is not known whether the attempt is whole."""
        services = self._services
        try:
            found = await self._read_back(attempt)
            await services.place.require(services, [found])  # another place may have them too
            return found
        except RemoteResourceNotFoundError as error:
            missing = error
        except _UNREADABLE:
            raise
        except CorruptSegmentError as damaged:
            return damaged
        kept = services.spool.kept_of(attempt.segment_id)
        if kept is None or await self._is_damaged(kept):
            return missing
        if reading.is_stored or await self._has_other_log(kept):
            # Another place confirmed them, which must not have the objects that count.
            return CorruptSegmentError("another place has the objects")
        stored = await store(services, kept)
        reading.is_stored = True
        try:
            return await self._read_back(stored)
        except RemoteResourceNotFoundError as error:
            return error

    async def _read_back(
        self, attempt: RemoteLogSegmentMetadata, progress: Progress = no_progress
    ) -> RemoteLogSegmentMetadata:
        # In this order, since the file system may be mounted again meanwhile: the right place must have the objects.
        await self._services.place.require(self._services, [attempt])
        return await read_attempt(self._services, attempt, progress)

    async def _is_damaged(self, kept: KeptSegment) -> bool:
        if await self._services.spool.run(lambda: kept.is_intact(self._services.key_ring)):
            return False
        logger.error(
            "the spool has damaged a segment whose copy has not ended",
            extra={"partition": str(self._partition), "first_offset": kept.metadata.start_offset},
        )
        await self._services.spool.remove(kept)
        return True

    async def _has_other_log(self, kept: KeptSegment) -> bool:
        """Whether the store has a `.log` object of another size. Stores refuse to replace it."""
        try:
            end = await self._services.storage.fetch_log_segment(kept.metadata, kept.size_bytes - 1, kept.size_bytes)
        except RemoteResourceNotFoundError:
            return False
        return len(end) != 1

    async def _renewed(self, kept: KeptSegment) -> KeptSegment | None:
        """Keeps a segment for an attempt with another uuid, in the place of `kept`. Returns None if that fails.

        No uuid is used again after a deletion or a damage: a request to delete its objects may be late."""
        services = self._services
        path = services.spool.new_path(self._partition)
        try:
            if await self._is_damaged(kept):
                return None
            built = await services.spool.run(lambda: kept.opened(services.key_ring, path))
            segment_id = RemoteLogSegmentId(self._partition, uuid4())
            renewed = await keep(services, segment_id, built, kept.metadata.copy_epoch)
        except (RemoteStorageError, SpoolError) as error:
            fields = {"partition": str(self._partition), "error": str(error)}
            logger.warning("a segment in the spool could not be copied again", extra=fields)
            return None
        finally:
            path.unlink(missing_ok=True)
        await services.spool.remove(kept)
        return renewed

    async def _adopt(
        self,
        attempt: RemoteLogSegmentMetadata,
        found: RemoteLogSegmentMetadata,
        reading: _Reading,
        bounds: LocalLogBounds,
    ) -> bool:
        """Finishes a whole attempt, unless it has another history than the log. Returns whether it did."""
        services, partition, end = self._services, self._partition, attempt.valid_end_offset
        services.require_ownership(partition)
        try:
            if not is_measured(attempt) and attempt.cut_at is None:
                # With its leader epochs, the next survey compares it with the log, and may cut it.
                await services.metadata.add_remote_log_segment_metadata(found)
            is_in_log = self._remote.agrees(found, end) and await self._has_history(attempt, found, bounds)
            if not (is_in_log or attempt.is_cut_off):
                reading.refused_end = end
                reading.due_ms = services.clock_ms() + _FIRST_PAUSE_MS
                return False
            services.require_ownership(partition)
            await finish(services, found)
        except InvalidTransitionError:
            return False  # its deletion has begun meanwhile
        logger.info(
            "a copy that had not ended is whole, and is finished",
            extra={
                "partition": str(partition),
                "segment": str(attempt.segment_id.id),
                "first_offset": attempt.start_offset,
                "last_offset": attempt.end_offset,
            },
        )
        return True

    async def _has_history(
        self, attempt: RemoteLogSegmentMetadata, found: RemoteLogSegmentMetadata, bounds: LocalLogBounds
    ) -> bool:
        """Whether the leader confirms the leader epochs of the records that it still has."""
        if not is_measured(attempt) and attempt.cut_at is not None:
            return False
        services, timeout_ms = self._services, self._services.settings.request_timeout_ms
        first, last = bounds.log_start_offset, attempt.valid_end_offset
        try:
            await check_epochs(services.source, found, first, last, timeout_ms)
        except LogDivergedError:
            return False  # the next survey compares the attempt with the leader's log, and may cut the tier
        return True

    async def _end_filled_gaps(self) -> None:
        metadata = self._services.metadata
        for gap in metadata.state.gaps(self._partition):
            offset, state = gap.first_offset, metadata.state
            found = state.remote_log_segment_metadata(self._partition, offset)
            while found is not None and offset < gap.next_offset:
                offset = found.valid_end_offset + 1
                found = state.remote_log_segment_metadata(self._partition, offset)
            if offset >= gap.next_offset:
                self._services.require_ownership(self._partition)
                await metadata.end_log_gap(self._partition, gap)


async def store_for_its_owner(services: TaskServices, kept: KeptSegment) -> None:
    """Stores a kept segment of a partition that another member owns, if the store does not have it by now.

    That owner reads it back and finishes it."""
    metadata, partition, settings = services.metadata, kept.partition, services.settings
    await metadata.log.ensure_fresh(partition, settings.remote_log.fresh_within_ms, settings.request_timeout_ms)
    if metadata.state.remote_partition_delete_state(partition) is not None:
        await services.spool.remove(kept)
        return
    known = metadata.state.remote_log_segment_metadata_by_id(kept.metadata.segment_id)
    is_attempt = known is not None and known.state == kept.metadata.state
    log_start = 0
    if not is_attempt and metadata.state.log_starts(partition):
        # The owner may have to end a log start yet. The question about it names the topic, and this one the topic's id.
        await services.source.bounds(partition, settings.request_timeout_ms)
        log_start = await kept_log_start(services.source, metadata.state, partition, settings.request_timeout_ms)
    # Only an owner announces a segment. So another one stays until this process owns the partition again.
    if await removed_if_needless(services, kept, log_start) or not is_attempt:
        return
    try:
        await check_stored(services.storage, kept.metadata, services.key_ring)
    except RemoteResourceNotFoundError:
        await store(services, kept)


async def removed_if_needless(services: TaskServices, kept: KeptSegment, log_start: int) -> bool:
    """Removes the files of a kept segment whose copy is finished, or whose records are not needed any more.

    Returns whether it did. The metadata must have been read to its end."""
    metadata = services.state
    known = metadata.remote_log_segment_metadata_by_id(kept.metadata.segment_id)
    is_finished = known is not None and known.state is RemoteLogSegmentState.COPY_SEGMENT_FINISHED
    is_cut_off = known is not None and known.is_cut_off
    if is_finished or is_cut_off or RemoteLog(metadata, kept.partition).unread_from(kept.metadata, log_start) is None:
        await services.spool.remove(kept)
        return True
    return False
