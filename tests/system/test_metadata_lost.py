"""The metadata topic is deleted on the brokers: consumers of remote records continue or wait. None of them resets."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from protocol.errors import ErrorCode
from proxy.commands.check import check
from proxy.config import load_config
from tests.support.rigs.broker_fetches import answered, client_of, fetch, settled
from tests.support.rigs.strict_consumer import consumer_at, read
from tests.support.rigs.waiting import until
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import create_topic, delete_topic, produce, random_values, topic_id_partition
from tests.support.servers.tidegate import TidegateProcess, tidegate_over

pytestmark = pytest.mark.integration


def not_ready(tidegate: TidegateProcess) -> str:
    """Returns the text of `/readyz`. Empty while the proxy is ready, or does not answer yet."""
    try:
        with urllib.request.urlopen(f"http://{tidegate.admin[0]}:{tidegate.admin[1]}/readyz", timeout=10):
            return ""
    except urllib.error.HTTPError as error:
        return error.read().decode()
    except OSError:
        return ""


def serves(tidegate: TidegateProcess) -> bool:
    """Returns whether `/servez` answers 200. Raises `HTTPError` for 503."""
    with urllib.request.urlopen(f"http://{tidegate.admin[0]}:{tidegate.admin[1]}/servez", timeout=10) as answer:
        return bool(answer.status == 200)


def start_again(tidegate: TidegateProcess, monkeypatch: pytest.MonkeyPatch, alarm: str) -> None:
    tidegate.keep()
    tidegate.stop()
    monkeypatch.setattr(tidegate, "wait_until_ready", lambda: until(lambda: alarm in not_ready(tidegate)))
    tidegate.start()


async def test_no_consumer_jumps_while_the_metadata_topic_is_gone_or_another_one(
    kafka: KafkaCluster, topic_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, metadata_topic = topic_name, f"__metadata-{topic_name}"
    create_topic(kafka.bootstrap_servers, topic)
    values = random_values(300)
    settings: dict[str, str | int] = {
        "workers": 1,
        "remote.log.visible.after.ms": "2s",
        "remote.log.metadata.topic.name": metadata_topic,
    }
    with tidegate_over(kafka, tmp_path, tiered=[topic], segment_bytes=50_000, settings=settings) as tidegate:
        await asyncio.to_thread(produce, tidegate.bootstrap_servers, topic, values)
        local_start = await settled(kafka, topic)

        async def errors() -> list[int]:
            async with client_of(tidegate.address) as client:
                partition = await topic_id_partition(client, topic)
                return [(await fetch(client, partition, offset)).error for offset in (0, local_start - 1, local_start)]

        async def problems() -> list[str]:
            return (await check(load_config(tidegate.config), tidegate.config)).problems

        report = await check(load_config(tidegate.config), tidegate.config)
        assert (report.rules, report.problems) == ([f"[[topics]] {topic}: matches {topic}"], [])
        await asyncio.to_thread(delete_topic, kafka.bootstrap_servers, metadata_topic)
        [problem] = await problems()
        assert f"there is no topic {metadata_topic}, and the saved state was read from one" in problem
        await asyncio.to_thread(until, lambda: "has not read it to its end recently" in not_ready(tidegate))
        assert await asyncio.to_thread(serves, tidegate)
        waits_or_is_served = {ErrorCode.NONE, ErrorCode.REPLICA_NOT_AVAILABLE}
        assert {*(await errors())} <= waits_or_is_served

        create_topic(
            kafka.bootstrap_servers,
            metadata_topic,
            partitions=4,
            config={"cleanup.policy": "compact", "message.timestamp.type": "LogAppendTime"},
        )
        [problem] = await problems()
        assert "is not the one that the saved state was read from: see 'The metadata topic is lost'" in problem
        await asyncio.to_thread(start_again, tidegate, monkeypatch, "has not read it to its end recently")
        assert {*(await errors())} <= waits_or_is_served

        def read_all() -> None:
            """Reads from the first offset, which is only remote, with a client that fails instead of resetting."""
            with consumer_at(tidegate.bootstrap_servers, topic, 0) as consumer:
                assert read(consumer, 300) == list(enumerate(values))

        # Only the saved state still has the metadata, and it is enough.
        await asyncio.to_thread(read_all)
        async with client_of(tidegate.address) as client:
            partition = await topic_id_partition(client, topic)
            for offset in (0, local_start - 1, local_start):
                assert (await answered(client, partition, offset)).error == ErrorCode.NONE
        assert "is not the one that the saved state was read from" in tidegate.output.read_text()
