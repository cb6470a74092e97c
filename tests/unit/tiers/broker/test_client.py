from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
from kafka.protocol.metadata import ApiVersionsRequest, MetadataRequest

from protocol.api_keys import ApiKey
from protocol.apis.metadata import PartitionMetadata
from protocol.errors import ErrorCode
from tests.support.fakes.broker import delivery
from tests.support.fakes.broker.scripted_broker import ScriptedBroker
from tiers.broker.client import BrokerClient, Leader
from tiers.broker.cluster_metadata import TopicMetadata
from tiers.broker.connection import BrokerConnection
from tiers.errors import BrokerError
from tiers.model.ids import TopicIdPartition

TOPIC_ID = UUID(int=7)
ORDERS = TopicMetadata(
    "orders",
    TOPIC_ID,
    {0: PartitionMetadata(0, 1, 5), 1: PartitionMetadata(1, -1, 3, error=5)},
)

PAYMENTS = TopicMetadata("payments", UUID(int=9), {0: PartitionMetadata(0, 1, 5)})


def client_of(*brokers: ScriptedBroker, **settings: Any) -> BrokerClient:
    addresses = [("127.0.0.1", broker.port) for broker in brokers]
    return BrokerClient(addresses, client_id="test", request_timeout_ms=60_000, jitter=lambda: 0.0, **settings)


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


async def test_metadata_is_read_as_the_broker_says() -> None:
    async with ScriptedBroker() as broker:
        broker.topics = [ORDERS]
        client = client_of(broker)
        await client.open()
        metadata = await client.metadata()
        await client.close()
    assert metadata.cluster_id == "cluster"
    assert metadata.brokers[1].port == broker.port
    assert metadata.topics == {"orders": ORDERS}
    assert metadata.partition(TopicIdPartition(TOPIC_ID, 0)) == ORDERS.partitions[0]
    assert metadata.partition(TopicIdPartition(UUID(int=8), 0, "orders")) is None


@pytest.mark.parametrize("answered", [False, True])
async def test_a_broker_that_answers_no_request_may_ask_for_sasl(answered: bool) -> None:
    """A listener with SASL answers ApiVersions to everybody, and ends the connection at the next request."""
    async with ScriptedBroker() as broker:
        client = BrokerClient([("127.0.0.1", broker.port)], client_id="test", request_timeout_ms=30_000)
        if answered:
            await client.metadata()
        broker.script(ApiKey.METADATA, deliver=delivery.closed_after(0), times=100)
        with pytest.raises(BrokerError) as raised:
            await client.request(None, MetadataRequest(topics=None), 1000)
        await client.close()
    assert "closed by the broker" in str(raised.value)
    assert ("if the listener asks for SASL, set [upstream.sasl]" in str(raised.value)) is not answered


async def test_callers_share_the_refresh_that_begins_after_they_asked() -> None:
    async with ScriptedBroker() as broker:
        client = client_of(broker, clock_ms=lambda: 1000)
        first, *others = await asyncio.gather(*(client.metadata(0) for _ in range(5)))
        known = await client.metadata(1)
        await client.close()
    assert all(answer is known for answer in others)
    assert first is not known
    assert len(broker.received(MetadataRequest)) == 2


async def test_leader_is_found_by_topic_id() -> None:
    async with ScriptedBroker() as broker:
        broker.topics = [ORDERS]
        client = client_of(broker)
        assert await client.leader_of(TopicIdPartition(TOPIC_ID, 0)) == (1, 5)
        with pytest.raises(BrokerError) as no_leader:
            await client.leader_of(TopicIdPartition(TOPIC_ID, 1))
        with pytest.raises(BrokerError) as recreated:
            await client.leader_of(TopicIdPartition(UUID(int=8), 0, "orders"))
        await client.close()
    assert (no_leader.value.code, no_leader.value.retriable) == (ErrorCode.LEADER_NOT_AVAILABLE, True)
    assert recreated.value.code == ErrorCode.UNKNOWN_TOPIC_ID


async def test_a_request_is_checked_when_its_connection_is_usable() -> None:
    """A lane that is used for the first time opens a connection, which takes any time."""
    opened_before_check: list[int] = []
    async with ScriptedBroker() as broker:
        client = client_of(broker)
        await client.metadata()

        def refuse() -> None:
            opened_before_check.append(len(broker.received(ApiVersionsRequest)))
            raise BrokerError("the partition was given to another member")

        with pytest.raises(BrokerError, match="another member"):
            await client.request(1, MetadataRequest(topics=[]), lane="trims", before_sending=refuse)
        await client.close()
    assert opened_before_check == [2]
    assert len(broker.received(MetadataRequest)) == 1


async def test_a_topic_that_is_newer_than_the_metadata_is_found() -> None:
    partition, added = TopicIdPartition(TOPIC_ID, 0), TopicIdPartition(TOPIC_ID, 2)
    async with ScriptedBroker() as broker:
        client = client_of(broker)
        await client.open()
        broker.topics = [ORDERS]
        assert await client.leader_of(partition) == (1, 5)
        broker.topics = [replace(ORDERS, partitions={**ORDERS.partitions, 2: PartitionMetadata(2, 2, 0)})]
        assert await client.leader_of(added) == (2, 0)
        assert await client.leader_of(partition) == (1, 5)
        await client.close()
    assert len(broker.received(MetadataRequest)) == 3


async def test_a_topic_that_only_one_broker_has_heard_of_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiers.broker.metadata_reads._OTHER_BROKER_MS", 60_000)
    async with ScriptedBroker(1) as behind, ScriptedBroker(2) as knowing, ScriptedBroker(3) as gone:
        behind.brokers = knowing.brokers = [behind, knowing, gone]
        knowing.topics = [ORDERS]
        gone.answers[MetadataRequest.API_KEY] = dies
        client = client_of(behind)
        assert (await client.metadata_naming("orders")).topics == {"orders": ORDERS}
        assert (await client.metadata_naming("payments")).topics == {}
        assert (await client.topic_named("orders")).topics == {"orders": ORDERS}
        assert (await client.topic_named("payments")).topics == {}
        await client.close()


async def test_a_leader_is_asked_for_by_the_id_of_its_topic() -> None:
    async with ScriptedBroker() as broker:
        broker.topics = [ORDERS, PAYMENTS]
        client = client_of(broker)
        await client.open()
        leader = await client.leader_of(TopicIdPartition(TOPIC_ID, 0, "orders"))
        again = await client.leader_of(TopicIdPartition(TOPIC_ID, 0, "orders"))
        await client.close()
    assert leader == again == Leader(1, 5)
    assert [[topic.topic_id for topic in one.topics] for one in broker.received(MetadataRequest)] == [[], [TOPIC_ID]]


async def test_leaders_that_are_wanted_together_share_a_request() -> None:
    async with ScriptedBroker() as broker:
        broker.topics = [ORDERS, PAYMENTS]
        client = client_of(broker)
        await client.open()
        asked, go_on = holding_metadata(broker)
        first = asyncio.create_task(client.leader_of(TopicIdPartition(TOPIC_ID, 0), max_age_ms=0))
        await asked.wait()
        others = [
            asyncio.create_task(client.leader_of(TopicIdPartition(topic.topic_id, 0), max_age_ms=0))
            for topic in (ORDERS, PAYMENTS, PAYMENTS)
        ]
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.gather(first, *others)
        await client.close()
    _, alone, together, *rest = [{topic.topic_id for topic in one.topics} for one in broker.received(MetadataRequest)]
    assert (alone, together) == ({TOPIC_ID}, {TOPIC_ID, PAYMENTS.topic_id})
    assert len(rest) <= 1


async def test_callers_share_the_answer_that_a_topic_is_missing() -> None:
    async with ScriptedBroker() as broker:
        broker.topics = [ORDERS]
        client = client_of(broker)
        await client.open()
        asked, go_on = holding_metadata(broker)
        first = asyncio.create_task(client.leader_of(TopicIdPartition(TOPIC_ID, 0), max_age_ms=0))
        await asked.wait()
        gone = [TopicIdPartition(PAYMENTS.topic_id, number) for number in range(5)]
        others = [asyncio.create_task(client.leader_of(each, max_age_ms=0)) for each in gone]
        await asyncio.sleep(0)
        go_on.set()
        await first
        for other in others:
            with pytest.raises(BrokerError, match="there is no partition"):
                await other
        await client.close()
    requests = [{topic.topic_id for topic in one.topics} for one in broker.received(MetadataRequest)]
    assert requests == [set(), {TOPIC_ID}, {PAYMENTS.topic_id}]


async def test_topics_are_asked_for_in_batches() -> None:
    async with ScriptedBroker() as broker:
        broker.topics = [TopicMetadata(f"t{number}", UUID(int=100 + number), {}) for number in range(700)]
        client = client_of(broker)
        by_name = await client.named([topic.name for topic in broker.topics])
        by_id = await client.named((), [topic.topic_id for topic in broker.topics])
        nobody = await client.named(["gone"], [UUID(int=1)])
        await client.close()
    assert len(by_name.topics) == len(by_id.topics_by_id) == 700
    assert (nobody.topics, nobody.topics_by_id) == ({}, {})
    assert [len(one.topics) for one in broker.received(MetadataRequest)] == [500, 200, 500, 200, 1, 1]


async def test_a_broker_that_died_a_moment_ago_is_not_asked_alone() -> None:
    async with ScriptedBroker(1) as gone, ScriptedBroker(2) as there:
        gone.brokers = there.brokers = [gone, there]
        client = client_of(there)
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
        with pytest.raises(BrokerError):
            await client.of_any_broker(lambda _, timeout_ms: client.request(2, MetadataRequest(topics=[]), timeout_ms))
        await client.close()


async def dies(request: object) -> None:
    raise ConnectionResetError


async def test_an_old_broker_is_asked_again_in_the_version_it_knows() -> None:
    async with ScriptedBroker() as broker:
        broker.versions[ApiVersionsRequest.API_KEY] = (0, 2)
        client = client_of(broker)
        await client.open()
        await client.close()
    assert [request.version for request in broker.received(ApiVersionsRequest)] == [2]


async def test_unreadable_versions_are_an_error_of_the_broker() -> None:
    async with ScriptedBroker() as broker:
        broker.script(ApiKey.API_VERSIONS, deliver=delivery.truncated(10))
        client = client_of(broker)
        assert "ApiVersions cannot be read" in str(await failure_of(client.open()))
        await client.open()
        await client.close()
    assert broker.connections == 2


async def test_a_version_that_the_broker_lacks_is_an_error_for_good() -> None:
    async with ScriptedBroker() as broker:
        broker.versions[MetadataRequest.API_KEY] = (0, 9)
        client = client_of(broker)
        with pytest.raises(BrokerError) as error:
            await client.open()
        await client.close()
    assert (error.value.code, error.value.retriable) == (ErrorCode.UNSUPPORTED_VERSION, False)


async def test_a_lost_connection_fails_its_requests_and_is_opened_again() -> None:
    async with ScriptedBroker() as broker:
        client = client_of(broker)
        await client.open()
        answer, asked = broker.answers[MetadataRequest.API_KEY], asyncio.Event()

        async def never(request: Any) -> Any:
            asked.set()
            await asyncio.Event().wait()

        broker.answers[MetadataRequest.API_KEY] = never
        async with asyncio.TaskGroup() as tasks:
            pending = [tasks.create_task(failure_of(client.request(1, MetadataRequest(topics=None)))) for _ in range(3)]
            await asked.wait()
            broker.drop_connections()
        assert [(await error).retriable for error in pending] == [True] * 3

        broker.answers[MetadataRequest.API_KEY] = answer
        response = await client.request(1, MetadataRequest(topics=None))
        await client.close()
    assert response.cluster_id == "cluster"
    assert broker.connections == 2


async def test_the_late_answer_to_an_abandoned_request_is_dropped_in_order() -> None:
    async with ScriptedBroker() as broker:
        client = client_of(broker)
        await client.open()
        asked, go_on = holding_metadata(broker)
        async with asyncio.TaskGroup() as tasks:
            abandoned = tasks.create_task(client.request(1, MetadataRequest(topics=None)))
            await asked.wait()
            second = tasks.create_task(client.request(1, MetadataRequest(topics=None), max_version=10))
            abandoned.cancel()
            go_on.set()
        assert (await second).cluster_id == "cluster"
        await client.close()
    assert broker.connections == 1


async def test_a_silent_broker_is_given_up_at_the_deadline() -> None:
    async with ScriptedBroker() as broker:
        client = client_of(broker)
        await client.open()

        async def never(request: Any) -> Any:
            await asyncio.Event().wait()

        broker.answers[MetadataRequest.API_KEY] = never
        error = await failure_of(client.request(1, MetadataRequest(topics=None), 20))
        await client.close()
    assert error.retriable


async def test_a_long_poll_has_a_lane_of_its_own() -> None:
    async with ScriptedBroker() as broker:
        client = client_of(broker)
        await client.open()
        asked, go_on = holding_metadata(broker)
        async with asyncio.TaskGroup() as tasks:
            poll = tasks.create_task(client.request(1, MetadataRequest(topics=None), lane="poll"))
            await asked.wait()
            await client.request(1, MetadataRequest(topics=None))
            assert not poll.done()
            go_on.set()
        await client.close()
    assert broker.connections == 2


async def test_any_broker_will_do_when_the_first_is_down() -> None:
    async with ScriptedBroker(1) as down, ScriptedBroker(2) as up:
        await down.stop()
        client = client_of(down, up)
        await client.open()
        metadata = await client.metadata()
        await client.close()
    assert metadata.controller_id == 2


async def test_no_broker_at_all_is_retriable() -> None:
    async with ScriptedBroker() as down:
        await down.stop()
        client = client_of(down)
        assert (await failure_of(client.open())).retriable
        await client.close()


async def test_bytes_that_are_no_response_end_the_connection() -> None:
    async with ScriptedBroker() as broker:
        client = client_of(broker)
        await client.open()
        broker.correlation_skew = 1
        error = await failure_of(client.request(1, MetadataRequest(topics=None)))
        await client.close()
    assert error.retriable
    assert "out of order" in str(error)


def led_by(node_id: int, epoch: int, topic_id: UUID = TOPIC_ID) -> TopicMetadata:
    return TopicMetadata("orders", topic_id, {0: PartitionMetadata(0, node_id, epoch)})


async def test_a_lagging_broker_takes_no_partition_back_to_an_older_leader() -> None:
    partition = TopicIdPartition(TOPIC_ID, 0)
    async with ScriptedBroker() as broker:
        client = client_of(broker)
        broker.topics = [led_by(2, 6)]
        assert await client.leader_of(partition) == (2, 6)
        broker.topics = [led_by(1, 5)]
        assert await client.leader_of(partition, max_age_ms=0) == (2, 6)
        broker.topics = [led_by(1, 7)]
        assert await client.leader_of(partition, max_age_ms=0) == (1, 7)
        broker.topics = [led_by(2, 0, UUID(int=8))]
        assert await client.leader_of(TopicIdPartition(UUID(int=8), 0), max_age_ms=0) == (2, 0)
        await client.close()


async def test_a_topic_that_one_broker_lacks_keeps_its_leader_epoch() -> None:
    partition = TopicIdPartition(TOPIC_ID, 0)
    async with ScriptedBroker() as broker:
        client = client_of(broker)
        broker.topics = [led_by(2, 6)]
        assert await client.leader_of(partition) == (2, 6)
        for read in (lambda: client.leader_of(partition, max_age_ms=0), lambda: client.metadata(0)):
            broker.topics = []
            with suppress(BrokerError):
                await read()
            assert client.cached_metadata is not None
            assert client.cached_metadata.partition(partition) is None
            broker.topics = [led_by(1, 5)]
            assert await client.leader_of(partition, max_age_ms=0) == (2, 6)
        await client.close()


async def test_a_topic_whose_name_an_older_topic_takes_keeps_its_leader_epoch() -> None:
    """A broker that lags behind names the topic before it was made again."""

    old, new = (TopicIdPartition(UUID(int=number), 0) for number in (7, 8))
    async with ScriptedBroker() as broker:
        client = client_of(broker)
        broker.topics = [led_by(2, 6, new.topic_id)]
        assert await client.leader_of(new) == (2, 6)
        broker.topics = [led_by(1, 3, old.topic_id)]
        assert await client.leader_of(old, max_age_ms=0) == (1, 3)
        broker.topics = [led_by(1, 5, new.topic_id)]
        assert await client.leader_of(new, max_age_ms=0) == (2, 6)
        await client.close()


async def test_another_cluster_at_the_same_address_is_refused() -> None:
    async with ScriptedBroker() as broker:
        client = client_of(broker)
        await client.open()
        broker.cluster_id = "another"
        error = await failure_of(client.metadata(0))
        await client.close()
    assert not error.retriable
    assert client.cached_metadata is not None
    assert client.cached_metadata.cluster_id == "cluster"


async def failure_of(call: Any) -> BrokerError:
    with pytest.raises(BrokerError) as error:
        await call
    return error.value


class Certificates:
    """Returns the certificate that the broker sees, which also takes plain connections."""

    def __init__(self) -> None:
        self.replace()

    def replace(self) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

    def current(self) -> ssl.SSLContext:
        return self._context


class PlainTextConnections:
    """Opens connections in plain text, and keeps the certificate that each of them would have shown."""

    def __init__(self) -> None:
        self.opened: list[tuple[ssl.SSLContext, BrokerConnection]] = []

    async def connect(self, *address: Any, ssl_context: ssl.SSLContext, **settings: Any) -> BrokerConnection:
        connection = await BrokerConnection.connect(*address, ssl_context=None, **settings)
        self.opened.append((ssl_context, connection))
        return connection


async def test_the_next_request_shows_changed_certificates() -> None:
    """The request that is in progress on the old connection is still answered."""
    certificates: Any = Certificates()
    connections = PlainTextConnections()
    made = connections.opened
    async with ScriptedBroker() as broker:
        client = client_of(broker, tls=certificates, connect=connections.connect)
        await client.open()
        asked, go_on = holding_metadata(broker)
        under_way = asyncio.create_task(client.request(1, MetadataRequest(topics=None)))
        await asked.wait()
        before = certificates.current()
        certificates.replace()
        for _ in range(2):
            await client.request(1, MetadataRequest(topics=None))
        assert [shown for shown, _ in made] == [before, certificates.current()]
        assert not under_way.done()
        go_on.set()
        assert (await under_way).cluster_id == "cluster"
        async with asyncio.timeout(60):
            while not made[0][1].is_closed:  # noqa: ASYNC110  # no event says so
                await asyncio.sleep(0.001)
        assert not made[1][1].is_closed
        await client.close()


async def test_a_request_on_a_retired_connection_ends_with_the_client() -> None:
    certificates: Any = Certificates()
    connections = PlainTextConnections()
    made = connections.opened
    async with ScriptedBroker() as broker:
        client = client_of(broker, tls=certificates, connect=connections.connect)
        await client.open()
        asked, go_on = holding_metadata(broker)
        under_way = asyncio.create_task(failure_of(client.request(1, MetadataRequest(topics=None))))
        await asked.wait()
        certificates.replace()
        await client.request(1, MetadataRequest(topics=None))
        await client.close()
        assert "the client closed the connection" in str(await under_way)
        assert [connection.is_closed for _, connection in made] == [True, True]
        go_on.set()
