"""franz-go reads both tiers. After an answer with session id 0, it uses no session on that connection."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from protocol.apis.fetch.request import parse_fetch_request
from protocol.header import parse_request_header
from proxy.wire.exchange import Answer, Exchange, Forward, HandlerState
from tests.support.rigs.two_tiers_rig import two_tiers
from tests.support.servers.franz import binary, read_with_franz
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import create_topic, produce

pytestmark = pytest.mark.integration

COUNT = 10_000
"""The number of records in each topic."""


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

        def recorded(exchange: Exchange) -> tuple[Answer | Forward, HandlerState | None]:
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
