"""`MetadataFollower` reads every metadata partition, read_committed, and keeps the materialised state up to date.

* It has one long poll at a time per leader, over all partitions that the leader leads. All records of one response are
  one transaction of the state.
* A partition is fresh as of the time at which a request was sent, if the follower has read up to the high watermark of
  its response and the leader was still the leader then (`MetadataLeadership`). The LSO is not enough: a look-up may
  depend on records behind an open transaction (docs/design.md, safety rule 1).
* If a response has no record to replay, only the positions in memory move. Transaction markers alone are not worth a
  transaction of the state.
* A state that cannot be written (disk or map full) or trusted is not fresh. `trouble` says why, and reading goes on.
* The follower reads a metadata partition with records of a later release up to the first of them. The partition is then
  not fresh (`committed_records`).
* If the topic lacks records that were read before, the follower keeps the state and does not read the topic from its
  start. The state is then not fresh (`MetadataLineage`). Every Fetch names the leader epoch of the last batch that was
  read, so that a leader with another history answers with the offset at which the histories diverge.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import lmdb

from protocol.errors import ErrorCode, ProtocolError
from tiers.broker.client import BrokerClient
from tiers.broker.fetch import FetchedPartition, FetchPosition, fetch_raw
from tiers.errors import BrokerError, RemoteLogMetadataError, RemoteLogMetadataNotReadyError
from tiers.lasting_trouble import LastingTrouble
from tiers.metadata.remote_log_metadata_manager import MetadataPosition
from tiers.metadata.state.replay import PartitionRead
from tiers.metadata.state.writer import RemoteLogMetadataStateWriter
from tiers.metadata.topic.committed_records import read_committed
from tiers.metadata.topic.leadership import LATEST_TIMESTAMP, MetadataLeadership
from tiers.metadata.topic.lineage import MetadataLineage
from tiers.metadata.topic.metadata_topic import MetadataTopic
from tiers.metadata.topic.unreadable_partitions import UnreadablePartitions
from tiers.model.ids import RemoteLogSegmentId
from tiers.model.log_start import OffsetAndEpoch
from tiers.model.segment_metadata import RemoteLogSegmentMetadataUpdate
from tiers.model.segment_state import RemoteLogSegmentState

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

FETCH_LANE = "remote-log-metadata"
EARLIEST_TIMESTAMP = -2
_FETCH_MAX_WAIT_MS = 500
_FETCH_MAX_BYTES = 8 * 1024 * 1024
_FETCH_TIMEOUT_MS = 10_000
_BROKERS_MAX_AGE_MS = 5_000
_LEADERS_TIMEOUT_MS = 2_000
_LEADERS_INTERVAL_MS = 500
"""How often the leaders are confirmed. A partition is never fresher than the last confirmation of its leader."""
_BACKOFF_BASE_MS = 50
_BACKOFF_CAP_MS = 1_000
_READ_TO_END_MARK_MS = 60_000


class MetadataFollower:
    def __init__(
        self,
        client: BrokerClient,
        topic: MetadataTopic,
        state: RemoteLogMetadataStateWriter,
        *,
        clock_ms: Callable[[], int],
        wall_clock_ms: Callable[[], int],
        on_finished: Callable[[list[RemoteLogSegmentId]], None],
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._client = client
        self._topic = topic
        self._state = state
        self._clock_ms = clock_ms
        self._wall_clock_ms = wall_clock_ms
        self._on_finished = on_finished
        self._jitter = jitter
        self._positions = {number: state.next_offset(number) for number in range(topic.partition_count)}
        self._position_epochs = {number: state.consumed(number).leader_epoch for number in self._positions}
        self._fresh_at_ms: dict[int, int] = {}
        self._marked_at_ms: int | None = None
        self._readers: set[int] = set()
        self._leadership = MetadataLeadership(client, topic, clock_ms=clock_ms)
        self._leaders_changed = asyncio.Event()
        self._progress = asyncio.Condition()
        # Held from the check of the positions until they are moved, so that no record is replayed twice.
        self._replaying = asyncio.Lock()
        self._start_over_for: str | None = None
        self._probes = [asyncio.Lock() for _ in range(topic.partition_count)]
        # One thread: LMDB syncs to disk at every commit, and the commits must stay in order.
        self._state_thread = ThreadPoolExecutor(1, thread_name_prefix="remote-log-metadata-state")
        self.events_read = 0
        """Committed records that this follower has read."""
        self.foreign_records_read = 0
        self._trouble: str | None = None
        self._no_leaders = LastingTrouble(
            logger,
            "the metadata topic's leaders are not known",
            "the metadata topic's leaders are known again",
            clock_ms=clock_ms,
        )
        self._unreadable = UnreadablePartitions(logger, clock_ms)
        self._unknown: dict[int, str] = {}
        """The metadata partitions with a record that this release does not know, each with a text for an operator."""
        self._lineage = MetadataLineage(
            self._leadership,
            state,
            topic.partition_count,
            lambda number: OffsetAndEpoch(self._positions[number], self._position_epochs[number]),
            self._in_state_thread,
            on_loss=lambda number: self._fresh_at_ms.pop(number, None),
        )

    def close(self) -> None:
        """Waits for a commit in progress. `run` must have ended."""
        self._state_thread.shutdown()
        at_ms = self._read_to_end_at_ms()
        try:
            if at_ms is not None:
                self._state.mark_read_to_end(at_ms)
        except lmdb.Error as error:
            logger.warning(
                "the time of the last read to the end cannot be saved: the next start reads the topic again",
                extra={"error": str(error)},
            )

    @property
    def trouble(self) -> str | None:
        """Returns why the state does not follow the topic, as a text for an operator; None when it does."""
        return self.trouble_of_all or next(iter(self._unknown.values()), None)

    @property
    def trouble_of_all(self) -> str | None:
        """Returns the trouble that affects every metadata partition, also the fresh ones; None without such trouble."""
        return self._trouble or self._lineage.reason

    def position(self, metadata_partition: int) -> int:
        return self._positions[metadata_partition]

    def metadata_position(self, metadata_partition: int) -> MetadataPosition:
        return MetadataPosition(
            self._topic.topic_id, self._position_epochs[metadata_partition], self._positions[metadata_partition]
        )

    def fresh_at_ms(self, metadata_partition: int) -> int | None:
        return self._fresh_at_ms.get(metadata_partition)

    def is_fresh(self, metadata_partition: int, max_age_ms: int) -> bool:
        fresh_at_ms = self._fresh_at_ms.get(metadata_partition)
        return fresh_at_ms is not None and fresh_at_ms >= self._clock_ms() - max_age_ms

    def oldest_age_ms(self) -> int | None:
        """Returns the age of the last read to the end of the partition that is furthest behind.

        None: at least one partition was never read to its end."""
        if len(self._fresh_at_ms) < len(self._positions):
            return None
        return max(0, self._clock_ms() - min(self._fresh_at_ms.values()))

    async def ensure_fresh(self, metadata_partition: int, max_age_ms: int, timeout_ms: int) -> None:
        not_before_ms = self._clock_ms() - max_age_ms

        def is_fresh() -> bool:
            # The time must be later, not equal: two events in the same millisecond have no order.
            return self._fresh_at_ms.get(metadata_partition, not_before_ms) > not_before_ms

        if is_fresh():
            return
        try:
            async with asyncio.timeout(timeout_ms / 1000), self._probes[metadata_partition]:
                failures = 0
                while not is_fresh():
                    try:
                        await self._read_to_end(metadata_partition, not_before_ms, timeout_ms)
                        return
                    except BrokerError:
                        self._leaders_changed.set()
                        await self._back_off(failures)
                        failures += 1
        except TimeoutError as error:
            stopped = self._stopped(metadata_partition)
            raise RemoteLogMetadataNotReadyError(
                f"metadata partition {metadata_partition} was not read to its end in {timeout_ms} ms"
                f"{'' if stopped is None else f': {stopped}'}"
            ) from error

    async def _read_to_end(self, metadata_partition: int, not_before_ms: int, timeout_ms: int) -> None:
        stopped = self._stopped(metadata_partition)
        if stopped is not None:
            raise BrokerError(stopped, retriable=True)
        await self._leadership.confirm(min(timeout_ms, _LEADERS_TIMEOUT_MS), metadata_partition)
        leader = self._leadership.leader(metadata_partition)
        await self._lineage.ask({metadata_partition: leader}, timeout_ms)
        if not self._lineage.is_believed(metadata_partition, leader):
            raise BrokerError("the leader of the metadata partition may lack records that were read", retriable=True)
        asked_at_ms = self._clock_ms()
        position = self._positions[metadata_partition]  # read first: the follower may read beyond the answer meanwhile
        high_watermark = await self._list_offset(metadata_partition, LATEST_TIMESTAMP, timeout_ms)
        if not self._lineage.is_within(metadata_partition, position, 0, high_watermark):
            raise BrokerError("the metadata topic lost records", retriable=True)
        await self._wait_for_position(metadata_partition, high_watermark)
        as_of_ms = self._leadership.holds_as_of(metadata_partition, leader, asked_at_ms)
        if self._start_over_for is not None or as_of_ms is None or as_of_ms < not_before_ms:
            raise BrokerError(
                "the leader of the metadata partition is not confirmed, or the state is being read again",
                retriable=True,
            )
        self._mark_fresh({metadata_partition: as_of_ms})

    async def read_past(self, metadata_partition: int, offset: int, timeout_ms: int) -> None:
        """Waits until the record at `offset` is replayed.

        Raises `RemoteLogMetadataNotReadyError` after `timeout_ms`."""
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await self._wait_for_position(metadata_partition, offset + 1)
        except TimeoutError as error:
            raise RemoteLogMetadataNotReadyError(
                f"offset {offset} of metadata partition {metadata_partition} was not read in {timeout_ms} ms"
            ) from error

    async def _wait_for_position(self, metadata_partition: int, position: int) -> None:
        async with self._progress:
            await self._progress.wait_for(lambda: self._positions[metadata_partition] >= position)

    async def run(self) -> None:
        """Reads until cancelled, and retries after errors of brokers."""
        failures = 0
        async with asyncio.TaskGroup() as readers:
            while True:
                self._leaders_changed.clear()
                try:
                    await self._leadership.confirm(_LEADERS_TIMEOUT_MS)
                    failures = 0
                    self._no_leaders.ended()
                except BrokerError as error:
                    self._no_leaders.found(error=str(error))
                    failures += 1
                for node_id in self._leadership.nodes() - self._readers:
                    self._readers.add(node_id)
                    readers.create_task(self._read_from(node_id), name=f"remote-log-metadata-{node_id}")
                with contextlib.suppress(BrokerError):  # without an answer, the cached addresses of brokers are used
                    await self._client.metadata(0 if failures else _BROKERS_MAX_AGE_MS, _LEADERS_TIMEOUT_MS)
                try:
                    async with asyncio.timeout(_LEADERS_INTERVAL_MS / 1000):
                        await self._leaders_changed.wait()
                except TimeoutError:
                    continue
                await self._back_off(0)

    async def _read_from(self, node_id: int) -> None:
        failures = 0
        failing = LastingTrouble(
            logger, "a read of remote log metadata failed", "remote log metadata is read again", clock_ms=self._clock_ms
        )
        try:
            while numbers := [each for each in self._leadership.led_by(node_id) if self._stopped(each) is None]:
                # The broker fills the partitions in the order of the request until the bytes are used up.
                numbers.sort(key=lambda number: self._fresh_at_ms.get(number, 0))
                is_whole = False
                try:
                    is_whole = await self._poll(node_id, numbers)
                    failing.ended()
                except (BrokerError, ProtocolError) as error:
                    failing.found(node_id=node_id, error=str(error))
                except (lmdb.Error, OSError) as error:
                    self._set_trouble(f"the saved state cannot be written: {error}")
                except Exception as error:  # any error becomes an alarm, and must not end the process
                    logger.exception("a read of remote log metadata failed", extra={"node_id": node_id})
                    self._set_trouble(f"records cannot be replayed: {error!r}")
                if is_whole:
                    failures = 0
                else:
                    self._leaders_changed.set()
                    await self._back_off(failures)
                    failures += 1
        finally:
            self._readers.discard(node_id)

    async def _poll(self, node_id: int, numbers: list[int]) -> bool:
        """Sends one Fetch, and replays its records. Returns whether every partition was answered without an error."""
        leaders = {number: self._leadership.leader(number) for number in numbers}
        await self._lineage.ask(leaders, _FETCH_TIMEOUT_MS)
        leaders = {number: leader for number, leader in leaders.items() if self._stopped(number) is None}
        asked_at_ms = self._clock_ms()
        asked = {number: self._positions[number] for number in leaders}
        epochs = {number: self._position_epochs[number] for number in leaders}
        if not asked:
            return True
        answers = await fetch_raw(
            self._client,
            node_id,
            [
                FetchPosition(
                    self._topic.topic_id,
                    number,
                    position,
                    leaders[number].leader_epoch,
                    last_fetched_epoch=epochs[number],
                )
                for number, position in asked.items()
            ],
            max_bytes=_FETCH_MAX_BYTES,
            max_wait_ms=_FETCH_MAX_WAIT_MS,
            timeout_ms=_FETCH_TIMEOUT_MS,
            lane=FETCH_LANE,
        )
        is_whole = True
        reads: list[PartitionRead] = []
        reached: dict[int, int] = {}
        for fetched in answers:
            # After a change of leader, the reader of the new leader may have moved the position meanwhile.
            if asked.get(fetched.partition) != self._positions.get(fetched.partition):
                continue
            leader = leaders[fetched.partition]
            is_known = self._lineage.is_believed(fetched.partition, leader)
            position = OffsetAndEpoch(asked[fetched.partition], epochs[fetched.partition])
            read = await self._read(fetched, position, is_known)
            if read is None:
                is_whole = False
                continue
            reads.append(read)
            as_of_ms = self._leadership.holds_as_of(fetched.partition, leader, asked_at_ms)
            if as_of_ms is not None and read.next_offset >= fetched.high_watermark:
                reached[fetched.partition] = as_of_ms
        self._unreadable.log(lambda number: self._stopped(number) is None)
        await self._replay(reads, asked, reached)
        await self._mark_read_to_end()
        self._set_trouble(None)
        return is_whole

    def _stopped(self, metadata_partition: int) -> str | None:
        """Returns why the follower does not read the metadata partition any more; None while it reads it.

        The follower reads on only after an operator decides, or upgrades this process."""
        return self._lineage.divergence(metadata_partition) or self._unknown.get(metadata_partition)

    def _stop_at_unknown_records(self, reads: list[PartitionRead]) -> None:
        for read in reads:
            if read.unknown is not None:
                number = read.metadata_partition
                self._fresh_at_ms.pop(number, None)
                self._unknown[number] = (
                    f"metadata partition {number} has records of a later release from offset {read.unknown.offset} on:"
                    f" upgrade this process ({read.unknown.what})"
                )
                logger.error("the remote log metadata is not followed", extra={"reason": self._unknown[number]})

    async def _read(self, fetched: FetchedPartition, position: OffsetAndEpoch, is_known: bool) -> PartitionRead | None:
        """Returns the committed records of `fetched`, or None when they must not be replayed.

        They are not replayed after an error, or when the leader is not known to continue the log that was read."""
        self._unreadable.answered(fetched.partition)
        if fetched.error == ErrorCode.OFFSET_OUT_OF_RANGE:
            await self._look_for_lost_records(fetched.partition, position.offset)
            return None
        if fetched.error != ErrorCode.NONE:
            self._unreadable.refused(fetched.partition, fetched.error)
            return None
        if fetched.diverging is not None:
            if await self._lineage.continues(fetched.partition, position, fetched.diverging, fetched.high_watermark):
                # A replica that copied the log after a compaction does not know an epoch without remaining records.
                self._position_epochs[fetched.partition] = fetched.diverging.leader_epoch
            return None
        if not is_known or not self._lineage.is_within(fetched.partition, position.offset, 0, fetched.high_watermark):
            return None
        read = read_committed(fetched, position.offset)
        self.foreign_records_read += read.foreign_records
        return read

    async def _look_for_lost_records(self, metadata_partition: int, position: int) -> None:
        earliest = await self._list_offset(metadata_partition, EARLIEST_TIMESTAMP, _FETCH_TIMEOUT_MS)
        latest = await self._list_offset(metadata_partition, LATEST_TIMESTAMP, _FETCH_TIMEOUT_MS)
        self._lineage.out_of_range(metadata_partition, position, earliest, latest)

    def _forget(self, reason: str) -> None:
        """Forgets all positions, before the state is cleared.

        Otherwise records that the state does not have any more would look as if they were never written."""
        self._start_over_for = reason
        for number in self._positions:
            self._lineage.remember(number)
        self._positions = dict.fromkeys(self._positions, 0)
        self._position_epochs = dict.fromkeys(self._positions, -1)
        self._unknown.clear()
        self._fresh_at_ms.clear()

    async def _start_over(self) -> None:
        reason = self._start_over_for
        if reason is not None:
            await self._in_state_thread(lambda: self._state.start_over(reason))
            self._start_over_for = None

    async def _replay(self, reads: list[PartitionRead], asked: dict[int, int], reached: dict[int, int]) -> None:
        """Replays the reads that still continue the positions: another answer or a new start may have moved them."""
        async with self._replaying:
            await self._start_over()
            reads = [
                read
                for read in reads
                if self._positions[read.metadata_partition] == asked[read.metadata_partition]
                and self._stopped(read.metadata_partition) is None
            ]
            with_events = [read for read in reads if read.events]
            if with_events:
                # The segments count as seen before the commit. Otherwise a caller between the two steps would find a
                # finished segment that was not seen just now, and would take it for one that was seen long ago.
                self._on_finished([each for read in with_events for each in _finished(read)])
                try:
                    # If this task is cancelled, the commit still happens.
                    await asyncio.shield(self._in_state_thread(lambda: self._state.apply(with_events)))
                except RemoteLogMetadataError as error:
                    self._forget(f"the saved state contradicts itself: {error}")
                    raise
                self.events_read += sum(len(read.events) for read in with_events)
            async with self._progress:
                for read in reads:
                    self._positions[read.metadata_partition] = read.next_offset
                    if read.leader_epoch >= 0:
                        self._position_epochs[read.metadata_partition] = read.leader_epoch
                self._progress.notify_all()
            self._stop_at_unknown_records(reads)
            still_read = {read.metadata_partition for read in reads}
            self._mark_fresh({number: at_ms for number, at_ms in reached.items() if number in still_read})

    def _set_trouble(self, trouble: str | None) -> None:
        if trouble is not None and trouble != self._trouble:
            logger.error("the remote log metadata is not followed", extra={"reason": trouble})
        elif trouble is None and self._trouble is not None:
            logger.warning("the remote log metadata is followed again")
        self._trouble = trouble

    def _mark_fresh(self, fresh_at_ms: dict[int, int]) -> None:
        later = {
            number: at_ms
            for number, at_ms in fresh_at_ms.items()
            if at_ms > self._fresh_at_ms.get(number, -1) and self._stopped(number) is None
        }
        if later and self._start_over_for is None:
            self._fresh_at_ms |= later
            try:
                self._state.mark_fresh(later)
            except lmdb.Error as error:
                # Other processes see an older freshness than this one.
                logger.warning(
                    "the freshness of the metadata cannot be shared with other processes", extra={"error": str(error)}
                )

    async def _mark_read_to_end(self) -> None:
        now_ms = self._clock_ms()
        if self._marked_at_ms is not None and now_ms - self._marked_at_ms < _READ_TO_END_MARK_MS:
            return
        at_ms = self._read_to_end_at_ms()
        if at_ms is not None:
            self._marked_at_ms = now_ms
            await self._in_state_thread(lambda: self._state.mark_read_to_end(at_ms))

    def _read_to_end_at_ms(self) -> int | None:
        """Returns the wall clock time as of which all metadata partitions were read; None: not all were read yet."""
        if len(self._fresh_at_ms) < len(self._positions):
            return None
        return self._wall_clock_ms() - (self._clock_ms() - min(self._fresh_at_ms.values()))

    async def _list_offset(self, metadata_partition: int, timestamp: int, timeout_ms: int) -> int:
        asked = {metadata_partition: self._leadership.leader(metadata_partition)}
        offset = (await self._leadership.offsets(asked, timestamp, timeout_ms)).get(metadata_partition)
        if offset is None:
            raise BrokerError(
                f"the leader of metadata partition {metadata_partition} reports no offset", retriable=True
            )
        return offset

    def _in_state_thread(self, work: Callable[[], _T]) -> asyncio.Future[_T]:
        return asyncio.get_running_loop().run_in_executor(self._state_thread, work)

    async def _back_off(self, failures: int) -> None:
        cap_ms = min(_BACKOFF_CAP_MS, _BACKOFF_BASE_MS << min(failures, 10))
        await asyncio.sleep(cap_ms * self._jitter() / 1000)


def _finished(read: PartitionRead) -> list[RemoteLogSegmentId]:
    return [
        event.record.segment_id
        for event in read.events
        if isinstance(event.record, RemoteLogSegmentMetadataUpdate)
        and event.record.state is RemoteLogSegmentState.COPY_SEGMENT_FINISHED
    ]
