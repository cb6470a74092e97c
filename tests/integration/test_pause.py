"""A pause of a real topic: obeyed by running proxies, kept over a restart, and safe for consumers."""

from __future__ import annotations

import asyncio
import json
import time
from functools import partial
from pathlib import Path

import confluent_kafka
import pytest

from tests.support.rigs.strict_consumer import local_log_start, until_trimmed
from tests.support.rigs.tier_command import Answer, tidegate_here
from tests.support.rigs.waiting import TIMEOUT_S, until
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import create_topic, produce, random_values
from tests.support.servers.tidegate import TidegateProcess, tidegate_over

pytestmark = [pytest.mark.integration, pytest.mark.full]
RECORDS = 1_000


class Operator:
    def __init__(self, config: Path) -> None:
        self.config = config

    async def run(self, *arguments: str) -> Answer:
        return await tidegate_here(self.config, *arguments)

    async def state(self, topic: str) -> str:
        code, out, _ = await self.run("tier", "topics")
        assert code == 0
        return next(line for line in out.splitlines() if line.split() and line.split()[0] == topic)

    async def remote_end(self, topic: str) -> int:
        _, out, _ = await self.run("tier", "bounds", topic, "--json")
        return int(json.loads(out)[0]["remote_end"] or 0)

    def has_copied(self, topic: str, offset: int) -> bool:
        return asyncio.run(self.remote_end(topic)) >= offset


class Reader:
    """A consumer with a reset policy: an error that is no retriable one would make it jump."""

    def __init__(self, proxy: TidegateProcess, topic: str) -> None:
        self._consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": proxy.bootstrap_servers,
                "group.id": topic,
                "auto.offset.reset": "latest",
                "enable.auto.commit": False,
            }
        )
        self._consumer.assign([confluent_kafka.TopicPartition(topic, 0, 0)])
        self.offsets: list[int] = []

    def poll(self, seconds: float) -> None:
        message = self._consumer.poll(seconds)
        if message is not None:
            assert message.error() is None, message.error()
            self.offsets.append(message.offset() or 0)

    def read(self, count: int) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while len(self.offsets) < count:
            self.poll(0.2)
            assert time.monotonic() < deadline, f"{len(self.offsets)} records, and not {count}"

    def close(self) -> None:
        self._consumer.close()


async def test_a_pause_holds_in_every_proxy_and_loses_no_record(
    kafka: KafkaCluster, topic_name: str, tmp_path: Path
) -> None:
    create_topic(kafka.bootstrap_servers, topic_name)
    compacted = f"compacted-{topic_name}"[:200]
    create_topic(kafka.bootstrap_servers, compacted, config={"cleanup.policy": "compact"})

    def new_proxy() -> TidegateProcess:
        return tidegate_over(
            kafka,
            tmp_path,
            tiered=[topic_name, "compacted-*"],
            segment_bytes=200_000,
            settings={
                "remote.log.metadata.topic.name": f"__metadata-{topic_name}"[:200],
                "remote.log.visible.after.ms": 1000,
            },
        )

    operator = Operator(tmp_path / "operator.toml")
    with new_proxy() as proxy:
        operator.config.write_text(proxy.config.read_text())
        await asyncio.to_thread(produce, proxy.bootstrap_servers, topic_name, random_values(RECORDS))
        await asyncio.to_thread(until_trimmed, kafka, topic_name, RECORDS // 2)
        code, out, _ = await operator.run("check")
        assert f"topic {compacted} is not tiered: cleanup.policy is 'compact'; only 'delete' can be tiered" in out
        assert "not tiered: cleanup.policy is 'compact'" in await operator.state(compacted)

        code, out, err = await operator.run("top", "--interval", "0.5")
        assert (code, err, "copied to the store" in out, topic_name in out) == (0, "", True, True)

        reader = Reader(proxy, topic_name)
        await asyncio.to_thread(reader.read, 10)
        code, out, err = await operator.run("tier", "pause", topic_name, "--trimming", "--reading", "--yes")
        assert (code, "The change of" in err) == (0, True)
        assert "paused: reading, trimming" in await operator.state(topic_name)
        reader.close()
    with new_proxy() as proxy:
        reader = Reader(proxy, topic_name)
        await asyncio.to_thread(produce, proxy.bootstrap_servers, topic_name, random_values(RECORDS))
        await asyncio.to_thread(until, partial(operator.has_copied, topic_name, RECORDS))
        start = local_log_start(kafka, topic_name)
        await asyncio.to_thread(until, partial(operator.has_copied, topic_name, RECORDS * 3 // 2))
        for _ in range(20):
            await asyncio.to_thread(reader.poll, 0.1)
        assert (reader.offsets, local_log_start(kafka, topic_name)) == ([], start)
        code, out, _ = await operator.run("explain", topic_name)
        assert "An operator paused trimming" in out
        earliest = await asyncio.to_thread(_earliest, proxy, topic_name)
        assert earliest == 0

        assert (await operator.run("tier", "resume", topic_name, "--yes"))[0] == 0
        await asyncio.to_thread(reader.read, 2 * RECORDS)
        assert reader.offsets == list(range(2 * RECORDS))
        await asyncio.to_thread(until_trimmed, kafka, topic_name, start + 1)
        reader.close()


def _earliest(proxy: TidegateProcess, topic: str) -> int:
    consumer = confluent_kafka.Consumer({"bootstrap.servers": proxy.bootstrap_servers, "group.id": topic})
    try:
        low, _ = consumer.get_watermark_offsets(confluent_kafka.TopicPartition(topic, 0), timeout=TIMEOUT_S)
        return int(low)
    finally:
        consumer.close()
