"""`SingleWriterLog` makes a `MetadataLog` of a `MetadataRecordLog`, for a proxy that is one process.

The holder of the log owns all partitions. One thread reads the log, writes it and replays it into the materialised
state, so that each write is based on all earlier ones. A write that was cancelled or timed out still ends before the
next one begins.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import lmdb

from tiers.broker.client import monotonic_ms, wall_clock_ms
from tiers.errors import OwnershipLostError, RemoteLogMetadataError, RemoteLogMetadataNotReadyError
from tiers.metadata.metadata_log import Append, MakeRecords, MetadataPosition, MetadataStatus, Tenure, begun_in
from tiers.metadata.record_log import LoggedRecord, MetadataRecordLog, RecordLogIdentity, RefusalToCreate
from tiers.metadata.state.layout import StateIdentity
from tiers.metadata.state.replay import MetadataEvent, PartitionRead
from tiers.metadata.state.writer import (
    TOO_OLD,
    RemoteLogMetadataStateWriter,
    age_since,
    is_too_old,
    saved_identity,
)
from tiers.model.ids import TopicIdPartition

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_FOLLOW_INTERVAL_MS = 500
"""How often the log is read without a caller, so that the age of the state stays small."""
_UPKEEP_INTERVAL_MS = 60_000
_TOMBSTONES_KEPT_MS = 7 * 86_400_000
_READ_RECORDS = 10_000
_WRITE_TIMEOUT_MS = 8_000
_PARTITION = 0
"""The log is one metadata partition."""


class SingleWriterLog:
    """Implements `MetadataLog`. The caller calls `open` and `close` once, in one event loop.

    Missing metadata is created unless `refusal_to_create` returns why that must not happen."""

    def __init__(
        self,
        log: MetadataRecordLog,
        state_folder: Path,
        cluster_id: str,
        refusal_to_create: RefusalToCreate | None,
        wall_clock_ms: Callable[[], int] = wall_clock_ms,
    ) -> None:
        self._log = log
        self._state_folder = state_folder
        self._cluster_id = cluster_id
        self._refusal_to_create = refusal_to_create
        self._wall_clock_ms = wall_clock_ms
        self.writer = ""
        self._identity: RecordLogIdentity | None = None
        self._state: RemoteLogMetadataStateWriter | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._following: asyncio.Task[None] | None = None
        self._fresh_at_ms: int | None = None
        self._upkeep_at_ms: int | None = None
        self._trouble: str | None = None

    async def open(self) -> None:
        """Takes the log and reads it to its end.

        Raises a `RemoteLogMetadataError` when an operator must act: another process holds the log, it is of another
        cluster, it is missing though there are segments, or it lacks records that this process has read before."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="remote-log-metadata")
        self._identity = await self._opened_log()
        identity = StateIdentity(self._identity.cluster_id, self._identity.log_id, 1)
        await self._in_thread(lambda: self._open_state(identity))
        self._tasks = asyncio.TaskGroup()
        await self._tasks.__aenter__()
        self._following = self._tasks.create_task(self._keep_following(), name="remote-log-metadata-follower")

    async def close(self) -> None:
        """Gives the log up. Safe to call twice, and after `open` failed."""
        try:
            if self._tasks is not None and self._following is not None:
                self._following.cancel()
                tasks, self._tasks = self._tasks, None
                await tasks.__aexit__(None, None, None)
        finally:
            self._fresh_at_ms = None
            # A cancellation must not leave the log or the state open: the next process needs their locks.
            await asyncio.shield(asyncio.to_thread(self._close))

    def _close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown()
        state, self._state = self._state, None
        try:
            if state is not None:
                state.close()
        finally:
            self._log.close()

    async def _opened_log(self) -> RecordLogIdentity:
        folder, cluster_id = self._state_folder, self._cluster_id
        saved = await self._in_thread(lambda: saved_identity(folder))
        identity = await self._in_thread(lambda: self._log.open(cluster_id, may_create=False))
        if saved is not None and (identity is None or identity.log_id != saved.topic_id):
            raise RemoteLogMetadataError(
                f"{self._log.place} {'is missing' if identity is None else 'is another log'}, but {folder} has the"
                " metadata of segments: restore the log, or correct the setting that names it"
            )
        if identity is None:
            refusal = None if self._refusal_to_create is None else await self._refusal_to_create()
            if refusal is not None:
                raise RemoteLogMetadataError(f"{self._log.place} is missing and is not created: {refusal}")
            identity = await self._in_thread(lambda: self._log.open(cluster_id, may_create=True))
        assert identity is not None
        if identity.cluster_id != cluster_id:
            raise RemoteLogMetadataError(
                f"{self._log.place} has the metadata of the Kafka cluster {identity.cluster_id}, and not of"
                f" {cluster_id}: correct the setting that names it"
            )
        return identity

    def _open_state(self, identity: StateIdentity) -> None:
        """Opens the state and reads the log to its end.

        It first clears a state that was last read to the end so long ago that tombstones may be gone that it lacks."""
        state = self._state = RemoteLogMetadataStateWriter.open(self._state_folder, identity)
        wall_ms = self._wall_clock_ms()
        age_ms = age_since(state.read_at_ms().get(_PARTITION), wall_ms)
        try:
            self.writer = state.writer_name(socket.gethostname())
            if state.next_offset(_PARTITION) > 0 and is_too_old(age_ms, _TOMBSTONES_KEPT_MS // 2):
                state.start_over_partitions([_PARTITION], TOO_OLD, wall_ms)
        except lmdb.Error as error:
            raise RemoteLogMetadataError(f"the state in {self._state_folder} cannot be written: {error}") from error
        if not self._has_history(*state.reached(_PARTITION)):
            raise RemoteLogMetadataError(
                f"{self._log.place} lacks records that {self._state_folder} was read from: it was restored from"
                " an old copy. Restore a later one"
            )
        self._follow()

    def _has_history(self, next_offset: int, epoch: int) -> bool:
        if epoch < 0:
            return True
        return next_offset <= self._log.next_offset() and self._log.epoch_before(next_offset) == epoch

    @property
    def state(self) -> RemoteLogMetadataStateWriter:
        if self._state is None:
            raise RemoteLogMetadataNotReadyError("the remote log metadata is not open yet")
        return self._state

    def _in_thread(self, work: Callable[[], _T]) -> asyncio.Future[_T]:
        if self._thread is None:
            raise RemoteLogMetadataNotReadyError("the remote log metadata is not open yet")
        return asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _within(self, timeout_ms: int, work: Callable[[], None]) -> None:
        """Runs `work` in the thread. Raises `RemoteLogMetadataNotReadyError` after `timeout_ms`; `work` goes on."""
        running = self._in_thread(work)
        running.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await asyncio.shield(running)
        except TimeoutError as error:
            raise RemoteLogMetadataNotReadyError(f"{self._log.place} did not answer in {timeout_ms} ms") from error

    async def _keep_following(self) -> None:
        """Reads the log until cancelled. An exception becomes an alarm, and reading goes on."""
        while True:
            try:
                await asyncio.shield(self._in_thread(self._follow_and_upkeep))
            except Exception as error:
                self._set_trouble(str(error) if isinstance(error, RemoteLogMetadataError) else repr(error))
            else:
                self._set_trouble(None)
            await asyncio.sleep(_FOLLOW_INTERVAL_MS / 1000)

    def _set_trouble(self, trouble: str | None) -> None:
        if trouble is not None and trouble != self._trouble:
            logger.error("the remote log metadata is not followed: nothing is written", extra={"reason": trouble})
        elif trouble is None and self._trouble is not None:
            logger.warning("the remote log metadata is followed again")
        self._trouble = trouble

    def _follow_and_upkeep(self) -> None:
        self._follow()
        now_ms = monotonic_ms()
        if self._upkeep_at_ms is None or now_ms - self._upkeep_at_ms >= _UPKEEP_INTERVAL_MS:
            self._upkeep_at_ms = now_ms
            wall_ms = self._wall_clock_ms()
            self.state.mark_read_to_end({_PARTITION: wall_ms})
            self._log.drop_tombstones(wall_ms - _TOMBSTONES_KEPT_MS)

    def _follow(self) -> None:
        """Replays the log to its end. Afterwards the state is as fresh as of the time of the call."""
        if not self._log.is_held():
            self._fresh_at_ms = None
            raise OwnershipLostError(f"this process does not hold {self._log.place} any more: restart it")
        as_of_ms, state = monotonic_ms(), self.state
        try:
            while True:
                records = self._log.read(state.next_offset(_PARTITION), _READ_RECORDS)
                if records:
                    self._replay(state, records)
                if len(records) < _READ_RECORDS:
                    break
            self._fresh_at_ms = as_of_ms
            state.mark_fresh({_PARTITION: as_of_ms})
        except (lmdb.Error, OSError) as error:
            raise RemoteLogMetadataNotReadyError(f"the saved state cannot be written: {error}") from error

    def _replay(self, state: RemoteLogMetadataStateWriter, records: Sequence[LoggedRecord]) -> None:
        events = [event for record in records if (event := MetadataEvent.of(*record)) is not None]
        next_offset = records[-1].offset + 1
        read = PartitionRead(_PARTITION, events, next_offset, self._log.epoch_before(next_offset))
        try:
            state.apply([read])
        except RemoteLogMetadataError as error:
            self._fresh_at_ms = None
            state.start_over(f"the saved state contradicts itself: {error}")
            raise

    def _append_now(self, records: MakeRecords) -> None:
        self._follow()
        to_write = records()
        if not to_write:
            return
        try:
            self._log.append(to_write, self._wall_clock_ms())
            self._follow()
        except BaseException:
            # The log may have records that the state lacks. Until they are replayed, this process owns nothing.
            self._fresh_at_ms = None
            raise

    async def append(
        self, partition: TopicIdPartition, records: MakeRecords, by: Append, timeout_ms: int | None = None
    ) -> None:
        """Appends as the holder of the log, which is the only writer: the right does not matter."""
        await self._within(_WRITE_TIMEOUT_MS if timeout_ms is None else timeout_ms, lambda: self._append_now(records))

    def is_fresh(self, partition: TopicIdPartition, max_age_ms: int) -> bool:
        return self._fresh_at_ms is not None and self._fresh_at_ms >= monotonic_ms() - max_age_ms

    async def ensure_fresh(self, partition: TopicIdPartition, max_age_ms: int, timeout_ms: int) -> None:
        # The time must be later, not equal: two events in the same millisecond have no order.
        if self._fresh_at_ms is not None and self._fresh_at_ms > monotonic_ms() - max_age_ms:
            return
        try:
            await self._within(timeout_ms, self._follow)
        except RemoteLogMetadataNotReadyError:
            raise
        except RemoteLogMetadataError as error:
            raise RemoteLogMetadataNotReadyError(str(error)) from error

    def owns(self, partition: TopicIdPartition) -> bool:
        is_owner = self._fresh_at_ms is not None and self._trouble is None and self._log.is_held()
        return is_owner and begun_in(_PARTITION) in (None, self.tenure(partition))

    @property
    def topic_id(self) -> None:
        return None

    def tenure(self, partition: TopicIdPartition) -> Tenure | None:
        """Returns the tenure of this reading of the log: this process holds the log until `close`."""
        return Tenure(_PARTITION, self.state.reading()) if self._log.is_held() else None

    def position(self, partition: TopicIdPartition) -> MetadataPosition:
        if self._identity is None:
            raise RemoteLogMetadataNotReadyError("the remote log metadata is not open yet")
        consumed = self.state.consumed(_PARTITION)
        return MetadataPosition(self._identity.log_id, consumed.leader_epoch, consumed.offset)

    async def confirms(self, partition: TopicIdPartition, position: MetadataPosition, timeout_ms: int) -> bool:
        topic_id, leader_epoch, next_offset = position
        if self._identity is None or topic_id != self._identity.log_id:
            return False
        return await self._in_thread(lambda: self._has_history(next_offset, leader_epoch))

    def status(self) -> MetadataStatus:
        fresh_at_ms, now_ms = self._fresh_at_ms, monotonic_ms()
        is_owner = self._trouble is None and fresh_at_ms is not None
        return MetadataStatus(
            self._trouble,
            None if fresh_at_ms is None else max(0, now_ms - fresh_at_ms),
            frozenset({_PARTITION}) if is_owner else frozenset(),
            clock_skew_ms=0,  # this machine's clock stamps the records
        )
