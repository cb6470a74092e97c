"""Unmodified clients read a topic with a trimmed head without a gap, a duplicate or a reset.

The Java client does so with and without fetch sessions. franz-go uses no session on a connection after an answer with
session id 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import confluent_kafka
import kafka as kafka_python
import pytest

from protocol.apis.fetch.request import FetchRequest, parse_fetch_request
from protocol.header import parse_request_header
from proxy.handlers.base import FetchSettings
from proxy.wire.exchange import Answer, Exchange, Forward, HandlerState, Prepare
from tests.support.clients.all_clients import CLIENTS
from tests.support.clients.client import READ_UNCOMMITTED, ClientRecord, OffsetOutOfRange
from tests.support.rigs.strict_consumer import consumer_at, read
from tests.support.rigs.two_tiers_rig import PATTERN, TwoTiers, two_tiers
from tests.support.servers.franz import binary, read_with_franz
from tests.support.servers.kafka import CONSOLE_CONSUMER, KafkaCluster
from tests.support.servers.producing import create_topic, produce, random_values

pytestmark = pytest.mark.integration

TIMEOUT_S = 300.0
RECORD = tuple[int, bytes]
"""An offset and a value."""


def offsets_and_values(records: Sequence[ClientRecord]) -> list[tuple[int, bytes | None]]:
    return [(each.offset, each.value) for each in records]


async def test_every_record_comes_once_across_the_seam(tiers: TwoTiers, topic: str) -> None:
    values = random_values(400)
    local_start = await tiers.filled(topic, values)
    later = random_values(20)
    await asyncio.to_thread(produce, tiers.bootstrap, topic, later)
    assert 0 < local_start < len(values)
    for name, client in CLIENTS.items():
        found = await asyncio.to_thread(client.read, tiers.bootstrap, topic, 0, 420, READ_UNCOMMITTED)
        assert offsets_and_values(found) == list(enumerate(values + later)), name
    assert tiers.storage.gets


async def test_the_broker_alone_has_lost_what_the_proxy_serves(tiers: TwoTiers, topic: str) -> None:
    await tiers.filled(topic, random_values(200))
    client = CLIENTS["kafka-python"]
    with pytest.raises(OffsetOutOfRange):
        await asyncio.to_thread(client.read, tiers.kafka.bootstrap_servers, topic, 0, 1, READ_UNCOMMITTED)


async def test_offsets_by_name_and_by_timestamp(tiers: TwoTiers, topic: str) -> None:
    await tiers.filled(topic, random_values(200))
    client = CLIENTS["kafka-python"]
    records = await asyncio.to_thread(client.read, tiers.bootstrap, topic, 0, 51, READ_UNCOMMITTED)
    asked = records[50].timestamp
    found = await asyncio.to_thread(client.offsets, tiers.bootstrap, topic, asked)
    assert found == (0, 200, next(each.offset for each in records if each.timestamp >= asked))


async def test_deleted_records_do_not_reappear(tiers: TwoTiers, topic: str) -> None:
    values = random_values(200)
    await tiers.filled(topic, values)

    def delete() -> int:
        admin = confluent_kafka.admin.AdminClient({"bootstrap.servers": tiers.bootstrap})
        at = confluent_kafka.TopicPartition(topic, 0, 77)
        (result,) = admin.delete_records([at]).values()
        return int(result.result(TIMEOUT_S).low_watermark)

    client = CLIENTS["kafka-python"]
    assert await asyncio.to_thread(delete) == 77
    (record,) = await asyncio.to_thread(client.read, tiers.bootstrap, topic, 77, 1, READ_UNCOMMITTED)
    assert record.value == values[77]
    with pytest.raises(OffsetOutOfRange):
        await asyncio.to_thread(client.read, tiers.bootstrap, topic, 76, 1, READ_UNCOMMITTED)


@pytest.mark.full
async def test_a_busy_local_partition_and_a_remote_one_in_one_fetch(tiers: TwoTiers, topic: str) -> None:
    """No partition starves, although a producer writes to the local one all the time."""
    values = random_values(400)
    await tiers.filled(topic, values, partitions=2)
    stop = asyncio.Event()

    async def keep_writing() -> int:
        written = 0
        while not stop.is_set():
            await asyncio.to_thread(lambda: produce(tiers.bootstrap, topic, random_values(5), partition=1))
            written += 5
        return written

    def read() -> tuple[list[RECORD], int]:
        consumer = kafka_python.KafkaConsumer(
            bootstrap_servers=tiers.bootstrap, auto_offset_reset="none", consumer_timeout_ms=int(1000 * TIMEOUT_S)
        )
        remote, local = (kafka_python.TopicPartition(topic, n) for n in range(2))
        consumer.assign([remote, local])
        consumer.seek(remote, 0)
        consumer.seek(local, 0)
        found: list[RECORD] = []
        others = 0
        for message in consumer:
            if message.partition == 0:
                found.append((message.offset, message.value))
            else:
                others += 1
            if len(found) == len(values) and others >= 20:
                break
        consumer.close()
        return found, others

    async with asyncio.TaskGroup() as group:
        writing = group.create_task(keep_writing())
        found, others = await asyncio.to_thread(read)
        stop.set()
    assert found == list(enumerate(values))
    assert 20 <= others <= writing.result()


@pytest.mark.full
async def test_a_remote_tier_that_goes_away_and_comes_back_costs_time_only(tiers: TwoTiers, topic: str) -> None:
    """Each client has its own topic, so no data is cached yet."""
    topics = {name: f"{topic}-{name}" for name in CLIENTS}
    values = random_values(400)
    async with asyncio.TaskGroup() as group:
        for each in topics.values():
            group.create_task(tiers.filled(each, values))

    async def interrupt() -> None:
        await tiers.storage.asked.wait()
        tiers.storage.is_down = True
        async with asyncio.timeout(TIMEOUT_S):
            for _ in range(5):
                await tiers.storage.refusals.acquire()
        tiers.storage.is_down = False

    for name, client in CLIENTS.items():
        tiers.storage.asked.clear()
        async with asyncio.TaskGroup() as group:
            group.create_task(interrupt())
            found = await asyncio.to_thread(client.read, tiers.bootstrap, topics[name], 0, 400, READ_UNCOMMITTED)
        assert offsets_and_values(found) == list(enumerate(values)), name


async def test_a_leader_that_moves_during_a_backfill_is_followed(
    kafka_of_three: KafkaCluster, tmp_path: Path, topic: str
) -> None:
    async with two_tiers(kafka_of_three, tmp_path, PATTERN) as tiers:
        values = random_values(500)
        assert await tiers.filled(topic, values, replicas=3) > 100
        partition = await tiers.partition(topic)
        leader = (await tiers.client.leader_of(partition)).node_id

        def read_meanwhile() -> list[tuple[int, bytes]]:
            few_at_a_time = {"fetch.message.max.bytes": 11_000, "queued.min.messages": 10}
            with consumer_at(tiers.bootstrap, topic, 0, settings=few_at_a_time) as consumer:
                found = read(consumer, 50)
                kafka_of_three.stop_broker(leader)
                return found + read(consumer, len(values) - 50)

        try:
            found = await asyncio.to_thread(read_meanwhile)
            moved_to = await tiers.client.leader_of(partition, max_age_ms=0)
        finally:
            await asyncio.to_thread(kafka_of_three.start_broker, leader)
        assert found == list(enumerate(values))
        assert moved_to.node_id != leader


COUNT = 10_000
"""The number of records in each topic."""


@pytest.mark.full
async def test_a_half_trimmed_topic_beside_a_local_one_comes_exactly_once(
    kafka: KafkaCluster, tmp_path: Path, topic_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    binary()  # fails before any server starts if the program is missing
    tiered, local = f"tiered-{topic_name}", f"local-{topic_name}"
    values = {topic: [f"{topic}:{n}:{'x' * 40}".encode() for n in range(COUNT)] for topic in (tiered, local)}
    epochs: list[int] = []
    """The session epochs, in the order of the requests."""
    async with two_tiers(kafka, tmp_path, "tiered-*") as tiers:
        for topic in (tiered, local):
            create_topic(kafka.bootstrap_servers, topic)
        first, rest = values[tiered][: COUNT // 2], values[tiered][COUNT // 2 :]
        await asyncio.to_thread(produce, tiers.bootstrap, tiered, first, records_per_batch=100)
        await tiers.settled(tiered)
        await asyncio.to_thread(produce, tiers.bootstrap, local, values[local], records_per_batch=100)
        on_request = tiers.fetch.on_request

        def recorded(exchange: Exchange) -> tuple[Answer | Forward | Prepare, HandlerState | None]:
            frame, version = exchange.request.frame, exchange.request.api_version
            epochs.append(parse_fetch_request(frame, parse_request_header(frame).body_position, version).session_epoch)
            return on_request(exchange)

        monkeypatch.setattr(tiers.fetch, "on_request", recorded)
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(asyncio.to_thread(read_with_franz, tiers.bootstrap, [tiered, local], 2 * COUNT))
            await asyncio.to_thread(produce, tiers.bootstrap, tiered, rest, records_per_batch=100)
        assert tiers.storage.gets
    for topic in (tiered, local):
        found = [(record.offset, record.value) for record in reading.result() if record.topic == topic]
        assert found == list(enumerate(values[topic]))
    assert epochs[0] == 0  # it asks for a session, and never again after a refusal
    assert set(epochs[epochs.index(-1) :]) == {-1}


@pytest.mark.full
@pytest.mark.parametrize("hold_bytes", [256 * 1024, 5_000])
async def test_the_java_client_reads_a_trimmed_partition_beside_a_local_one(
    kafka: KafkaCluster, tmp_path: Path, topic: str, hold_bytes: int
) -> None:
    """The client uses sessions. With the smaller limit, answers stream, and remote partitions come a request later."""
    async with two_tiers(kafka, tmp_path, PATTERN, FetchSettings(hold_bytes=hold_bytes)) as tiers:
        beside = f"beside-{topic}"
        for name in (topic, beside):
            create_topic(kafka.bootstrap_servers, name)
        values = [f"{n}-".ljust(1000, "x").encode() for n in range(300)]
        others = [f"other-{n}-".ljust(1000, "y").encode() for n in range(300)]
        await asyncio.to_thread(produce, tiers.bootstrap, topic, values)
        await asyncio.to_thread(produce, tiers.bootstrap, beside, others)
        await tiers.settled(topic)
        consumed = await asyncio.to_thread(
            kafka.run_tool,
            CONSOLE_CONSUMER,
            *("--bootstrap-server", tiers.bootstrap, "--include", f"{topic}|{beside}", "--from-beginning"),
            *("--max-messages", "600", "--timeout-ms", "120000"),
            *("--command-property", "max.partition.fetch.bytes=20000"),
        )
        lines = consumed.stdout.split("\n")[:600]
        assert [line for line in lines if line.endswith("x")] == [value.decode() for value in values]
        assert [line for line in lines if line.endswith("y")] == [value.decode() for value in others]


async def test_fetch_sessions_of_local_topics_reach_the_broker_untouched(tiers: TwoTiers, topic_name: str) -> None:
    """The topic's name does not match a tiered one."""
    create_topic(tiers.kafka.bootstrap_servers, topic_name)
    await asyncio.to_thread(produce, tiers.bootstrap, topic_name, [b"%d" % n for n in range(5)])
    forwarded: list[FetchRequest] = []
    in_session = asyncio.Event()
    on_request = tiers.fetch.on_request

    def record(exchange: Exchange) -> tuple[Answer | Forward, HandlerState | None]:
        before = exchange.request.frame
        action, state = on_request(exchange)
        assert isinstance(action, Forward)
        assert action.frame == before
        header = parse_request_header(before)
        forwarded.append(parse_fetch_request(before, header.body_position, header.api_version))
        if forwarded[-1].session_epoch > 2:
            in_session.set()
        return action, state

    tiers.fetch.on_request = record  # type: ignore[method-assign]  # replaced by a recorder for this test
    consuming = asyncio.to_thread(
        tiers.kafka.run_tool,
        CONSOLE_CONSUMER,
        *("--bootstrap-server", tiers.bootstrap, "--topic", topic_name, "--from-beginning"),
        *("--max-messages", "10", "--timeout-ms", "120000"),
    )
    async with asyncio.TaskGroup() as group:
        consumer = group.create_task(consuming)
        async with asyncio.timeout(300):
            await in_session.wait()
        await asyncio.to_thread(produce, tiers.bootstrap, topic_name, [b"%d" % n for n in range(5, 10)])
    assert consumer.result().stdout.split() == [str(n) for n in range(10)]
    incremental = [request for request in forwarded if request.session_epoch > 0]
    assert len({request.session_id for request in incremental}) == 1
    assert all(request.session_id for request in incremental)
