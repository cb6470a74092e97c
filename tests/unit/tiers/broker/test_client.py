from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from kafka.protocol.metadata import ApiVersionsRequest, MetadataRequest, MetadataResponse

from protocol.api_keys import ApiKey
from protocol.apis.metadata import PartitionMetadata
from protocol.errors import ErrorCode
from tests.support.fakes.broker import delivery
from tests.support.fakes.broker.scripted_broker import ScriptedBroker
from tests.support.tiers.waiting import until
from tiers.broker.client import BrokerClient, Leader
from tiers.broker.cluster_metadata import (
    SLICE_BYTES,
    TopicMetadata,
    read_cluster_metadata,
)
from tiers.broker.connection import BrokerConnection
from tiers.errors import BrokerError
from tiers.model.ids import TopicIdPartition

TOPIC_ID = UUID(int=7)
P0 = TopicIdPartition(TOPIC_ID, 0)
ORDERS = TopicMetadata("orders", TOPIC_ID, {0: PartitionMetadata(0, 1, 5), 1: PartitionMetadata(1, -1, 3, error=5)})
PAYMENTS = TopicMetadata("payments", UUID(int=9), {0: PartitionMetadata(0, 1, 5)})
ASK = MetadataRequest(topics=None)


def client_of(*brokers: ScriptedBroker, **settings: Any) -> BrokerClient:
    addresses = [("127.0.0.1", broker.port) for broker in brokers]
    return BrokerClient(addresses, client_id="test", request_timeout_ms=60_000, jitter=lambda: 0.0, **settings)


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as made:
        yield made


@pytest.fixture
async def broker(stack: AsyncExitStack) -> ScriptedBroker:
    return await stack.enter_async_context(ScriptedBroker())


@pytest.fixture
async def client(broker: ScriptedBroker, stack: AsyncExitStack) -> BrokerClient:
    client = client_of(broker, clock_ms=lambda: 1000)
    stack.push_async_callback(client.close)
    return client


@pytest.fixture
async def opened(client: BrokerClient) -> BrokerClient:
    await client.open()
    return client


def holding_metadata(broker: ScriptedBroker) -> tuple[asyncio.Event, asyncio.Event]:
    """The broker holds its next answer back: once it is asked, until it may go on."""
    answer, asked, go_on = broker.answers[MetadataRequest.API_KEY], asyncio.Event(), asyncio.Event()

    async def late(request: Any) -> Any:
        broker.answers[MetadataRequest.API_KEY] = answer
        asked.set()
        await go_on.wait()
        return await answer(request)

    broker.answers[MetadataRequest.API_KEY] = late
    return asked, go_on


async def never(request: object) -> None:
    await asyncio.Event().wait()


async def dies(request: object) -> None:
    raise ConnectionResetError


async def failure_of(call: Any) -> BrokerError:
    with pytest.raises(BrokerError) as error:
        await call
    return error.value


def topics_asked_for(broker: ScriptedBroker) -> list[set[UUID]]:
    return [{topic.topic_id for topic in one.topics} for one in broker.received(MetadataRequest)]


@pytest.mark.parametrize("answered", [False, True])
async def test_a_broker_that_answers_no_request_may_ask_for_sasl(
    broker: ScriptedBroker, client: BrokerClient, answered: bool
) -> None:
    """A listener with SASL answers ApiVersions to everybody, and ends the connection at the next request."""
    if answered:
        await client.metadata()
    broker.script(ApiKey.METADATA, deliver=delivery.closed_after(0), times=100)
    said = str(await failure_of(client.request(None, ASK, 1000)))
    assert "closed by the broker" in said
    assert ("if the listener asks for SASL, set [upstream.sasl]" in said) is not answered


async def test_callers_share_the_refresh_that_begins_after_they_asked(
    broker: ScriptedBroker, client: BrokerClient
) -> None:
    first, *others = await asyncio.gather(*(client.brokers(0) for _ in range(5)))
    known = await client.brokers(1)
    assert all(answer is known for answer in others)
    assert first is not known
    assert len(broker.received(MetadataRequest)) == 2


async def test_a_leader_is_asked_for_by_the_id_of_its_topic(broker: ScriptedBroker, opened: BrokerClient) -> None:
    broker.topics = [ORDERS, PAYMENTS]
    for _ in range(2):
        assert await opened.leader_of(P0) == Leader(1, 5)
    assert topics_asked_for(broker) == [set(), {TOPIC_ID}]
    assert (await opened.metadata()).topics == {"orders": ORDERS, "payments": PAYMENTS}
    no_leader = await failure_of(opened.leader_of(TopicIdPartition(TOPIC_ID, 1)))
    assert (no_leader.code, no_leader.retriable) == (ErrorCode.LEADER_NOT_AVAILABLE, True)
    anew = TopicIdPartition(UUID(int=8), 0, "orders")
    assert (await failure_of(opened.leader_of(anew))).code == ErrorCode.UNKNOWN_TOPIC_ID
    for topics, asked, known in (
        ([PAYMENTS, replace(ORDERS, topic_id=anew.topic_id)], anew, {8, 9}),
        ([ORDERS, PAYMENTS], P0, {7, 9}),
        ([ORDERS], TopicIdPartition(PAYMENTS.topic_id, 0), {7}),
    ):
        broker.topics = topics
        with suppress(BrokerError):
            await opened.leader_of(asked, max_age_ms=0)
        assert opened.cached_metadata is not None
        assert {each.int for each in opened.cached_metadata.topics_by_id} == known
        assert {each.topic_id.int for each in opened.cached_metadata.topics.values()} == known


async def test_a_request_is_checked_when_its_connection_is_usable(broker: ScriptedBroker, opened: BrokerClient) -> None:
    """A lane that is used for the first time opens a connection, which takes any time."""
    opened_before_check: list[int] = []

    def refuse() -> None:
        opened_before_check.append(len(broker.received(ApiVersionsRequest)))
        raise BrokerError("the partition was given to another member")

    with pytest.raises(BrokerError, match="another member"):
        await opened.request(1, MetadataRequest(topics=[]), lane="trims", before_sending=refuse)
    assert opened_before_check == [2]
    assert len(broker.received(MetadataRequest)) == 1


async def test_a_topic_that_only_one_broker_has_heard_of_is_there(
    monkeypatch: pytest.MonkeyPatch, stack: AsyncExitStack
) -> None:
    monkeypatch.setattr("tiers.broker.metadata_reads._OTHER_BROKER_MS", 60_000)
    brokers = [await stack.enter_async_context(ScriptedBroker(number)) for number in (1, 2, 3)]
    behind, knowing, gone = brokers
    behind.brokers = knowing.brokers = brokers
    knowing.topics = [ORDERS]
    gone.answers[MetadataRequest.API_KEY] = dies
    client = client_of(behind)
    stack.push_async_callback(client.close)
    for with_others in (True, False):
        assert (await client.topic_named("orders", with_others=with_others)).topics == {"orders": ORDERS}
        assert (await client.topic_named("payments", with_others=with_others)).topics == {}


async def test_leaders_that_are_wanted_together_share_a_request(broker: ScriptedBroker, opened: BrokerClient) -> None:
    broker.topics = [ORDERS]
    asked, go_on = holding_metadata(broker)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(opened.leader_of(P0, max_age_ms=0))
        await asked.wait()
        gone = [TopicIdPartition(PAYMENTS.topic_id, number) for number in range(5)]
        others = [tasks.create_task(failure_of(opened.leader_of(each, max_age_ms=0))) for each in gone]
        tasks.create_task(opened.leader_of(P0, max_age_ms=0))
        await asyncio.sleep(0)
        go_on.set()
    assert all("there is no partition" in str(other.result()) for other in others)
    _, alone, together, *rest = topics_asked_for(broker)
    assert (alone, together, rest) == ({TOPIC_ID}, {TOPIC_ID, PAYMENTS.topic_id}, [])


async def test_topics_are_asked_for_in_batches(broker: ScriptedBroker, client: BrokerClient) -> None:
    broker.topics = [TopicMetadata(f"t{number}", UUID(int=100 + number), {}) for number in range(700)]
    by_name = await client.named([topic.name for topic in broker.topics])
    by_id = await client.named((), [topic.topic_id for topic in broker.topics])
    nobody = await client.named(["gone"], [UUID(int=1)])
    assert len(by_name.topics) == len(by_id.topics_by_id) == 700
    assert (nobody.topics, nobody.topics_by_id) == ({}, {})
    assert [len(one.topics) for one in broker.received(MetadataRequest)] == [500, 200, 500, 200, 1, 1]


async def test_a_broker_that_died_a_moment_ago_is_not_asked_alone(stack: AsyncExitStack) -> None:
    gone, there = [await stack.enter_async_context(ScriptedBroker(number)) for number in (1, 2)]
    gone.brokers = there.brokers = [gone, there]
    client = client_of(there)
    stack.push_async_callback(client.close)
    await client.open()
    gone.answers[MetadataRequest.API_KEY] = there.answers[MetadataRequest.API_KEY] = dies
    asked: list[int] = []

    async def ask(node_id: int, timeout_ms: int) -> int:
        asked.append(node_id)
        if node_id == 1:
            await client.request(node_id, MetadataRequest(topics=[]), timeout_ms)
        return node_id

    assert await client.of_any_broker(ask) == 2
    assert asked == [1, 2]
    await failure_of(
        client.of_any_broker(lambda _, timeout_ms: client.request(2, MetadataRequest(topics=[]), timeout_ms))
    )


async def test_versions_are_negotiated_with_each_connection(broker: ScriptedBroker, client: BrokerClient) -> None:
    broker.versions |= {ApiVersionsRequest.API_KEY: (0, 2), MetadataRequest.API_KEY: (0, 9)}
    broker.script(ApiKey.API_VERSIONS, deliver=delivery.truncated(10))
    assert "ApiVersions cannot be read" in str(await failure_of(client.open()))
    error = await failure_of(client.open())
    assert (error.code, error.retriable) == (ErrorCode.UNSUPPORTED_VERSION, False)
    assert [request.version for request in broker.received(ApiVersionsRequest)] == [2, 2]


async def test_a_lost_connection_fails_its_requests_and_is_opened_again(
    broker: ScriptedBroker, opened: BrokerClient
) -> None:
    asked, _ = holding_metadata(broker)
    async with asyncio.TaskGroup() as tasks:
        pending = [tasks.create_task(failure_of(opened.request(1, ASK))) for _ in range(3)]
        await asked.wait()
        broker.drop_connections()
    assert [error.result().retriable for error in pending] == [True] * 3
    assert (await opened.request(1, ASK)).cluster_id == "cluster"
    assert broker.connections == 2
    broker.correlation_skew = 1
    error = await failure_of(opened.request(1, ASK))
    assert (error.retriable, "out of order" in str(error)) == (True, True)


async def test_the_late_answer_to_an_abandoned_request_is_dropped_in_order(
    broker: ScriptedBroker, opened: BrokerClient
) -> None:
    asked, go_on = holding_metadata(broker)
    async with asyncio.TaskGroup() as tasks:
        abandoned = tasks.create_task(opened.request(1, ASK))
        await asked.wait()
        second = tasks.create_task(opened.request(1, ASK, max_version=10))
        abandoned.cancel()
        go_on.set()
    assert second.result().cluster_id == "cluster"
    assert broker.connections == 1
    broker.answers[MetadataRequest.API_KEY] = never
    assert (await failure_of(opened.request(1, ASK, 20))).retriable


async def test_any_broker_will_do_when_the_first_is_down(stack: AsyncExitStack) -> None:
    down, up = [await stack.enter_async_context(ScriptedBroker(number)) for number in (1, 2)]
    await down.stop()
    for brokers in ((down, up), (down,)):
        client = client_of(*brokers)
        stack.push_async_callback(client.close)
        if up in brokers:
            assert (await client.metadata()).controller_id == 2
        else:
            assert (await failure_of(client.open())).retriable


def led_by(node_id: int, epoch: int, topic_id: UUID = TOPIC_ID) -> TopicMetadata:
    return TopicMetadata("orders", topic_id, {0: PartitionMetadata(0, node_id, epoch)})


async def test_a_lagging_broker_takes_no_partition_back_to_an_older_leader(
    broker: ScriptedBroker, client: BrokerClient
) -> None:
    anew, behind = UUID(int=8), UUID(int=6)
    for said, partition, leader in (
        (led_by(2, 6), P0, (2, 6)),
        (led_by(1, 5), P0, (2, 6)),
        (led_by(1, 7), P0, (1, 7)),
        (led_by(2, 3, behind), TopicIdPartition(behind, 0), (2, 3)),  # the name before the topic was made again
        (led_by(2, 6), P0, (1, 7)),
        (led_by(2, 0, anew), TopicIdPartition(anew, 0), (2, 0)),
    ):
        broker.topics = [said]
        assert await client.leader_of(partition, max_age_ms=0) == leader


async def test_a_topic_that_one_broker_lacks_keeps_its_leader_epoch(
    broker: ScriptedBroker, client: BrokerClient
) -> None:
    broker.topics = [led_by(2, 6)]
    assert await client.leader_of(P0) == (2, 6)
    for read in (lambda: client.leader_of(P0, max_age_ms=0), lambda: client.metadata()):
        broker.topics = []
        with suppress(BrokerError):
            await read()
        assert client.cached_metadata is not None
        assert client.cached_metadata.partition(P0) is None
        broker.topics = [led_by(1, 5)]
        assert await client.leader_of(P0, max_age_ms=0) == (2, 6)


async def test_another_cluster_at_the_same_address_is_refused(broker: ScriptedBroker, opened: BrokerClient) -> None:
    broker.cluster_id = "another"
    assert not (await failure_of(opened.metadata())).retriable
    assert opened.cached_metadata is not None
    assert opened.cached_metadata.cluster_id == "cluster"


@pytest.mark.parametrize("is_closed", [False, True])
async def test_the_next_request_shows_changed_certificates(
    broker: ScriptedBroker, stack: AsyncExitStack, is_closed: bool
) -> None:
    """The request in progress on the old connection is answered, or ends with the client."""
    certificates = [ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)]
    current: Any = SimpleNamespace(current=lambda: certificates[-1])
    shown: list[ssl.SSLContext] = []
    made: list[BrokerConnection] = []

    async def in_plain_text(*address: Any, ssl_context: ssl.SSLContext, **settings: Any) -> BrokerConnection:
        made.append(await BrokerConnection.connect(*address, ssl_context=None, **settings))
        shown.append(ssl_context)
        return made[-1]

    client = client_of(broker, tls=current, connect=in_plain_text)
    stack.push_async_callback(client.close)
    await client.open()
    asked, go_on = holding_metadata(broker)
    under_way = asyncio.create_task(client.request(1, ASK))
    await asked.wait()
    certificates.append(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    for _ in range(2):
        await client.request(1, ASK)
    assert shown == certificates
    assert not under_way.done()
    if is_closed:
        await client.close()
        assert "the client closed the connection" in str(await failure_of(under_way))
        assert all(connection.is_closed for connection in made)
    go_on.set()
    if not is_closed:
        assert (await under_way).cluster_id == "cluster"
        await until(lambda: made[0].is_closed)
        assert not made[1].is_closed


async def test_a_large_answer_gives_way_after_each_slice() -> None:
    described = MetadataResponse.MetadataResponseTopic
    partitions = [
        described.MetadataResponsePartition(
            error_code=0,
            partition_index=index,
            leader_id=1,
            leader_epoch=1,
            replica_nodes=[1, 2, 3],
            isr_nodes=[1, 2],
            offline_replicas=[],
        )
        for index in range(4_000)
    ]
    topic = described(error_code=0, name="orders", topic_id=TOPIC_ID, is_internal=False, partitions=partitions)
    response = MetadataResponse(throttle_time_ms=0, brokers=[], cluster_id="c", controller_id=1, topics=[topic])
    body = bytes(response.encode(version=12))
    turns = 0

    async def other_work() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    other = asyncio.create_task(other_work())
    await read_cluster_metadata(body, 12, 0, lambda topic_id: None)
    other.cancel()
    assert turns >= len(body) // (SLICE_BYTES + 100) - 1  # the first slice ends before the other task begins
