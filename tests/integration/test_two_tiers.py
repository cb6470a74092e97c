"""Unmodified clients read a topic with a trimmed head without a gap, a duplicate or a reset.

The Java client does so with and without fetch sessions. franz-go uses no session on a connection after an answer with
session id 0.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from protocol.apis.fetch.request import parse_fetch_request
from protocol.header import parse_request_header
from proxy.handlers.base import FetchSettings
from proxy.wire.exchange import Answer, Exchange, Forward, Prepare, Respond
from tests.support.rigs.strict_consumer import consumer_at, read
from tests.support.rigs.two_tiers_rig import PATTERN, two_tiers
from tests.support.servers.franz import binary, read_with_franz
from tests.support.servers.kafka import CONSOLE_CONSUMER, KafkaCluster
from tests.support.servers.producing import create_topic, produce, random_values

pytestmark = pytest.mark.integration


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

        def recorded(exchange: Exchange) -> tuple[Answer | Forward | Prepare, Respond | None]:
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
