"""`BrokerLogSource` with leaders that move, refuse, throttle or send malformed answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast
from uuid import UUID

import pytest
from kafka.protocol.admin import DeleteRecordsRequest, DescribeLogDirsRequest
from kafka.protocol.consumer import FetchRequest, FetchResponse, ListOffsetsRequest, OffsetForLeaderEpochRequest

from protocol.api_keys import ApiKey
from protocol.apis.metadata import PartitionMetadata
from protocol.errors import ErrorCode
from tests.support.fakes.broker import fetch
from tests.support.fakes.broker.cluster import LocalLog
from tests.support.fakes.broker.cluster_apis import log_dirs
from tests.support.fakes.broker.scripted_broker import ALL_CLUSTER_OPERATIONS, ScriptedBroker, scripted_cluster
from tests.support.fakes.record_batches import batch_of
from tiers.broker.client import BrokerClient, Leader
from tiers.broker.cluster_metadata import TopicMetadata
from tiers.broker.fetch import FetchedPartition
from tiers.errors import BrokerError, LogDivergedError, OffsetGapError, OwnershipLostError
from tiers.log.broker_log import BoundsBatch, BrokerLogSource
from tiers.log.log_sizes import LogSizes
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import AbortedTransaction, EpochEndOffset, LocalLogBounds, LogRead

PARTITION = TopicIdPartition(UUID(int=7), 0, "orders")
TIMEOUT_MS = 60_000
LOG = batch_of(10, 10) + batch_of(20, 10)
BOUNDS = LocalLogBounds(10, 30, 30, 3)


@dataclass
class Cluster:
    """Two brokers, each with the log. The first one leads the partition in epoch 3."""

    first: ScriptedBroker
    second: ScriptedBroker
    log: LocalLog
    client: BrokerClient
    source: BrokerLogSource

    def leads(self, node_id: int, epoch: int, topic_id: UUID = PARTITION.topic_id) -> None:
        for broker in (self.first, self.second):
            broker.topics = [TopicMetadata("orders", topic_id, {0: PartitionMetadata(0, node_id, epoch)})]

    def fails(self, code: int, times: int = 1) -> None:
        """So many Fetches of the first broker fail."""
        self.first.script(ApiKey.FETCH, fetch.with_error(code), times=times)

    def answers(self, times: int = 1, **fields: Any) -> None:
        """So many answers of the first broker have other fields."""

        def edit(response: Any) -> None:
            for name, value in fields.items():
                setattr(response.responses[0].partitions[0], name, value)

        self.first.script(ApiKey.FETCH, edit, times=times)

    async def read(self, offset: int = 10, timeout_ms: int = TIMEOUT_MS) -> LogRead:
        return await self.source.read(PARTITION, offset, 1000, timeout_ms)

    async def trim(self, offset: int = 20, epoch: int = 3, check: Callable[[], None] = lambda: None) -> int:
        return await self.source.delete_records(PARTITION, offset, epoch, TIMEOUT_MS, check)

    async def bounds(self) -> LocalLogBounds:
        return await self.source.bounds(PARTITION, TIMEOUT_MS)

    @property
    def is_trimmed(self) -> bool:
        return any(broker.received(DeleteRecordsRequest) for broker in (self.first, self.second))


async def failure_of(call: Awaitable[object]) -> BrokerError:
    with pytest.raises(BrokerError) as error:
        await call
    return error.value


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    log = LocalLog([batch_of(10, 10), batch_of(20, 10)], log_start_offset=10, leader_epoch=3)
    async with scripted_cluster(timeout_ms=TIMEOUT_MS) as ((first, second), client):
        first.logs = second.logs = {("orders", 0): log}
        cluster = Cluster(first, second, log, client, BrokerLogSource(client))
        cluster.leads(1, 3)
        yield cluster


async def test_a_read_is_what_the_leader_of_the_named_epoch_holds(cluster: Cluster) -> None:
    aborted = FetchResponse.FetchableTopicResponse.PartitionData.AbortedTransaction(producer_id=9, first_offset=12)
    cluster.answers(aborted_transactions=[aborted])
    read = await cluster.read()
    assert read.records == LOG
    assert (read.log_start_offset, read.last_stable_offset, read.high_watermark, read.leader_epoch) == (10, 30, 30, 3)
    assert read.aborted_transactions == (AbortedTransaction(9, 12),)
    asked = cluster.first.received(FetchRequest)[0]
    assert (asked.isolation_level, asked.session_id, asked.session_epoch) == (1, 0, -1)
    assert asked.topics[0].partitions[0].current_leader_epoch == 3


@pytest.mark.parametrize(
    ("lso", "records", "found"),
    [
        (25, LOG, batch_of(10, 10)),
        (30, LOG[:-1], batch_of(10, 10)),
        (30, LOG[:-1] + bytes([LOG[-1] ^ 1]), None),
        (30, batch_of(20, 10) + batch_of(10, 10), None),
        (30, batch_of(10, 10, leader_epoch=2) + batch_of(20, 10, leader_epoch=1), None),
    ],
    ids=["beyond the last stable offset", "torn", "a flipped bit", "offsets that fall", "epochs that fall"],
)
async def test_whole_batches_below_the_last_stable_offset_are_read(
    cluster: Cluster, lso: int, records: bytes, found: bytes | None
) -> None:
    cluster.answers(last_stable_offset=lso, records=records)
    if found is None:
        assert (await failure_of(cluster.read())).code == ErrorCode.CORRUPT_MESSAGE
    else:
        assert (await cluster.read()).records == found


@pytest.mark.parametrize(
    "code", [ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.FENCED_LEADER_EPOCH, ErrorCode.UNKNOWN_TOPIC_ID, None]
)
async def test_a_moved_leader_is_found_again(cluster: Cluster, code: int | None) -> None:
    await cluster.read()
    if code is None:
        await cluster.first.stop()
    else:
        cluster.fails(code, times=3)
    cluster.leads(2, 4)
    assert (await cluster.read()).leader_epoch == 4
    assert len(cluster.second.received(FetchRequest)) == 1


async def test_a_lasting_error_is_raised_at_the_deadline_and_a_refusal_at_once(cluster: Cluster) -> None:
    cluster.log.error_code = ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert (await failure_of(cluster.read(timeout_ms=200))).retriable
    cluster.log.error_code = ErrorCode.TOPIC_AUTHORIZATION_FAILED
    refused = await failure_of(cluster.read())
    assert (refused.code, refused.retriable) == (ErrorCode.TOPIC_AUTHORIZATION_FAILED, False)


async def test_a_leader_that_names_another_replica_to_read_from_is_an_error(cluster: Cluster) -> None:
    """As a replica selector of one's own may do. The answer looks like that of an empty log."""
    unknown = {"high_watermark": -1, "last_stable_offset": -1, "log_start_offset": -1, "records": b""}
    cluster.answers(times=3, preferred_read_replica=2, **unknown)
    for call in (cluster.bounds(), cluster.read(), cluster.trim()):
        assert "sends the owner to broker 2" in str(await failure_of(call))
    assert not cluster.is_trimmed


async def test_a_throttled_answer_is_asked_for_again(cluster: Cluster) -> None:
    cluster.first.script(ApiKey.FETCH, fetch.throttled)
    assert (await cluster.read()).records == LOG
    cluster.first.script(ApiKey.FETCH, fetch.throttled)
    assert await cluster.bounds() == BOUNDS


@pytest.mark.parametrize(("offset", "error"), [(9, OffsetGapError), (31, LogDivergedError)])
async def test_out_of_range_is_a_gap_below_and_a_divergence_above(
    cluster: Cluster, offset: int, error: type[Exception]
) -> None:
    with pytest.raises(error):
        await cluster.read(offset)


async def test_an_epochs_end_is_the_leaders_answer(cluster: Cluster) -> None:
    assert await cluster.source.end_offset_for_epoch(PARTITION, 3, TIMEOUT_MS) == EpochEndOffset(3, 30)
    asked = cluster.first.received(OffsetForLeaderEpochRequest)[0].topics[0].partitions[0]
    assert (asked.leader_epoch, asked.current_leader_epoch) == (3, 3)
    refused = ErrorCode.TOPIC_AUTHORIZATION_FAILED

    def with_error(response: Any) -> None:
        response.topics[0].partitions[0].error_code = refused

    cluster.first.script(ApiKey.OFFSET_FOR_LEADER_EPOCH, with_error)
    assert (await failure_of(cluster.source.end_offset_for_epoch(PARTITION, 3, TIMEOUT_MS))).code == refused
    cluster.first.script(ApiKey.OFFSET_FOR_LEADER_EPOCH, lambda response: response.topics.clear())
    assert await cluster.source.end_offset_for_epoch(PARTITION, 3, TIMEOUT_MS) == EpochEndOffset(3, 30)


async def test_a_trim_checks_topic_id_and_epoch_on_the_same_connection(cluster: Cluster) -> None:
    assert await cluster.trim(20) == 20
    asked = [type(request) for request in cluster.first.requests[-2:]]
    assert asked == [FetchRequest, DeleteRecordsRequest]
    check = cluster.first.received(FetchRequest)[-1].topics[0]
    assert (check.topic_id, check.partitions[0].current_leader_epoch) == (PARTITION.topic_id, 3)
    assert cluster.log.log_start_offset == 20
    assert await cluster.trim(5) == 20  # the log start is above it
    assert len(cluster.first.received(DeleteRecordsRequest)) == 1


async def test_a_trim_is_checked_again_after_its_connection_took_long_to_open(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker restarted after the check, and another topic has the name now."""
    now_ms, request = 1_000_000, cluster.client.request
    cluster.source = BrokerLogSource(cluster.client, clock_ms=lambda: now_ms, jitter=lambda: 0.0)

    async def after_the_connection_is_open_again(node_id: int, message: Any, *others: Any, **options: Any) -> Any:
        nonlocal now_ms
        if isinstance(message, DeleteRecordsRequest):
            now_ms += 2_001
            cluster.leads(1, 0, UUID(int=8))
            cluster.fails(ErrorCode.UNKNOWN_TOPIC_ID)
        return await request(node_id, message, *others, **options)

    monkeypatch.setattr(cluster.client, "request", after_the_connection_is_open_again)
    assert (await failure_of(cluster.trim())).code == ErrorCode.UNKNOWN_TOPIC_ID
    assert not cluster.is_trimmed


@pytest.mark.parametrize(
    ("stage", "epoch", "code"),
    [
        (lambda cluster: cluster.fails(ErrorCode.FENCED_LEADER_EPOCH), 3, ErrorCode.FENCED_LEADER_EPOCH),
        (lambda cluster: cluster.fails(ErrorCode.UNKNOWN_LEADER_EPOCH), 3, ErrorCode.UNKNOWN_LEADER_EPOCH),
        (lambda cluster: cluster.leads(2, 4), 3, ErrorCode.FENCED_LEADER_EPOCH),
        (lambda cluster: cluster.answers(last_stable_offset=20), 3, None),
        (lambda cluster: cluster.leads(1, 3, UUID(int=8)), 3, ErrorCode.UNKNOWN_TOPIC_ID),
    ],
    ids=["fenced", "unknown epoch", "a later leader", "above the last stable offset", "a recreated topic"],
)
async def test_nothing_is_trimmed_where_the_owner_does_not_think_it_is(
    cluster: Cluster, stage: Callable[[Cluster], None], epoch: int, code: int | None
) -> None:
    stage(cluster)
    failure = await failure_of(cluster.trim(21, epoch))
    assert (failure.code, failure.retriable, cluster.is_trimmed) == (code, False, False)


async def test_a_trim_that_is_repeated_asks_again_whether_the_partition_is_ours(cluster: Cluster) -> None:
    cluster.fails(ErrorCode.NOT_LEADER_OR_FOLLOWER)

    def lost_meanwhile() -> None:
        raise OwnershipLostError("a newer member")

    with pytest.raises(OwnershipLostError):
        await cluster.trim(check=lost_meanwhile)
    assert (len(cluster.first.received(FetchRequest)), cluster.is_trimmed) == (2, False)


async def test_bounds_are_one_question_without_records(cluster: Cluster) -> None:
    assert await cluster.bounds() == BOUNDS
    assert len(cluster.first.received(FetchRequest)) == 1
    assert cluster.first.received(ListOffsetsRequest) == []
    cluster.log.leader_epoch = -1  # the broker keeps no epochs
    assert await cluster.bounds() == BOUNDS


async def test_concurrent_questions_for_bounds_share_one_request(cluster: Cluster) -> None:
    await cluster.bounds()
    assert await asyncio.gather(*[cluster.bounds() for _ in range(3)]) == [BOUNDS] * 3
    assert len(cluster.first.received(FetchRequest)) == 2
    cluster.log.log_start_offset = 20
    assert (await cluster.bounds()).log_start_offset == 20


async def test_no_question_gets_the_answer_of_another_leader_epoch(cluster: Cluster) -> None:
    """A broker answers the last entry of a request for a partition, here that of epoch 4."""
    batch = BoundsBatch(cluster.client, "log")
    known = [Leader(cluster.first.node_id, epoch) for epoch in (3, 4)]
    old, new = await asyncio.gather(
        *(batch.ask(PARTITION, leader, TIMEOUT_MS) for leader in known), return_exceptions=True
    )
    assert isinstance(old, BrokerError)
    assert old.retriable
    assert isinstance(new, FetchedPartition)


async def test_a_caller_beside_a_cancelled_question_asks_again(cluster: Cluster) -> None:
    await cluster.bounds()
    first, second = (asyncio.create_task(cluster.bounds()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == BOUNDS


ORDERS, CLICKS = PARTITION.topic_id, UUID(int=8)
VALID_MS, LONGEST_VALID_MS = 5_000, 60_000


class Brokers:
    """Broker 1 leads orders-0 and clicks-0, broker 2 leads orders-1."""

    def __init__(self, brokers: list[ScriptedBroker], client: BrokerClient) -> None:
        self.brokers = brokers
        self.now_ms = 1_000
        self.source = BrokerLogSource(client, clock_ms=lambda: self.now_ms)
        for broker in brokers:
            broker.topics = [
                TopicMetadata("orders", ORDERS, {0: PartitionMetadata(0, 1, 3), 1: PartitionMetadata(1, 2, 3)}),
                TopicMetadata("clicks", CLICKS, {0: PartitionMetadata(0, 1, 3)}),
            ]
        self.set_sizes(500, 600, 700)

    def set_sizes(self, *sizes: int) -> None:
        for broker in self.brokers:
            names = ("orders", 0), ("orders", 1), ("clicks", 0)
            broker.logs = {name: LocalLog([bytes(size)]) for name, size in zip(names, sizes, strict=True)}

    async def ask(self, *partitions: tuple[UUID, int], timeout_ms: int = TIMEOUT_MS) -> list[int | None]:
        asked = [TopicIdPartition(topic_id, index, "") for topic_id, index in partitions]
        return list(await asyncio.gather(*(self.source.size_bytes(each, timeout_ms) for each in asked)))

    def asked(self) -> list[int]:
        """How often each broker was asked."""
        return [len(broker.received(DescribeLogDirsRequest)) for broker in self.brokers]


@pytest.fixture
async def brokers() -> AsyncIterator[Brokers]:
    async with scripted_cluster(timeout_ms=TIMEOUT_MS) as (brokers, client):
        yield Brokers(brokers, client)


async def test_one_request_asks_a_broker_for_all_its_logs(brokers: Brokers) -> None:
    all_logs = (ORDERS, 0), (ORDERS, 1), (CLICKS, 0)
    assert await brokers.ask(*all_logs) == [500, 600, 700]
    brokers.now_ms += VALID_MS - 1
    assert await brokers.ask(*all_logs) == [500, 600, 700]
    assert brokers.asked() == [1, 1]
    brokers.set_sizes(501, 601, 701)
    brokers.now_ms += 1
    assert await brokers.ask((CLICKS, 0)) == [701]
    assert await brokers.ask((ORDERS, 0)) == [501]
    assert brokers.asked() == [2, 1]


@pytest.mark.parametrize(("took_ms", "valid_ms"), [(1_000, 20_000), (10_000, LONGEST_VALID_MS)])
async def test_a_slow_answer_is_valid_for_longer(brokers: Brokers, took_ms: int, valid_ms: int) -> None:
    async def answers_late(request: Any) -> Any:
        brokers.now_ms += took_ms
        return log_dirs({("orders", 0): 9})

    brokers.brokers[0].answers[DescribeLogDirsRequest.API_KEY] = answers_late
    assert await brokers.ask((ORDERS, 0)) == [9]
    brokers.now_ms += valid_ms - 1
    assert await brokers.ask((ORDERS, 0)) == [9]
    assert brokers.asked() == [1, 0]
    brokers.now_ms += 1
    assert await brokers.ask((ORDERS, 0)) == [9]
    assert brokers.asked() == [2, 0]


@pytest.mark.parametrize(
    "answer",
    [
        log_dirs({("clicks", 0): 9}),
        log_dirs({("orders", 0): 9}, is_future=True),
        log_dirs({("orders", 0): 9}, ErrorCode.KAFKA_STORAGE_ERROR),
    ],
    ids=["not there", "moves there", "a folder that failed"],
)
async def test_a_log_without_a_size(brokers: Brokers, answer: Any) -> None:
    async def answered(request: Any) -> Any:
        return answer

    brokers.brokers[0].answers[DescribeLogDirsRequest.API_KEY] = answered
    assert await brokers.ask((ORDERS, 0)) == [None]


async def test_a_broker_that_does_not_answer_is_asked_again_soon(brokers: Brokers) -> None:
    async def second_only(request: Any) -> Any:
        if brokers.asked() == [1, 0]:
            await asyncio.Event().wait()
        return log_dirs({("orders", 0): 9})

    brokers.brokers[0].answers[DescribeLogDirsRequest.API_KEY] = second_only
    assert await brokers.ask((ORDERS, 0), timeout_ms=200) == [None]
    brokers.now_ms += VALID_MS
    assert await brokers.ask((ORDERS, 0)) == [9]


async def test_a_broker_that_fails_beside_a_good_one_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    class Client:
        async def request(self, node_id: int, *_: Any, **__: Any) -> Any:
            if node_id == 1:
                raise BrokerError("no connection", retriable=True)
            return log_dirs({("orders", 0): 9})

    caplog.set_level(logging.INFO, "tiers.log.log_sizes")
    clock = iter(range(0, 10_000_000, 1_000))
    sizes = LogSizes(cast(Any, Client()), lambda: next(clock))
    for _ in range(200):
        assert [await sizes.ask("orders", 0, node_id, TIMEOUT_MS) for node_id in (0, 1)] == [9, None]
    assert {each.levelname for each in caplog.records} == {"WARNING"}
    assert len(caplog.records) < 10


@pytest.mark.parametrize("version", [2, 4])
async def test_a_broker_that_refuses_is_a_warning_each_minute(
    brokers: Brokers, version: int, caplog: pytest.LogCaptureFixture
) -> None:
    first = brokers.brokers[0]
    first.versions[DescribeLogDirsRequest.API_KEY] = 0, version
    first.cluster_operations = ALL_CLUSTER_OPERATIONS - {8}  # DESCRIBE
    caplog.set_level(logging.INFO, "tiers.log.log_sizes")
    for _ in range(3):
        assert await brokers.ask((ORDERS, 0), (CLICKS, 0)) == [None, None]
        brokers.now_ms += LONGEST_VALID_MS
    brokers.now_ms -= 1
    assert await brokers.ask((ORDERS, 0)) == [None]
    assert brokers.asked() == [3, 0]
    first.cluster_operations = ALL_CLUSTER_OPERATIONS
    brokers.now_ms += 1
    assert await brokers.ask((ORDERS, 0)) == [500]
    assert [each.levelname for each in caplog.records] == ["WARNING", "WARNING", "WARNING", "INFO"]
