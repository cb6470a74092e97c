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
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar, Unpack

from kafka.protocol.admin import DeleteRecordsRequest
from kafka.protocol.consumer import ListOffsetsRequest, OffsetForLeaderEpochRequest

from protocol.errors import CorruptBatchError, ErrorCode
from protocol.primitives import Buffer
from protocol.records.record_batch import verify_batches
from tiers.backoff import Backoff
from tiers.broker.client import BrokerClient, Leader, monotonic_ms
from tiers.broker.fetch import READ_COMMITTED, READ_UNCOMMITTED, FetchedPartition, FetchPosition, fetch_raw
from tiers.broker.metadata_reads import DEFAULT_METADATA_MAX_AGE_MS, RequestOptions
from tiers.errors import BrokerError, LogDivergedError, OffsetGapError
from tiers.log.log_sizes import LogSizes
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import EpochEndOffset, LocalLogBounds, LogRead

_LATEST_TIMESTAMP = -1
_CONSUMER_REPLICA_ID = -1
_BACKOFF = Backoff(base_ms=50, cap_ms=1000)
_LANE = "log"
_OFFSETS_LANE = "offsets"
_OFFSETS_PAUSE_MS = 200
_BEYOND_ALL = 2**62
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
_Questions = dict[tuple[TopicIdPartition, int], asyncio.Future[FetchedPartition]]
"""By partition and leader epoch."""


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
            named = replace(partition, topic=self._name(partition))
            ends = await _list_offsets(
                self._client, leader.node_id, {named: _LATEST_TIMESTAMP}, READ_COMMITTED, timeout_ms, self._lane
            )
            fetched = await self._fetch(partition, leader, ends[named] or 0, 1, timeout_ms)
        _raise_for_fetched(fetched, partition)
        return fetched

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
        max_age_ms, failures = DEFAULT_METADATA_MAX_AGE_MS, 0
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
            failures += 1
            pause_ms = _BACKOFF.pause_ms(failures, self._jitter)
            if self._clock_ms() + pause_ms >= deadline_ms:
                raise trouble
            await asyncio.sleep(pause_ms / 1000)
            max_age_ms = 0


class BoundsBatch:
    """Reads the start and end of many logs on one leader, in one Fetch that returns no records.

    The Fetch asks for an offset far beyond the end and claims that the client has read the leader's newest epoch. For
    Kafka this is a divergence: it answers with the log's bounds and without records (docs/semantics.md 6.3). This was
    verified on Kafka 4.3, also for logs that are empty or trimmed to their end. If a log keeps no leader epochs, the
    leader answers OFFSET_OUT_OF_RANGE instead. This happens for old message formats on brokers below 4.0.

    Concurrent questions to the same leader are one request. The caller that asks first sends it."""

    def __init__(self, client: BrokerClient, lane: str) -> None:
        self._client = client
        self._lane = lane
        self._open: dict[int, _Questions] = {}

    async def ask(self, partition: TopicIdPartition, leader: Leader, timeout_ms: int) -> FetchedPartition:
        """Returns the leader's answer to a request that is sent after this call. Raises `BrokerError`."""
        question = (partition, leader.leader_epoch)
        questions = self._open.get(leader.node_id)
        if questions is not None:
            answer = questions.setdefault(question, asyncio.get_running_loop().create_future())
            try:
                async with asyncio.timeout(timeout_ms / 1000):
                    return await asyncio.shield(answer)
            except TimeoutError as error:
                raise BrokerError(f"the bounds of {partition} were not answered in time", retriable=True) from error
        answer = asyncio.get_running_loop().create_future()
        questions = self._open[leader.node_id] = {question: answer}
        try:
            try:
                await asyncio.sleep(0)
            finally:
                del self._open[leader.node_id]
            await self._send(leader.node_id, questions, timeout_ms)
        finally:
            _end(questions)
        return answer.result()

    async def _send(self, node_id: int, questions: _Questions, timeout_ms: int) -> None:
        positions = [
            FetchPosition(one.topic_id, one.partition, _BEYOND_ALL, epoch, max_bytes=1, last_fetched_epoch=epoch)
            for one, epoch in questions
        ]
        fetched = await fetch_raw(self._client, node_id, positions, max_bytes=1, timeout_ms=timeout_ms, lane=self._lane)
        answers = {(one.topic_id, one.partition): one for one in fetched}
        # A broker answers the last entry for a partition. The same partition in an older leader epoch gets no answer.
        last = {partition: answer for (partition, _), answer in questions.items()}
        for partition, answer in last.items():
            found = answers.get((partition.topic_id, partition.partition))
            if found is not None:
                answer.set_result(found)


def _end(questions: _Questions) -> None:
    """Fails the unanswered questions with a retriable error.

    The broker throttles, or the caller that sent the request failed or was cancelled.
    """
    for (partition, _), answer in questions.items():
        if not answer.done():
            answer.set_exception(BrokerError(f"{partition}: the broker gave no answer", retriable=True))
            answer.exception()


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


async def offsets_for_times(
    client: BrokerClient, times_ms: Mapping[TopicIdPartition, int], *, is_committed_only: bool, timeout_ms: int
) -> dict[TopicIdPartition, int | None]:
    """Returns the first offset with the given timestamp or a later one, or None if there is none. For the timestamp -1
    it returns the end of the log that the isolation level allows. Raises `BrokerError`."""
    found: dict[TopicIdPartition, int | None] = {}
    level = READ_COMMITTED if is_committed_only else READ_UNCOMMITTED
    deadline_ms = monotonic_ms() + timeout_ms
    max_age_ms = DEFAULT_METADATA_MAX_AGE_MS
    while left := {partition: time for partition, time in times_ms.items() if partition not in found}:
        try:
            by_leader: dict[int, dict[TopicIdPartition, int]] = {}
            for partition, time_ms in left.items():
                leader = await client.leader_of(partition, timeout_ms, max_age_ms)
                by_leader.setdefault(leader.node_id, {})[partition] = time_ms
            for node_id, asked in by_leader.items():
                found |= await _list_offsets(client, node_id, asked, level, deadline_ms - monotonic_ms(), _OFFSETS_LANE)
        except BrokerError as error:
            if not error.retriable or monotonic_ms() >= deadline_ms:
                raise
            await asyncio.sleep(_OFFSETS_PAUSE_MS / 1000)
            max_age_ms = 0
    return found


async def _list_offsets(
    client: BrokerClient, node_id: int, asked: Mapping[TopicIdPartition, int], level: int, timeout_ms: int, lane: str
) -> dict[TopicIdPartition, int | None]:
    """Asks by the names of the topics, and names no leader epoch. A missing right alone is not worth another try."""
    request = ListOffsetsRequest
    topics: dict[str, list[Any]] = {}
    for partition, time_ms in asked.items():
        one = request.ListOffsetsTopic.ListOffsetsPartition(
            partition_index=partition.partition, current_leader_epoch=-1, timestamp=time_ms
        )
        topics.setdefault(partition.topic, []).append(one)
    message = request(
        replica_id=_CONSUMER_REPLICA_ID,
        isolation_level=level,
        topics=[request.ListOffsetsTopic(name=name, partitions=parts) for name, parts in topics.items()],
    )
    response = await client.request(node_id, message, max(1, timeout_ms), min_version=4, lane=lane)
    partitions = {(one.topic, one.partition): one for one in asked}
    found: dict[TopicIdPartition, int | None] = {}
    for topic in response.topics:
        for answer in topic.partitions:
            partition, code = partitions[topic.name, answer.partition_index], answer.error_code
            if code != ErrorCode.NONE:
                is_refused = code == ErrorCode.TOPIC_AUTHORIZATION_FAILED
                raise BrokerError(f"{partition}: the leader answered with error {code}", code, retriable=not is_refused)
            found[partition] = answer.offset if answer.offset >= 0 else None
    if missing := asked.keys() - found.keys():
        raise BrokerError(f"the answer to ListOffsets lacks {next(iter(missing))}", retriable=True)
    return found
