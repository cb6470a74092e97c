"""`BrokerLogSource` with leaders that move, refuse, throttle or send malformed answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import pytest
from kafka.protocol.admin import DeleteRecordsRequest, DeleteRecordsResponse
from kafka.protocol.consumer import (
    FetchRequest,
    FetchResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
    OffsetForLeaderEpochRequest,
    OffsetForLeaderEpochResponse,
)

from protocol.apis.metadata import PartitionMetadata
from protocol.errors import ErrorCode
from tests.support.fakes.broker.scripted_broker import ScriptedBroker
from tests.support.fakes.record_batches import batch_of
from tiers.broker.client import BrokerClient
from tiers.broker.client import Leader as TheLeader
from tiers.broker.cluster_metadata import TopicMetadata
from tiers.broker.fetch import FetchedPartition
from tiers.errors import BrokerError, LogDivergedError, OffsetGapError, OwnershipLostError
from tiers.log.bounds_batch import BoundsBatch
from tiers.log.broker_log import BrokerLogSource
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import AbortedTransaction, EpochEndOffset, LocalLogBounds

PARTITION = TopicIdPartition(UUID(int=7), 0, "orders")
TIMEOUT_MS = 60_000
LOG = batch_of(10, 10) + batch_of(20, 10)


def still_ours() -> None:
    """An owner that stays one."""


@dataclass
class Leader:
    """One broker's answers for the partition; `errors` are given first, one per Fetch."""

    broker: ScriptedBroker
    records: bytes = LOG
    log_start: int = 10
    lso: int = 30
    high_watermark: int = 30
    aborted: list[tuple[int, int]] = field(default_factory=list)
    errors: list[int] = field(default_factory=list)
    throttled: int = 0
    preferred_read_replica: int = -1
    keeps_epochs: bool = True
    trimmed_to: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.broker.answers |= {
            FetchRequest.API_KEY: self._fetch,
            ListOffsetsRequest.API_KEY: self._list_offsets,
            DeleteRecordsRequest.API_KEY: self._delete_records,
            OffsetForLeaderEpochRequest.API_KEY: self._epoch_end,
        }

    def leads(self, epoch: int, topic_id: UUID = PARTITION.topic_id) -> None:
        partitions = {0: PartitionMetadata(0, self.broker.node_id, epoch)}
        for broker in self.broker.brokers:
            broker.topics = [TopicMetadata("orders", topic_id, partitions)]

    async def _fetch(self, request: Any) -> Any:
        topic = FetchResponse.FetchableTopicResponse
        asked = request.topics[0].partitions[0]
        error = self.errors.pop(0) if self.errors else 0
        has_diverged = self.keeps_epochs and asked.last_fetched_epoch >= 0 and asked.fetch_offset > self.high_watermark
        if not error and not has_diverged and not self.log_start <= asked.fetch_offset <= self.high_watermark:
            error = ErrorCode.OFFSET_OUT_OF_RANGE
        is_without_bounds = error != 0 or self.preferred_read_replica >= 0
        data = topic.PartitionData(
            partition_index=0,
            error_code=error,
            high_watermark=-1 if is_without_bounds else self.high_watermark,
            last_stable_offset=-1 if is_without_bounds else self.lso,
            log_start_offset=-1 if is_without_bounds else self.log_start,
            aborted_transactions=[
                topic.PartitionData.AbortedTransaction(producer_id=producer_id, first_offset=first)
                for producer_id, first in self.aborted
            ],
            preferred_read_replica=self.preferred_read_replica,
            records=b"" if is_without_bounds or asked.fetch_offset >= self.lso else self.records,
        )
        answered = [topic(topic_id=request.topics[0].topic_id, partitions=[data])]
        if self.throttled:
            self.throttled -= 1
            answered = []
        return FetchResponse(throttle_time_ms=0, error_code=0, session_id=0, responses=answered, node_endpoints=[])

    async def _list_offsets(self, request: Any) -> Any:
        topic = ListOffsetsResponse.ListOffsetsTopicResponse
        answer = topic.ListOffsetsPartitionResponse(
            partition_index=0, error_code=0, timestamp=-1, offset=self.lso, leader_epoch=0
        )
        return ListOffsetsResponse(throttle_time_ms=0, topics=[topic(name="orders", partitions=[answer])])

    async def _delete_records(self, request: Any) -> Any:
        topic = DeleteRecordsResponse.DeleteRecordsTopicResult
        offset = request.topics[0].partitions[0].offset
        self.trimmed_to.append(offset)
        answer = topic.DeleteRecordsPartitionResult(partition_index=0, low_watermark=offset, error_code=0)
        return DeleteRecordsResponse(throttle_time_ms=0, topics=[topic(name="orders", partitions=[answer])])

    async def _epoch_end(self, request: Any) -> Any:
        topic = OffsetForLeaderEpochResponse.OffsetForLeaderTopicResult
        answer = topic.EpochEndOffset(error_code=0, partition=0, leader_epoch=3, end_offset=30)
        return OffsetForLeaderEpochResponse(
            throttle_time_ms=0, topics=[topic(topic=request.topics[0].topic, partitions=[answer])]
        )


@dataclass
class Cluster:
    first: Leader
    second: Leader
    client: BrokerClient
    source: BrokerLogSource


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        brokers = [await stack.enter_async_context(ScriptedBroker(node_id)) for node_id in (1, 2)]
        for broker in brokers:
            broker.brokers = brokers
        addresses = [("127.0.0.1", broker.port) for broker in brokers]
        client = BrokerClient(addresses, client_id="test", request_timeout_ms=TIMEOUT_MS)
        stack.push_async_callback(client.close)
        first, second = (Leader(broker) for broker in brokers)
        first.leads(3)
        yield Cluster(first, second, client, BrokerLogSource(client))


async def test_a_read_is_what_the_leader_of_the_named_epoch_holds(cluster: Cluster) -> None:
    cluster.first.aborted = [(9, 12)]
    read = await cluster.source.read(PARTITION, 10, 1000, TIMEOUT_MS)
    assert read.records == LOG
    assert (read.log_start_offset, read.last_stable_offset, read.high_watermark, read.leader_epoch) == (10, 30, 30, 3)
    assert read.aborted_transactions == (AbortedTransaction(9, 12),)
    asked = cluster.first.broker.received(FetchRequest)[0]
    assert (asked.isolation_level, asked.session_id, asked.session_epoch) == (1, 0, -1)
    assert asked.topics[0].partitions[0].current_leader_epoch == 3


async def test_batches_at_the_last_stable_offset_and_torn_ones_are_left_out(cluster: Cluster) -> None:
    cluster.first.lso = 25
    assert (await cluster.source.read(PARTITION, 10, 1000, TIMEOUT_MS)).records == batch_of(10, 10)
    cluster.first.lso = 30
    cluster.first.records = LOG[:-1]
    assert (await cluster.source.read(PARTITION, 10, 1000, TIMEOUT_MS)).records == batch_of(10, 10)


@pytest.mark.parametrize(
    "records",
    [
        LOG[:-1] + bytes([LOG[-1] ^ 1]),
        batch_of(20, 10) + batch_of(10, 10),
        batch_of(10, 10, leader_epoch=2) + batch_of(20, 10, leader_epoch=1),
    ],
    ids=["a flipped bit", "offsets that fall", "epochs that fall"],
)
async def test_corrupt_batches_are_an_error(cluster: Cluster, records: bytes) -> None:
    cluster.first.records = records
    with pytest.raises(BrokerError) as error:
        await cluster.source.read(PARTITION, 10, 1000, TIMEOUT_MS)
    assert error.value.code == ErrorCode.CORRUPT_MESSAGE


@pytest.mark.parametrize(
    "code", [ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.FENCED_LEADER_EPOCH, ErrorCode.UNKNOWN_TOPIC_ID]
)
async def test_a_moved_leader_is_found_again(cluster: Cluster, code: int) -> None:
    await cluster.source.read(PARTITION, 10, 1000, TIMEOUT_MS)
    cluster.first.errors = [code] * 3
    cluster.second.leads(4)
    read = await cluster.source.read(PARTITION, 10, 1000, TIMEOUT_MS)
    assert read.leader_epoch == 4
    assert len(cluster.second.broker.received(FetchRequest)) == 1


async def test_a_leader_whose_broker_is_gone_is_found_again(cluster: Cluster) -> None:
    await cluster.source.read(PARTITION, 10, 1000, TIMEOUT_MS)
    await cluster.first.broker.stop()
    cluster.second.leads(4)
    assert (await cluster.source.read(PARTITION, 10, 1000, TIMEOUT_MS)).leader_epoch == 4


async def test_a_lasting_error_is_raised_at_the_deadline(cluster: Cluster) -> None:
    cluster.first.errors = [ErrorCode.NOT_LEADER_OR_FOLLOWER] * 10_000
    with pytest.raises(BrokerError) as error:
        await cluster.source.read(PARTITION, 10, 1000, 200)
    assert error.value.retriable


async def test_a_refusal_is_not_retried(cluster: Cluster) -> None:
    cluster.first.errors = [ErrorCode.TOPIC_AUTHORIZATION_FAILED]
    with pytest.raises(BrokerError) as error:
        await cluster.source.read(PARTITION, 10, 1000, TIMEOUT_MS)
    assert (error.value.code, error.value.retriable) == (ErrorCode.TOPIC_AUTHORIZATION_FAILED, False)


async def test_a_leader_that_names_another_replica_to_read_from_is_an_error(cluster: Cluster) -> None:
    """As a replica selector of one's own may do. The answer looks like that of an empty log."""
    cluster.first.preferred_read_replica = 2
    for call in (
        cluster.source.bounds(PARTITION, TIMEOUT_MS),
        cluster.source.read(PARTITION, 10, 1000, TIMEOUT_MS),
        cluster.source.delete_records(PARTITION, 20, 3, TIMEOUT_MS, lambda: None),
    ):
        with pytest.raises(BrokerError, match="sends the owner to broker 2"):
            await call
    assert cluster.first.trimmed_to == []


async def test_a_throttled_answer_is_asked_for_again(cluster: Cluster) -> None:
    cluster.first.throttled = 1
    assert (await cluster.source.read(PARTITION, 10, 1000, TIMEOUT_MS)).records == LOG


async def test_out_of_range_is_a_gap_below_and_a_divergence_above(cluster: Cluster) -> None:
    with pytest.raises(OffsetGapError):
        await cluster.source.read(PARTITION, 9, 1000, TIMEOUT_MS)
    with pytest.raises(LogDivergedError):
        await cluster.source.read(PARTITION, 31, 1000, TIMEOUT_MS)


async def test_an_epochs_end_is_the_leaders_answer(cluster: Cluster) -> None:
    assert await cluster.source.end_offset_for_epoch(PARTITION, 3, TIMEOUT_MS) == EpochEndOffset(3, 30)
    asked = cluster.first.broker.received(OffsetForLeaderEpochRequest)[0].topics[0].partitions[0]
    assert (asked.leader_epoch, asked.current_leader_epoch) == (3, 3)


async def test_a_trim_checks_topic_id_and_epoch_on_the_same_connection(cluster: Cluster) -> None:
    assert await cluster.source.delete_records(PARTITION, 20, 3, TIMEOUT_MS, still_ours) == 20
    asked = [type(request) for request in cluster.first.broker.requests[-2:]]
    assert asked == [FetchRequest, DeleteRecordsRequest]
    check = cluster.first.broker.received(FetchRequest)[-1].topics[0]
    assert (check.topic_id, check.partitions[0].current_leader_epoch) == (PARTITION.topic_id, 3)


async def test_a_trim_is_checked_again_after_its_connection_took_long_to_open(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker restarted after the check, and another topic has the name now."""
    now_ms, request = 1_000_000, cluster.client.request
    source = BrokerLogSource(cluster.client, clock_ms=lambda: now_ms, jitter=lambda: 0.0)

    async def after_the_connection_is_open_again(node_id: int, message: Any, *others: Any, **options: Any) -> Any:
        nonlocal now_ms
        if isinstance(message, DeleteRecordsRequest):
            now_ms += 2_001
            cluster.first.leads(0, UUID(int=8))
            cluster.first.errors = [ErrorCode.UNKNOWN_TOPIC_ID]
        return await request(node_id, message, *others, **options)

    monkeypatch.setattr(cluster.client, "request", after_the_connection_is_open_again)
    with pytest.raises(BrokerError) as error:
        await source.delete_records(PARTITION, 20, 3, TIMEOUT_MS, still_ours)
    assert error.value.code == ErrorCode.UNKNOWN_TOPIC_ID
    assert cluster.first.trimmed_to == []


@pytest.mark.parametrize("code", [ErrorCode.FENCED_LEADER_EPOCH, ErrorCode.UNKNOWN_LEADER_EPOCH])
async def test_a_trim_under_another_leader_epoch_trims_nothing(cluster: Cluster, code: int) -> None:
    cluster.first.errors = [code]
    with pytest.raises(BrokerError) as error:
        await cluster.source.delete_records(PARTITION, 20, 3, TIMEOUT_MS, still_ours)
    assert (error.value.code, error.value.retriable) == (code, False)
    cluster.second.leads(4)
    with pytest.raises(BrokerError):
        await cluster.source.delete_records(PARTITION, 20, 4, TIMEOUT_MS, still_ours)
    assert cluster.first.trimmed_to == cluster.second.trimmed_to == []


async def test_a_trim_that_is_repeated_asks_again_whether_the_partition_is_ours(cluster: Cluster) -> None:
    cluster.first.errors = [ErrorCode.NOT_LEADER_OR_FOLLOWER]

    def lost_meanwhile() -> None:
        raise OwnershipLostError("a newer member")

    with pytest.raises(OwnershipLostError):
        await cluster.source.delete_records(PARTITION, 20, 3, TIMEOUT_MS, lost_meanwhile)
    assert len(cluster.first.broker.received(FetchRequest)) == 2
    assert cluster.first.trimmed_to == []


async def test_a_trim_above_the_last_stable_offset_trims_nothing(cluster: Cluster) -> None:
    cluster.first.lso = 20
    with pytest.raises(BrokerError):
        await cluster.source.delete_records(PARTITION, 21, 3, TIMEOUT_MS, still_ours)
    assert cluster.first.trimmed_to == []


async def test_a_trim_below_the_log_start_returns_the_log_start(cluster: Cluster) -> None:
    assert await cluster.source.delete_records(PARTITION, 5, 3, TIMEOUT_MS, still_ours) == 10
    assert cluster.first.trimmed_to == []


async def test_a_topic_recreated_under_the_name_is_not_trimmed(cluster: Cluster) -> None:
    cluster.first.leads(3, UUID(int=8))
    with pytest.raises(BrokerError) as error:
        await cluster.source.delete_records(PARTITION, 20, 3, TIMEOUT_MS, still_ours)
    assert error.value.code == ErrorCode.UNKNOWN_TOPIC_ID
    assert cluster.first.trimmed_to == []


async def test_bounds_are_one_question_without_records(cluster: Cluster) -> None:
    bounds = await cluster.source.bounds(PARTITION, TIMEOUT_MS)
    assert bounds == LocalLogBounds(10, 30, 30, 3)
    assert len(cluster.first.broker.received(FetchRequest)) == 1
    assert cluster.first.broker.received(ListOffsetsRequest) == []


async def test_a_log_without_leader_epochs_has_bounds_too(cluster: Cluster) -> None:
    cluster.first.keeps_epochs = False
    assert await cluster.source.bounds(PARTITION, TIMEOUT_MS) == LocalLogBounds(10, 30, 30, 3)


async def test_concurrent_questions_for_bounds_share_one_request(cluster: Cluster) -> None:
    await cluster.source.bounds(PARTITION, TIMEOUT_MS)
    asked = [cluster.source.bounds(PARTITION, TIMEOUT_MS) for _ in range(3)]
    assert await asyncio.gather(*asked) == [LocalLogBounds(10, 30, 30, 3)] * 3
    assert len(cluster.first.broker.received(FetchRequest)) == 2
    cluster.first.log_start = 20
    assert (await cluster.source.bounds(PARTITION, TIMEOUT_MS)).log_start_offset == 20


async def test_no_question_gets_the_answer_of_another_leader_epoch(cluster: Cluster) -> None:
    """A broker answers the last entry of a request for a partition, here that of epoch 4."""
    batch = BoundsBatch(cluster.client, "log")
    known = [TheLeader(cluster.first.broker.node_id, epoch) for epoch in (3, 4)]
    old, new = await asyncio.gather(
        *(batch.ask(PARTITION, leader, TIMEOUT_MS) for leader in known), return_exceptions=True
    )
    assert isinstance(old, BrokerError)
    assert old.retriable
    assert isinstance(new, FetchedPartition)


async def test_a_caller_beside_a_cancelled_question_asks_again(cluster: Cluster) -> None:
    await cluster.source.bounds(PARTITION, TIMEOUT_MS)
    first = asyncio.create_task(cluster.source.bounds(PARTITION, TIMEOUT_MS))
    second = asyncio.create_task(cluster.source.bounds(PARTITION, TIMEOUT_MS))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == LocalLogBounds(10, 30, 30, 3)


async def test_bounds_of_a_broker_that_throttles_are_asked_again(cluster: Cluster) -> None:
    cluster.first.throttled = 1
    assert await cluster.source.bounds(PARTITION, TIMEOUT_MS) == LocalLogBounds(10, 30, 30, 3)
