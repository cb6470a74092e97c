"""Fetch sessions (KIP-227) through the proxy: the broker's own while all partitions are local, otherwise none."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from uuid import UUID

import kafka as kafka_python
import pytest

from protocol.apis.fetch.response import FetchResponse
from protocol.errors import ErrorCode
from tests.support.fakes.broker.fetch_frames import Ask
from tests.support.marks import full
from tests.support.rigs.raw_client import Forwarded, RawClient, raw_client
from tests.support.rigs.two_tiers_rig import PATTERN, TwoTiers, two_tiers
from tests.support.servers.kafka import CONSOLE_CONSUMER, SHORT_LIVED, SHRINKS_SOON, KafkaCluster
from tests.support.servers.producing import create_topic, delete_topic, produce, random_values

pytestmark = pytest.mark.integration

VERSION = 17
WAIT_MS = 300


@pytest.fixture
def wide(kafka: KafkaCluster, topic_name: str) -> Iterator[str]:
    """Yields the name of an untiered topic. Deletes the topic afterwards."""
    name = f"wide-{topic_name}"
    yield name
    delete_topic(kafka.bootstrap_servers, name)


async def create(tiers: TwoTiers, topic: str, partitions: int = 1) -> UUID:
    """Creates a topic. Returns when the broker leads all partitions."""
    await asyncio.to_thread(partial(create_topic, tiers.kafka.bootstrap_servers, topic, partitions=partitions))
    async with asyncio.timeout(120), raw_client(tiers.kafka.bootstrap_servers) as direct:
        while True:
            known = (await tiers.client.metadata()).topics.get(topic)
            if known is not None and len(known.partitions) == partitions:
                asked = asks(known.topic_id, [0] * partitions)
                response = await direct.fetch(VERSION, asked, max_wait_ms=0)
                if not any(one.error_code for one in response.partitions):
                    return known.topic_id
            await asyncio.sleep(0.05)


def asks(topic: UUID, offsets: Sequence[int]) -> list[Ask]:
    return [Ask(topic, n, offset) for n, offset in enumerate(offsets)]


def with_records(response: FetchResponse) -> list[tuple[UUID, int]]:
    return [
        (one.topic, one.partition)
        for one in response.partitions
        if one.records_bytes > 0 and isinstance(one.topic, UUID)
    ]


class Session:
    """The client's side of a session."""

    def __init__(self, client: RawClient) -> None:
        self.client = client
        self.id = 0
        self.epoch = 0

    async def full(self, asked: Sequence[Ask], wait_ms: int = 0) -> FetchResponse:
        response = await self.client.fetch(VERSION, asked, session_id=self.id, session_epoch=0, max_wait_ms=wait_ms)
        self.id, self.epoch = response.session_id, 1
        return response

    async def incremental(
        self, asked: Sequence[Ask] = (), forgotten: Sequence[tuple[UUID, Sequence[int]]] = (), wait_ms: int = WAIT_MS
    ) -> FetchResponse:
        response = await self.client.fetch(
            VERSION, asked, session_id=self.id, session_epoch=self.epoch, forgotten=forgotten, max_wait_ms=wait_ms
        )
        self.epoch += 1
        return response

    async def until_records(self) -> FetchResponse:
        async with asyncio.timeout(120):
            while not with_records(response := await self.incremental()):
                assert response.session_id == self.id
        return response


@pytest.mark.parametrize("partitions", [100, *full(1, 2000)])
async def test_a_session_is_the_brokers_own_while_all_partitions_are_local(
    tiers: TwoTiers, topic: str, wide: str, partitions: int
) -> None:
    tiered_id, wide_id = await create(tiers, topic), await create(tiers, wide, partitions)
    forwarded = Forwarded(tiers.fetch)
    async with raw_client(tiers.bootstrap) as client:
        session = Session(client)
        response = await session.full([*asks(wide_id, [0] * partitions), Ask(tiered_id, 0, 0)])
        assert session.id > 0
        assert len(response.partitions) == partitions + 1
        last = partitions - 1
        await asyncio.to_thread(partial(produce, tiers.bootstrap, wide, [b"one"], partition=last))
        assert with_records(await session.until_records()) == [(wide_id, last)]
        response = await session.incremental([Ask(wide_id, last, 1)])
        assert not with_records(response)
        assert not forwarded.changed

        values = random_values(200)
        await asyncio.to_thread(produce, tiers.bootstrap, topic, values)
        local_start = await tiers.settled(topic)
        old_id = session.id
        response = await session.incremental()
        assert [(one.topic, one.partition, one.error_code) for one in response.partitions] == [(tiered_id, 0, 0)]
        assert (response.session_id, with_records(response)) == (0, [])
        assert not forwarded.changed, "the requests of the broker's session must stay unchanged"

        everything = [*asks(wide_id, [0] * last + [1]), Ask(tiered_id, 0, 0)]
        session.id = 0
        async with asyncio.timeout(120):
            while not with_records(response := await session.full(everything, WAIT_MS)):
                assert (response.session_id, len(response.partitions)) == (0, partitions + 1)
        assert (response.session_id, len(response.partitions)) == (0, partitions + 1)
        assert with_records(response) == [(tiered_id, 0)]
        left = [request for _, request in forwarded.changed if request is not None]
        assert {request.session_epoch for request in left} == {-1}
        assert left[0].session_id == old_id, "the orphaned session must be closed"

        everything[-1] = Ask(tiered_id, 0, local_start)
        response = await session.full(everything)
        assert response.session_id not in (0, old_id)
        forwarded.changed.clear()  # that request may have closed a session that the client never learned of
        assert with_records(response) == [(tiered_id, 0)]
        everything[-1] = Ask(tiered_id, 0, len(values))
        assert not with_records(await session.incremental(everything[-1:]))
        assert not forwarded.changed
        async with raw_client(tiers.kafka.bootstrap_servers) as direct:
            gone = await direct.fetch(VERSION, session_id=old_id, session_epoch=3)
        assert gone.error_code == ErrorCode.FETCH_SESSION_ID_NOT_FOUND


@pytest.mark.full
async def test_forgotten_partitions_have_no_answer_and_end_no_session(tiers: TwoTiers, topic: str, wide: str) -> None:
    tiered_id, wide_id = await create(tiers, topic), await create(tiers, wide, 3)
    forwarded = Forwarded(tiers.fetch)
    async with raw_client(tiers.bootstrap) as client:
        session = Session(client)
        await session.full([*asks(wide_id, [0, 0, 0]), Ask(tiered_id, 0, 0)])
        await asyncio.to_thread(produce, tiers.bootstrap, topic, random_values(200))
        await tiers.settled(topic)
        for n in range(2):
            await asyncio.to_thread(partial(produce, tiers.bootstrap, wide, [b"one"], partition=n))
        response = await session.incremental(forgotten=[(tiered_id, [0]), (wide_id, [1])])
        assert response.session_id == session.id > 0
        assert with_records(response) == [(wide_id, 0)]
        response = await session.incremental(forgotten=[(wide_id, [0, 2])], wait_ms=0)
        assert (response.session_id, response.partitions) == (0, []), "a session without partitions must end"
        assert not forwarded.changed


async def test_a_streamed_answer_with_a_remote_partition_ends_the_session_next(
    tiers: TwoTiers, topic: str, wide: str
) -> None:
    """The proxy sent the session id before it saw the remote partition, so it makes the client send a full request."""
    tiered_id, wide_id = await create(tiers, topic), await create(tiers, wide)
    values, others = random_values(200), random_values(400)
    await asyncio.to_thread(produce, tiers.bootstrap, topic, values)
    await asyncio.to_thread(produce, tiers.bootstrap, wide, others)
    await tiers.settled(topic)
    everything = [Ask(wide_id, 0, 0), Ask(tiered_id, 0, 0)]
    async with raw_client(tiers.bootstrap) as client, raw_client(tiers.kafka.bootstrap_servers) as direct:
        session = Session(client)
        response = await session.full(everything)
        assert [one.error_code for one in response.partitions] == [0, 0]
        assert response.partitions[0].records_bytes > 300_000
        assert response.partitions[1].records_bytes == 0
        assert session.id > 0
        refused = await session.incremental([Ask(wide_id, 0, len(others))])
        assert (refused.error_code, refused.session_id) == (ErrorCode.FETCH_SESSION_ID_NOT_FOUND, 0)
        old_id, session.id = session.id, 0
        async with asyncio.timeout(120):
            at_the_end = [Ask(wide_id, 0, len(others)), Ask(tiered_id, 0, 0)]
            while not with_records(response := await session.full(at_the_end, WAIT_MS)):
                assert response.session_id == 0  # on a busy machine a read may last longer than this wait
        assert response.session_id == 0
        assert with_records(response) == [(tiered_id, 0)]
        assert values[0] in bytes(response.records(response.partitions[1]))
        gone = await direct.fetch(VERSION, session_id=old_id, session_epoch=1)
        assert gone.error_code == ErrorCode.FETCH_SESSION_ID_NOT_FOUND, "otherwise the session would never be closed"


@pytest.mark.full
async def test_a_client_seeks_between_the_tiers_within_its_sessions(tiers: TwoTiers, topic: str) -> None:
    tiered_id = await create(tiers, topic)
    values = random_values(200)
    await asyncio.to_thread(produce, tiers.bootstrap, topic, values)
    local_start = await tiers.settled(topic)
    async with raw_client(tiers.bootstrap) as client:
        session = Session(client)
        for _ in range(3):
            session.id = 0
            response = await session.full([Ask(tiered_id, 0, local_start)])
            assert session.id > 0
            assert values[local_start] in bytes(response.records(response.partitions[0]))
            response = await session.incremental([Ask(tiered_id, 0, 0)])
            assert response.session_id == 0
            session.id = 0
            async with asyncio.timeout(120):
                while not with_records(response):  # on a busy machine a read may last longer than this wait
                    response = await session.full([Ask(tiered_id, 0, 0)], WAIT_MS)
                    assert response.session_id == 0
            assert values[0] in bytes(response.records(response.partitions[0]))


@pytest.mark.full
async def test_an_unknown_session_is_refused_as_by_the_broker(tiers: TwoTiers, topic: str) -> None:
    """The broker evicted the session, or another client closed it. Both look the same."""
    tiered_id = await create(tiers, topic)
    async with raw_client(tiers.bootstrap) as client, raw_client(tiers.kafka.bootstrap_servers) as direct:
        session = Session(client)
        await session.full([Ask(tiered_id, 0, 0)])
        wrong = await client.fetch(VERSION, session_id=session.id, session_epoch=session.epoch + 1)
        assert wrong.error_code == ErrorCode.INVALID_FETCH_SESSION_EPOCH
        await direct.fetch(VERSION, session_id=session.id, session_epoch=-1)
        gone = await session.incremental()
        assert (gone.error_code, gone.session_id) == (ErrorCode.FETCH_SESSION_ID_NOT_FOUND, 0)
        session.id = 0
        await session.full([Ask(tiered_id, 0, 0)])
        assert session.id > 0


@pytest.mark.full
async def test_consumers_share_a_broker_with_few_sessions(tmp_path: Path, topic: str) -> None:
    """The broker has one session per shard, and eight shards. A client whose shard is full gets session id 0."""
    settings = {**SHRINKS_SOON, "max.incremental.fetch.session.cache.slots": "8"}
    with KafkaCluster(settings=settings, advertised_host="localhost", java_options=SHORT_LIVED) as kafka:
        async with two_tiers(kafka, tmp_path, PATTERN) as tiers:
            await create(tiers, topic)
            wide_id = await create(tiers, "wide", 100)
            values = [f"{n}-".ljust(1000, "x").encode() for n in range(300)]
            others = [f"{n}-".ljust(100, "y").encode() for n in range(100)]
            await asyncio.to_thread(produce, tiers.bootstrap, topic, values)
            for n in range(0, 100, 10):
                await asyncio.to_thread(partial(produce, tiers.bootstrap, "wide", others[n : n + 10], partition=n))
            await tiers.settled(topic)
            granted = []
            async with raw_client(tiers.bootstrap) as client:
                for _ in range(100):  # these sessions stay open, and none is old enough to be evicted
                    response = await client.fetch(VERSION, [Ask(wide_id, 1, 0)], session_epoch=0, max_wait_ms=0)
                    granted.append(response.session_id)
            assert 0 < sum(map(bool, granted)) <= 8
            java = asyncio.to_thread(
                kafka.run_tool,
                CONSOLE_CONSUMER,
                *("--bootstrap-server", tiers.bootstrap, "--include", f"{topic}|wide", "--from-beginning"),
                *("--max-messages", "400", "--timeout-ms", "120000"),
                *("--command-property", "max.partition.fetch.bytes=20000"),
            )
            python = asyncio.to_thread(read_with_kafka_python, tiers.bootstrap, topic, 400)
            consumed, (found, beside) = await asyncio.gather(java, python)
            lines = consumed.stdout.split("\n")[:400]
            assert [line for line in lines if line.endswith("x")] == [value.decode() for value in values]
            assert sorted(line for line in lines if line.endswith("y")) == sorted(value.decode() for value in others)
            assert found == values
            assert sorted(beside) == sorted(others)


def read_with_kafka_python(bootstrap: str, topic: str, count: int) -> tuple[list[bytes], list[bytes]]:
    """Returns the values of the tiered topic and of the wide topic."""
    consumer = kafka_python.KafkaConsumer(
        bootstrap_servers=bootstrap,
        auto_offset_reset="none",
        consumer_timeout_ms=120_000,
        max_partition_fetch_bytes=20_000,
    )
    partitions = [kafka_python.TopicPartition("wide", n) for n in range(100)]
    partitions.append(kafka_python.TopicPartition(topic, 0))
    consumer.assign(partitions)
    for partition in partitions:
        consumer.seek(partition, 0)
    try:
        messages = [message for _, message in zip(range(count), consumer, strict=False)]
    finally:
        consumer.close()
    return [m.value for m in messages if m.topic == topic], [m.value for m in messages if m.topic != topic]
