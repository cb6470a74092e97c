"""The Java client reads both tiers as one log, with and without fetch sessions."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from protocol.apis.fetch.request import FetchRequest, parse_fetch_request
from protocol.header import parse_request_header
from proxy.handlers.base import FetchSettings
from proxy.wire.exchange import Answer, Exchange, Forward, HandlerState
from tests.support.rigs.two_tiers_rig import PATTERN, TwoTiers, two_tiers
from tests.support.servers.kafka import CONSOLE_CONSUMER, KafkaCluster
from tests.support.servers.producing import create_topic, produce

pytestmark = pytest.mark.integration


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
