"""A real S3 server behind a slow link, and one that is gone for a time by the clock, under a real Kafka and a proxy.

`TIDEGATE_STORE_GONE_S` is the time for which the store is gone. `make soak` sets a quarter of an hour.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]  # they export it without saying so

from tests.support.rigs.strict_consumer import TIMEOUT_S, consumer_at, read, until_trimmed
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import create_topic, produce, random_values
from tests.support.servers.throttling_relay import ThrottlingRelay
from tests.support.servers.tidegate import TidegateProcess, tidegate_over
from tests.support.servers.versitygw import VersityGateway

pytestmark = pytest.mark.integration

PARTITIONS = 10
RATE = 8_000_000
SEGMENT_BYTES = 10 << 20
DEADLINE_MS = 3000
RECORDS = 170
RECORD_BYTES = 100_000
"""Of each partition, so that each has a full segment, in two parts."""
GONE_S = float(os.environ.get("TIDEGATE_STORE_GONE_S", "20"))


def proxy_over(
    cluster: KafkaCluster, home: Path, topic: str, store: dict[str, str], segment_bytes: int
) -> TidegateProcess:
    return tidegate_over(
        cluster,
        home,
        tiered=[topic],
        segment_bytes=segment_bytes,
        storage={"implementation": "s3", "timeout.ms": str(DEADLINE_MS), **store},
        settings={
            "remote.log.metadata.topic.name": f"__metadata-{topic}"[:200],
            "remote.log.visible.after.ms": 2000,
        },
    )


def local_starts(cluster: KafkaCluster, topic: str) -> list[int]:
    """Returns where the broker's own log of each partition begins."""
    earliest: OffsetSpec = OffsetSpec.earliest()  # type: ignore[no-untyped-call]  # it has no annotations
    asked = {TopicPartition(topic, partition): earliest for partition in range(PARTITIONS)}
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})  # without it, the answers never come
    return [answer.result(TIMEOUT_S).offset for answer in admin.list_offsets(asked).values()]


async def test_ten_backlogged_partitions_progress_over_a_slow_link(
    kafka: KafkaCluster, s3: VersityGateway, topic_name: str, tmp_path: Path
) -> None:
    """All parts of all partitions share 8 MB/s, so a part takes longer than its deadline until fewer are in flight."""
    await s3.create_bucket("slow-link")
    create_topic(
        kafka.bootstrap_servers, topic_name, partitions=PARTITIONS, config={"segment.bytes": str(SEGMENT_BYTES)}
    )
    values = random_values(RECORDS, RECORD_BYTES)
    for partition in range(PARTITIONS):
        await asyncio.to_thread(produce, kafka.bootstrap_servers, topic_name, values, partition=partition)
    async with ThrottlingRelay(s3.port, RATE) as relay:
        store = s3.settings("slow-link") | {"endpoint.url": relay.url, "part.size": str(5 << 20)}
        proxy = proxy_over(kafka, tmp_path, topic_name, store, SEGMENT_BYTES)
        await asyncio.to_thread(proxy.start)  # the relay runs here
        try:
            deadline = time.monotonic() + TIMEOUT_S
            while min(await asyncio.to_thread(local_starts, kafka, topic_name)) == 0:
                assert time.monotonic() < deadline, proxy.last_output()
                await asyncio.sleep(0.5)
            for partition in (0, PARTITIONS - 1):
                with consumer_at(proxy.bootstrap_servers, topic_name, 0, partition) as consumer:
                    assert await asyncio.to_thread(read, consumer, RECORDS) == list(enumerate(values))
        finally:
            await asyncio.to_thread(proxy.stop)
    assert relay.up.taken > PARTITIONS * SEGMENT_BYTES // 2


@pytest.mark.timeout(GONE_S + 600)
async def test_a_store_that_was_gone_for_long_loses_nothing(
    kafka: KafkaCluster, topic_name: str, tmp_path: Path
) -> None:
    """The clock decides here: deadlines, backoffs and the circuit breaker have to outlive the outage."""
    create_topic(kafka.bootstrap_servers, topic_name)
    with VersityGateway() as gateway:
        await gateway.create_bucket("gone")
        with proxy_over(kafka, tmp_path, topic_name, gateway.settings("gone"), 1 << 20) as proxy:
            values = random_values(5000)
            await asyncio.to_thread(produce, proxy.bootstrap_servers, topic_name, values)
            await asyncio.to_thread(until_trimmed, kafka, topic_name, 1000)
            gateway.kill()
            end = time.monotonic() + GONE_S
            while time.monotonic() < end:
                more = random_values(200)
                await asyncio.to_thread(produce, proxy.bootstrap_servers, topic_name, more)
                with consumer_at(proxy.bootstrap_servers, topic_name, len(values)) as tail:
                    assert await asyncio.to_thread(read, tail, 200) == list(enumerate(more, len(values)))
                values += more
                await asyncio.sleep(min(5.0, GONE_S / 10))
            gateway.start()
            await asyncio.to_thread(until_trimmed, kafka, topic_name, 4500)
            with consumer_at(proxy.bootstrap_servers, topic_name, 0) as consumer:
                assert await asyncio.to_thread(read, consumer, len(values)) == list(enumerate(values))
            assert proxy.running
