"""Produces to the metadata topic: owners use transactions, and any process may write certain single records.

A transaction of a `TransactionalProducer` has the records, the consumed offset under the member's generation (KIP-447),
and the end. The coordinators refuse an older producer epoch and an older generation.

* kafka-python's own producer waits for a commit without a deadline, in a thread that cannot be stopped.
* The producer speaks the classic transaction protocol (before KIP-890): the request versions are capped at its last.
* A request is repeated until the deadline where Kafka makes that safe: coordinators answer a repeated request like the
  first one, and a leader recognises a repeated batch by its sequence number.
* After any error the producer is unusable until it is initialized again. `OwnershipLostError` means that a newer owner
  exists. Then the process may initialize the producer only after a new assignment.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from kafka.protocol.metadata import FindCoordinatorRequest
from kafka.protocol.producer import (
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    InitProducerIdRequest,
    ProduceRequest,
    TxnOffsetCommitRequest,
)
from kafka.record.default_records import DefaultRecordBatchBuilder

from protocol.errors import ErrorCode
from tiers.backoff import Backoff
from tiers.broker.client import BrokerClient, Moment, monotonic_ms, wall_clock_ms
from tiers.broker.connection import unchecked
from tiers.broker.metadata_reads import DEFAULT_METADATA_MAX_AGE_MS
from tiers.errors import BrokerError, OwnershipLostError, RemoteLogMetadataError
from tiers.metadata.records.serde import KeyAndValue
from tiers.metadata.topic.metadata_topic import MetadataTopic
from tiers.model.ids import TopicIdPartition

TRANSACTION_TIMEOUT_MS = 10_000
GROUP_COORDINATOR = 0
TRANSACTION_COORDINATOR = 1
_LANE = "remote-log-metadata-transactions"
_REQUEST_TIMEOUT_MS = 5_000
_BACKOFF = Backoff(base_ms=20, cap_ms=500)
_ALL_IN_SYNC = -1
_MAGIC = 2

_FENCED = frozenset(
    {
        ErrorCode.INVALID_PRODUCER_EPOCH,
        ErrorCode.PRODUCER_FENCED,
        ErrorCode.ILLEGAL_GENERATION,
        ErrorCode.UNKNOWN_MEMBER_ID,
        ErrorCode.FENCED_INSTANCE_ID,
    }
)
_RETRIABLE = frozenset(
    {
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.LEADER_NOT_AVAILABLE,
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.REQUEST_TIMED_OUT,
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
        ErrorCode.NOT_COORDINATOR,
        ErrorCode.NOT_ENOUGH_REPLICAS,
        ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        ErrorCode.KAFKA_STORAGE_ERROR,
        ErrorCode.CONCURRENT_TRANSACTIONS,
    }
)

_COORDINATOR_AGAIN_MS = 100


@dataclass(frozen=True, slots=True)
class GroupMember:
    """The member whose generation the group coordinator checks at a commit (KIP-447)."""

    group_id: str
    generation_id: int
    member_id: str


async def find_coordinator(client: BrokerClient, key: str, key_type: int, timeout_ms: int) -> int:
    """Returns the node id of the coordinator. Raises `BrokerError`, retriable while there is no coordinator.

    The first request to a new cluster waits here: it makes the broker create the topic of the coordinators."""
    message = FindCoordinatorRequest(key=key, key_type=key_type)
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            while True:
                # From version 4 on, the request has a list of keys.
                response = await client.request(None, message, timeout_ms, min_version=1, max_version=3)
                if response.error_code != ErrorCode.COORDINATOR_NOT_AVAILABLE:
                    break
                await asyncio.sleep(_COORDINATOR_AGAIN_MS / 1000)
    except TimeoutError as error:
        raise BrokerError(f"there is no coordinator for {key} after {timeout_ms} ms", retriable=True) from error
    if response.error_code != ErrorCode.NONE:
        raise BrokerError(
            f"there is no coordinator for {key}",
            response.error_code,
            retriable=response.error_code in _RETRIABLE,
        )
    return int(response.node_id)


class MetadataProducer:
    """Writes single records without a transaction, with acks=all. A repeated request may write a record twice.

    The producer does not check which members read the records (`record_types`). So it may write only record types that
    are read by every release that declares record types."""

    def __init__(
        self,
        client: BrokerClient,
        topic: MetadataTopic,
        *,
        clock_skew: ClockSkew | None = None,
    ) -> None:
        self._client = client
        self._topic = topic
        self._clock_skew = clock_skew or ClockSkew(monotonic_ms, wall_clock_ms)

    async def send(
        self,
        metadata_partition: int,
        records: Sequence[KeyAndValue],
        timeout_ms: int,
        before_sending: Callable[[], None] = unchecked,
    ) -> int:
        """Writes the records, and returns the offset of the last one.

        `before_sending` is called right before each request. If it raises an error, the request is not sent. Raises
        `RemoteLogMetadataError` when it is not certain that the records were written."""
        batch, deadline_ms = _batch(records, -1, -1, -1), monotonic_ms() + timeout_ms
        return await self._produce(metadata_partition, batch, len(records), None, deadline_ms, before_sending)

    async def _produce(
        self,
        metadata_partition: int,
        batch: bytes,
        count: int,
        transactional_id: str | None,
        deadline_ms: int,
        before_sending: Callable[[], None] = unchecked,
    ) -> int:
        partition = TopicIdPartition(self._topic.topic_id, metadata_partition, self._topic.name)
        failed = False
        sent = self._clock_skew.now()

        async def ask(remaining_ms: int) -> tuple[int, Any]:
            nonlocal failed
            max_age_ms = 0 if failed else DEFAULT_METADATA_MAX_AGE_MS
            failed = True  # also when the known metadata names no leader
            leader = await self._client.leader_of(partition, remaining_ms, max_age_ms)
            topic_data = ProduceRequest.TopicProduceData(
                name=self._topic.name,
                partition_data=[
                    ProduceRequest.TopicProduceData.PartitionProduceData(index=metadata_partition, records=batch)
                ],
            )
            message = ProduceRequest(
                transactional_id=transactional_id, acks=_ALL_IN_SYNC, timeout_ms=remaining_ms, topic_data=[topic_data]
            )
            response = await self._client.request(
                leader.node_id,
                message,
                remaining_ms,
                min_version=7,
                max_version=11,
                lane=_LANE,
                before_sending=before_sending,
            )
            answer = response.responses[0].partition_responses[0]
            if answer.error_code == ErrorCode.NONE:
                self._clock_skew.observe(sent, answer.log_append_time_ms)
            return answer.error_code, answer.base_offset

        base_offset: int = await self._until(deadline_ms, "Produce", ask)
        return base_offset + count - 1

    async def _until(self, deadline_ms: int, what: str, ask: Callable[[int], Awaitable[tuple[int, Any]]]) -> Any:
        """Repeats `ask`, which returns an error code and an answer, while the error may pass. Returns the answer.

        Raises `OwnershipLostError` when the coordinator fenced this producer or member, and `RemoteLogMetadataError`
        for any other error and at the deadline."""
        failures = 0
        while True:
            remaining_ms = deadline_ms - monotonic_ms()
            trouble = "no time is left"
            if remaining_ms > 0:
                try:
                    code, answer = await ask(min(remaining_ms, _REQUEST_TIMEOUT_MS))
                except BrokerError as error:
                    if not error.retriable:
                        raise RemoteLogMetadataError(f"{what}: {error}") from error
                    trouble = str(error)
                else:
                    if code == ErrorCode.NONE:
                        return answer
                    if code in _FENCED:
                        raise OwnershipLostError(f"the broker refused {what} with {ErrorCode(code).name}")
                    trouble = f"error code {code}"
                    if code not in _RETRIABLE:
                        raise RemoteLogMetadataError(f"{what}: {trouble}")
            failures += 1
            pause_ms = _BACKOFF.pause_ms(failures)
            if monotonic_ms() + pause_ms >= deadline_ms:
                raise RemoteLogMetadataError(f"{what} did not succeed in time: {trouble}")
            await asyncio.sleep(pause_ms / 1000)


class TransactionalProducer(MetadataProducer):
    """A transactional producer with one transactional.id, for one metadata partition. Calls must not overlap."""

    def __init__(
        self,
        client: BrokerClient,
        topic: MetadataTopic,
        metadata_partition: int,
        transactional_id: str,
        *,
        clock_skew: ClockSkew | None = None,
    ) -> None:
        super().__init__(client, topic, clock_skew=clock_skew)
        self._metadata_partition = metadata_partition
        self._transactional_id = transactional_id
        self._coordinators: dict[int, int] = {}
        self._producer_id = -1
        self._producer_epoch = -1
        self._sequence = 0
        self._is_usable = False

    async def initialize(self, timeout_ms: int) -> None:
        """Fences every older producer of this transactional.id and ends its transaction."""
        self._is_usable = False
        message = InitProducerIdRequest(
            transactional_id=self._transactional_id,
            transaction_timeout_ms=TRANSACTION_TIMEOUT_MS,
            producer_id=-1,
            producer_epoch=-1,
        )
        deadline_ms = monotonic_ms() + timeout_ms
        answered = await self._ask_coordinator(message, "InitProducerId", deadline_ms, max_version=4)
        self._producer_id, self._producer_epoch = answered.producer_id, answered.producer_epoch
        self._sequence = 0
        self._is_usable = True

    async def abort_forgotten(self, timeout_ms: int) -> None:
        """Ends the transactions that the coordinator believes ended, but whose markers the partition lacks.

        The producer must be initialized. A coordinator that finds no leader for a partition completes the transaction
        without its marker, and no reader ever gets past it. Kafka 4.3 does this when a partition's only replica is
        stopped cleanly. The marker of a later transaction of the same producer, even an empty one, ends both. No reader
        has seen the records that this aborts."""
        deadline_ms = monotonic_ms() + timeout_ms
        await self._add_partition(deadline_ms)
        await self._end(False, deadline_ms)

    async def commit(self, records: Sequence[KeyAndValue], member: GroupMember | None, timeout_ms: int) -> int:
        """Writes `records` in one transaction, and returns the offset of the last one.

        `member` is None for a writer that needs no membership. For a member, the transaction also commits the offset
        behind its own marker, so that monitors of consumer groups see no lag. Raises `RemoteLogMetadataError` when it
        is not certain that the records were written. The next `initialize` ends an open transaction."""
        if not self._is_usable:
            raise RemoteLogMetadataError(f"producer {self._transactional_id} must be initialized before it writes")
        self._is_usable = False
        deadline_ms = monotonic_ms() + timeout_ms
        await self._add_partition(deadline_ms)
        batch = _batch(records, self._producer_id, self._producer_epoch, self._sequence)
        try:
            last_offset = await self._produce(
                self._metadata_partition, batch, len(records), self._transactional_id, deadline_ms
            )
            if member is not None:
                await self._commit_offset(member, last_offset + 2, deadline_ms)
        except RemoteLogMetadataError:
            # If the abort fails, readers wait until the transaction's timeout.
            with contextlib.suppress(RemoteLogMetadataError):
                await self._end(False, min(deadline_ms, monotonic_ms() + _REQUEST_TIMEOUT_MS))
            raise
        await self._end(True, deadline_ms)
        self._sequence += len(records)
        self._is_usable = True
        return last_offset

    async def _ask_coordinator(
        self,
        message: Any,
        what: str,
        deadline_ms: int,
        *,
        group_id: str | None = None,
        error_code: Callable[[Any], int] = attrgetter("error_code"),
        min_version: int = 0,
        max_version: int,
    ) -> Any:
        """Asks the coordinator of the group, or of the transactions without a `group_id`. Returns the response."""
        key_type, key = TRANSACTION_COORDINATOR, self._transactional_id
        if group_id is not None:
            key_type, key = GROUP_COORDINATOR, group_id

        async def ask(remaining_ms: int) -> tuple[int, Any]:
            node_id = self._coordinators.get(key_type)
            if node_id is None:
                node_id = await find_coordinator(self._client, key, key_type, remaining_ms)
                self._coordinators[key_type] = node_id
            code = -1
            try:
                response = await self._client.request(
                    node_id, message, remaining_ms, min_version=min_version, max_version=max_version, lane=_LANE
                )
                code = error_code(response)
            finally:
                if code not in (ErrorCode.NONE, ErrorCode.CONCURRENT_TRANSACTIONS):
                    self._coordinators.pop(key_type, None)
            return code, response

        return await self._until(deadline_ms, what, ask)

    async def _add_partition(self, deadline_ms: int) -> None:
        topic = AddPartitionsToTxnRequest.AddPartitionsToTxnTopic(
            name=self._topic.name, partitions=[self._metadata_partition]
        )
        message = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=self._transactional_id,
            v3_and_below_producer_id=self._producer_id,
            v3_and_below_producer_epoch=self._producer_epoch,
            v3_and_below_topics=[topic],
        )
        await self._ask_coordinator(
            message,
            "AddPartitionsToTxn",
            deadline_ms,
            error_code=lambda response: (
                response.results_by_topic_v3_and_below[0].results_by_partition[0].partition_error_code
            ),
            max_version=3,
        )

    async def _commit_offset(self, member: GroupMember, offset: int, deadline_ms: int) -> None:
        producer = {
            "transactional_id": self._transactional_id,
            "group_id": member.group_id,
            "producer_id": self._producer_id,
            "producer_epoch": self._producer_epoch,
        }
        await self._ask_coordinator(AddOffsetsToTxnRequest(**producer), "AddOffsetsToTxn", deadline_ms, max_version=3)
        request = TxnOffsetCommitRequest
        partition = request.TxnOffsetCommitRequestTopic.TxnOffsetCommitRequestPartition(
            partition_index=self._metadata_partition,
            committed_offset=offset,
            committed_leader_epoch=-1,
            committed_metadata="",
        )
        message = request(
            **producer,
            generation_id=member.generation_id,
            member_id=member.member_id,
            group_instance_id=None,
            topics=[request.TxnOffsetCommitRequestTopic(name=self._topic.name, partitions=[partition])],
        )
        await self._ask_coordinator(
            message,
            "TxnOffsetCommit",
            deadline_ms,
            group_id=member.group_id,
            error_code=lambda response: response.topics[0].partitions[0].error_code,
            # Below version 3 the request has no generation, so the coordinator could not refuse a stale member.
            min_version=3,
            max_version=4,
        )

    async def _end(self, committed: bool, deadline_ms: int) -> None:
        message = EndTxnRequest(
            transactional_id=self._transactional_id,
            producer_id=self._producer_id,
            producer_epoch=self._producer_epoch,
            committed=committed,
        )
        await self._ask_coordinator(message, "EndTxn", deadline_ms, max_version=3)


def _batch(records: Sequence[KeyAndValue], producer_id: int, producer_epoch: int, base_sequence: int) -> bytes:
    builder = DefaultRecordBatchBuilder(
        magic=_MAGIC,
        compression_type=0,
        is_transactional=producer_id >= 0,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        batch_size=1 << 30,
    )
    for offset, (key, value) in enumerate(records):
        # The broker sets the time: the topic has LogAppendTime.
        builder.append(offset, 0, key, value, [])
    return bytes(builder.build())


class ClockSkew:
    """Measures how far the brokers' clock is ahead of this machine's clock.

    The response to each Produce has the LogAppendTime. If the clocks agree, it lies between request and response.
    Otherwise they differ by its distance to that interval. `skew_ms` corrects the measurement by how much this
    machine's clock was set since, as the monotonic clock shows. That clock may stand still while a machine sleeps, so a
    caller that finds a large skew measures again before it believes the result."""

    def __init__(self, clock_ms: Callable[[], int], wall_clock_ms: Callable[[], int]) -> None:
        self._clock_ms = clock_ms
        self._wall_clock_ms = wall_clock_ms
        self._ahead_ms: int | None = None
        self._our_offset_ms = 0

    def now(self) -> Moment:
        return Moment(self._clock_ms(), self._wall_clock_ms())

    def observe(self, sent: Moment, append_time_ms: int) -> None:
        """Measures with a record that was sent at `sent` or later. The response arrived just now.

        `append_time_ms` is the broker's LogAppendTime; a negative one is ignored."""
        if append_time_ms < 0:
            return
        answered = self.now()
        # The time of sending on the clock as it is set now: the clock may have been set since.
        sent_at_ms = answered.wall_ms - (answered.monotonic_ms - sent.monotonic_ms)
        self._ahead_ms = min(0, append_time_ms - sent_at_ms) + max(0, append_time_ms - answered.wall_ms)
        self._our_offset_ms = answered.wall_ms - answered.monotonic_ms

    def skew_ms(self) -> int | None:
        """Returns the skew: positive when the brokers are ahead, None before the first measurement."""
        if self._ahead_ms is None:
            return None
        now = self.now()
        return self._ahead_ms - (now.wall_ms - now.monotonic_ms - self._our_offset_ms)
