"""`BrokerLogSource` reads and trims the log on its leader, by Fetch v13+ and a few other requests.

See docs/semantics.md 13.

* Fetch uses the topic id. ListOffsets, OffsetForLeaderEpoch and DeleteRecords take the topic's name, for which the
  source uses the current name of the topic id. Before it trims, a Fetch by id on the same connection checks the id.
* Fetch, ListOffsets and OffsetForLeaderEpoch name the leader epoch of the metadata that found the leader, so that a
  deposed leader refuses them.
* It retries errors of a moved leader with fresh metadata until the deadline. The caller handles all other errors.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, Unpack

from kafka.protocol.admin import DeleteRecordsRequest
from kafka.protocol.consumer import ListOffsetsRequest, OffsetForLeaderEpochRequest

from protocol.errors import CorruptBatchError, ErrorCode
from protocol.primitives import Buffer
from protocol.records.record_batch import verify_batches
from tiers.broker.client import BrokerClient, Leader, monotonic_ms
from tiers.broker.fetch import READ_COMMITTED, FetchedPartition, FetchPosition, fetch_raw
from tiers.broker.metadata_reads import DEFAULT_METADATA_MAX_AGE_MS, RequestOptions
from tiers.errors import BrokerError, LogDivergedError, OffsetGapError
from tiers.log.bounds_batch import BoundsBatch
from tiers.log.log_sizes import LogSizes
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import EpochEndOffset, LocalLogBounds, LogRead

_LATEST_TIMESTAMP = -1
_CONSUMER_REPLICA_ID = -1
_BACKOFF_BASE_MS = 50
_BACKOFF_CAP_MS = 1000
_LANE = "log"
_CHECKED_FOR_MS = 2_000
"""How long the Fetch that checks a trim counts, from its answer until the trim leaves."""

_LEADER_MAY_HAVE_MOVED = frozenset(
    {
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.LEADER_NOT_AVAILABLE,
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.REQUEST_TIMED_OUT,
        ErrorCode.REPLICA_NOT_AVAILABLE,
        ErrorCode.KAFKA_STORAGE_ERROR,
        ErrorCode.FENCED_LEADER_EPOCH,
        ErrorCode.UNKNOWN_LEADER_EPOCH,
        ErrorCode.OFFSET_NOT_AVAILABLE,
        ErrorCode.UNKNOWN_TOPIC_ID,
        ErrorCode.INCONSISTENT_TOPIC_ID,
    }
)

Answer = TypeVar("Answer")


class BrokerLogSource:
    """A `LogSource` on a `BrokerClient`, which the caller opens and closes."""

    def __init__(
        self,
        client: BrokerClient,
        *,
        clock_ms: Callable[[], int] = monotonic_ms,
        jitter: Callable[[], float] = random.random,
        lane: str = _LANE,
    ) -> None:
        """`lane` names the connections that the source uses (`BrokerClient`)."""
        self._client = client
        self._lane = lane
        self._clock_ms = clock_ms
        self._jitter = jitter
        self._bounds_batch = BoundsBatch(client, lane)
        self._sizes = LogSizes(client, clock_ms)

    async def bounds(self, partition: TopicIdPartition, timeout_ms: int) -> LocalLogBounds:
        async def ask(leader: Leader, remaining_ms: int) -> LocalLogBounds:
            fetched = await self._end(partition, leader, remaining_ms)
            return LocalLogBounds(
                log_start_offset=fetched.log_start_offset,
                last_stable_offset=fetched.last_stable_offset,
                high_watermark=fetched.high_watermark,
                leader_epoch=leader.leader_epoch,
            )

        return await self._with_leader(partition, timeout_ms, ask)

    async def size_bytes(self, partition: TopicIdPartition, timeout_ms: int) -> int | None:
        async def ask(leader: Leader, remaining_ms: int) -> int | None:
            name = self._name(partition)
            return await self._sizes.ask(name, partition.partition, leader.node_id, remaining_ms)

        return await self._with_leader(partition, timeout_ms, ask)

    async def read(self, partition: TopicIdPartition, offset: int, max_bytes: int, timeout_ms: int) -> LogRead:
        async def ask(leader: Leader, remaining_ms: int) -> LogRead | None:
            fetched = await self._fetch(partition, leader, offset, max_bytes, remaining_ms)
            if fetched.error == ErrorCode.OFFSET_OUT_OF_RANGE:
                return None
            _raise_for_fetched(fetched, partition)
            return LogRead(
                records=_verified(fetched.records, offset, fetched.last_stable_offset, partition),
                log_start_offset=fetched.log_start_offset,
                last_stable_offset=fetched.last_stable_offset,
                high_watermark=fetched.high_watermark,
                leader_epoch=leader.leader_epoch,
                aborted_transactions=fetched.aborted_transactions,
            )

        deadline_ms = self._clock_ms() + timeout_ms
        read = await self._with_leader(partition, timeout_ms, ask)
        if read is not None:
            return read
        bounds = await self.bounds(partition, max(1, deadline_ms - self._clock_ms()))
        if offset < bounds.log_start_offset:
            raise OffsetGapError(f"{partition}: offset {offset} is below the log start {bounds.log_start_offset}")
        if offset > bounds.high_watermark:
            raise LogDivergedError(f"{partition}: offset {offset} is above the high watermark {bounds.high_watermark}")
        raise BrokerError(f"{partition}: offset {offset} was out of range a moment ago", retriable=True)

    async def end_offset_for_epoch(
        self, partition: TopicIdPartition, leader_epoch: int, timeout_ms: int
    ) -> EpochEndOffset:
        request = OffsetForLeaderEpochRequest

        async def ask(leader: Leader, remaining_ms: int) -> EpochEndOffset:
            topic = request.OffsetForLeaderTopic(
                topic=self._name(partition),
                partitions=[
                    request.OffsetForLeaderTopic.OffsetForLeaderPartition(
                        partition=partition.partition,
                        current_leader_epoch=leader.leader_epoch,
                        leader_epoch=leader_epoch,
                    )
                ],
            )
            message = request(replica_id=_CONSUMER_REPLICA_ID, topics=[topic])
            answer = await self._answer(partition, leader, message, remaining_ms, min_version=2)
            return EpochEndOffset(answer.leader_epoch, answer.end_offset)

        return await self._with_leader(partition, timeout_ms, ask)

    async def delete_records(
        self,
        partition: TopicIdPartition,
        offset: int,
        leader_epoch: int,
        timeout_ms: int,
        check_ownership: Callable[[], None],
    ) -> int:
        request = DeleteRecordsRequest

        async def ask(leader: Leader, remaining_ms: int) -> int:
            if leader.leader_epoch != leader_epoch:
                raise _ForGood(
                    f"the leader epoch of {partition} is {leader.leader_epoch}, not {leader_epoch}",
                    ErrorCode.FENCED_LEADER_EPOCH,
                )
            # This Fetch checks the topic id, the leader epoch and the end offset on the broker that will trim.
            fetched = await self._fetch(partition, leader, offset, 1, remaining_ms)
            checked_at_ms = self._clock_ms()

            def check() -> None:
                """Called when the connection is usable, which may have to open again or to authenticate first.

                The broker may have restarted meanwhile with another log, or have another topic of that name."""
                check_ownership()
                if self._clock_ms() - checked_at_ms > _CHECKED_FOR_MS:
                    raise BrokerError(f"{partition} was checked too long ago for a trim", retriable=True)

            if fetched.error == ErrorCode.OFFSET_OUT_OF_RANGE:
                return await self._start_if_below(partition, offset, leader, remaining_ms)
            if fetched.error in (ErrorCode.FENCED_LEADER_EPOCH, ErrorCode.UNKNOWN_LEADER_EPOCH):
                raise _ForGood(f"the leader epoch of {partition} is no longer {leader_epoch}", fetched.error)
            _raise_for_fetched(fetched, partition)
            if offset > fetched.last_stable_offset:
                raise _ForGood(f"{partition}: offset {offset} is above the LSO {fetched.last_stable_offset}")
            topic = request.DeleteRecordsTopic(
                name=self._name(partition),
                partitions=[
                    request.DeleteRecordsTopic.DeleteRecordsPartition(
                        partition_index=partition.partition, offset=offset
                    )
                ],
            )
            message = request(topics=[topic], timeout_ms=remaining_ms)
            answer = await self._answer(partition, leader, message, remaining_ms, before_sending=check)
            return int(answer.low_watermark)

        return await self._with_leader(partition, timeout_ms, ask)

    async def _start_if_below(self, partition: TopicIdPartition, offset: int, leader: Leader, timeout_ms: int) -> int:
        fetched = await self._end(partition, leader, timeout_ms)
        if fetched.log_start_offset >= offset:
            return fetched.log_start_offset
        raise _ForGood(f"{partition}: offset {offset} is above the log's end", ErrorCode.OFFSET_OUT_OF_RANGE)

    async def _end(self, partition: TopicIdPartition, leader: Leader, timeout_ms: int) -> FetchedPartition:
        fetched = await self._bounds_batch.ask(partition, leader, timeout_ms)
        if fetched.error == ErrorCode.OFFSET_OUT_OF_RANGE:
            # The log keeps no leader epochs. A Fetch at its end returns no records, or one batch that has just arrived.
            end = await self._last_stable_offset(partition, leader, timeout_ms)
            fetched = await self._fetch(partition, leader, end, 1, timeout_ms)
        _raise_for_fetched(fetched, partition)
        return fetched

    async def _last_stable_offset(self, partition: TopicIdPartition, leader: Leader, timeout_ms: int) -> int:
        request = ListOffsetsRequest
        topic = request.ListOffsetsTopic(
            name=self._name(partition),
            partitions=[
                request.ListOffsetsTopic.ListOffsetsPartition(
                    partition_index=partition.partition,
                    current_leader_epoch=leader.leader_epoch,
                    timestamp=_LATEST_TIMESTAMP,
                )
            ],
        )
        message = request(replica_id=_CONSUMER_REPLICA_ID, isolation_level=READ_COMMITTED, topics=[topic])
        answer = await self._answer(partition, leader, message, timeout_ms, min_version=4)
        return int(answer.offset)

    async def _answer(
        self,
        partition: TopicIdPartition,
        leader: Leader,
        message: Any,
        timeout_ms: int,
        **options: Unpack[RequestOptions],
    ) -> Any:
        """Returns what the leader answers about the partition. Raises `BrokerError`, also for an error code there."""
        options["lane"] = self._lane
        response = await self._client.request(leader.node_id, message, timeout_ms, **options)
        for topic in response.topics:
            for answer in topic.partitions:
                index = answer.partition if hasattr(answer, "partition") else answer.partition_index
                if index == partition.partition:
                    _raise_for(answer.error_code, partition)
                    return answer
        raise BrokerError(f"{partition}: the broker's answer lacks the partition", retriable=True)

    async def _fetch(
        self, partition: TopicIdPartition, leader: Leader, offset: int, max_bytes: int, timeout_ms: int
    ) -> FetchedPartition:
        position = FetchPosition(
            partition.topic_id, partition.partition, offset, leader.leader_epoch, max_bytes=max_bytes
        )
        answer = await fetch_raw(
            self._client, leader.node_id, [position], max_bytes=max_bytes, timeout_ms=timeout_ms, lane=self._lane
        )
        for fetched in answer:
            if fetched.topic_id == partition.topic_id and fetched.partition == partition.partition:
                return fetched
        raise BrokerError(f"{partition}: the broker throttles the proxy's user", retriable=True)

    def _name(self, partition: TopicIdPartition) -> str:
        metadata = self._client.cached_metadata
        topic = None if metadata is None else metadata.topics_by_id.get(partition.topic_id)
        if topic is None:
            raise BrokerError(f"no topic has the topic id of {partition}", ErrorCode.UNKNOWN_TOPIC_ID)
        return topic.name

    async def _with_leader(
        self, partition: TopicIdPartition, timeout_ms: int, ask: Callable[[Leader, int], Awaitable[Answer]]
    ) -> Answer:
        deadline_ms = self._clock_ms() + timeout_ms
        max_age_ms, backoff_ms = DEFAULT_METADATA_MAX_AGE_MS, _BACKOFF_BASE_MS
        while True:
            remaining_ms = max(1, deadline_ms - self._clock_ms())
            try:
                leader = await self._client.leader_of(partition, remaining_ms, max_age_ms)
                return await ask(leader, max(1, deadline_ms - self._clock_ms()))
            except _ForGood as error:
                raise BrokerError(str(error), error.code) from error
            except BrokerError as error:
                if not error.retriable:
                    raise
                trouble = error
            pause_ms = int(backoff_ms * self._jitter())
            if self._clock_ms() + pause_ms >= deadline_ms:
                raise trouble
            await asyncio.sleep(pause_ms / 1000)
            max_age_ms, backoff_ms = 0, min(_BACKOFF_CAP_MS, backoff_ms * 2)


class _ForGood(BrokerError):
    """An error that must not be retried, whatever its code."""


def _raise_for(code: int, partition: TopicIdPartition) -> None:
    if code != ErrorCode.NONE:
        raise BrokerError(
            f"{partition}: the leader answered with error {code}", code, retriable=code in _LEADER_MAY_HAVE_MOVED
        )


def _raise_for_fetched(fetched: FetchedPartition, partition: TopicIdPartition) -> None:
    _raise_for(fetched.error, partition)
    if fetched.preferred_read_replica >= 0:
        # Without an error here, a log would look as if it had no records.
        raise BrokerError(
            f"{partition}: the leader sends the owner to broker {fetched.preferred_read_replica}: its"
            " replica.selector.class must leave requests without a rack to the leader"
        )


def _verified(records: Buffer, offset: int, last_stable_offset: int, partition: TopicIdPartition) -> bytes:
    """Returns the whole, verified batches below the last stable offset. Raises `BrokerError`."""
    try:
        batches = verify_batches(records, offset)
    except CorruptBatchError as error:
        raise BrokerError(f"{partition}: {error}", ErrorCode.CORRUPT_MESSAGE) from error
    end = 0
    for batch in batches:
        if batch.next_offset > last_stable_offset:
            break
        end = batch.end
    if end == len(records) and isinstance(records, bytes):
        return records
    return bytes(memoryview(records)[:end])
