"""Quotas in front of a real broker lose or repeat no records, and do not slow clients with other ids."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.rigs.strict_consumer import consumer_at, read, until_trimmed
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import create_topic, produce, random_values
from tests.support.servers.tidegate import TidegateProcess, tidegate_over

pytestmark = pytest.mark.integration
RECORDS = 4000


def throttles(proxy: TidegateProcess, what: str) -> float:
    return proxy.metric(f"tidegate_remote_{what}_throttle_time_seconds_count")


async def test_a_throttled_consumer_reads_everything_once(kafka: KafkaCluster, topic_name: str, tmp_path: Path) -> None:
    topic, values = topic_name, random_values(RECORDS)
    await asyncio.to_thread(create_topic, kafka.bootstrap_servers, topic)
    settings: dict[str, str | int] = {
        "remote.log.metadata.topic.name": f"__metadata-{topic[-40:]}",
        "remote.log.visible.after.ms": 1000,
        # The limits are 2 MB in ten seconds and 400 kB in four, less than one GET. Even a busy machine exceeds them.
        "remote.log.manager.copy.max.bytes.per.second": 200_000,
        "remote.log.manager.copy.quota.window.num": 10,
        "remote.log.manager.fetch.max.bytes.per.second": 100_000,
        "remote.log.manager.fetch.quota.window.num": 4,
    }
    with tidegate_over(kafka, tmp_path, tiered=[topic], settings=settings) as proxy:
        await asyncio.to_thread(produce, kafka.bootstrap_servers, topic, values)
        await asyncio.to_thread(until_trimmed, kafka, topic, RECORDS // 2)
        assert throttles(proxy, "copy") > 0
        assert throttles(proxy, "fetch") == 0
        with consumer_at(proxy.bootstrap_servers, topic, 0) as consumer:
            found = await asyncio.to_thread(read, consumer, RECORDS)
        assert found == list(enumerate(values))
        assert throttles(proxy, "fetch") > 0
