"""Kafka, `tidegate serve` and a real S3 as processes. The S3 is killed during a backfill."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from tests.support.rigs.strict_consumer import consumer_at, read, until_trimmed
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import create_topic, produce, random_values
from tests.support.servers.tidegate import TidegateProcess, tidegate_over
from tests.support.servers.versitygw import ACCESS_KEY_ID, SECRET_ACCESS_KEY, VersityGateway

pytestmark = pytest.mark.integration

RECORDS = 12_000
BUCKET = "whole"


@pytest.fixture
def values() -> list[bytes]:
    return random_values(RECORDS)


def proxy_over_s3(
    cluster: KafkaCluster, home: Path, gateway: VersityGateway, topic: str, disk_bytes: int = 0
) -> TidegateProcess:
    return tidegate_over(
        cluster,
        home,
        tiered=[topic],
        storage={
            "implementation": "s3",
            "bucket": BUCKET,
            "region": "us-east-1",
            "endpoint.url": gateway.endpoint_url,
            "access.key.id": ACCESS_KEY_ID,
            "secret.access.key": SECRET_ACCESS_KEY,
            "path.style": "true",
            "timeout.ms": "2000",
        },
        settings={
            "remote.log.metadata.topic.name": f"__metadata-{topic}"[:200],
            "remote.log.visible.after.ms": 2000,
            "remote.log.chunk.cache.total.size.bytes": 1,
            "remote.log.chunk.file.cache.total.size.bytes": disk_bytes,
        },
    )


def gets_of(proxy: TidegateProcess) -> int:
    """Returns the number of requests for record data."""
    return int(proxy.metric("tidegate_remote_storage_requests_total", operation="fetch_log_segment", store="s3"))


async def test_a_store_that_dies_costs_time_and_a_lost_state_folder_nothing(
    kafka: KafkaCluster, s3: VersityGateway, topic_name: str, tmp_path: Path, values: list[bytes]
) -> None:
    await s3.create_bucket(BUCKET)
    create_topic(kafka.bootstrap_servers, topic_name)
    create_topic(kafka.bootstrap_servers, f"{topic_name}-local")
    expected = list(enumerate(values))
    with proxy_over_s3(kafka, tmp_path, s3, topic_name) as proxy:
        await asyncio.to_thread(produce, proxy.bootstrap_servers, topic_name, values)
        await asyncio.to_thread(until_trimmed, kafka, topic_name, RECORDS // 2)

        with consumer_at(proxy.bootstrap_servers, topic_name, 0) as consumer:
            first = await asyncio.to_thread(read, consumer, 500)
            assert first == expected[:500]
            s3.kill()
            try:
                # The consumer still returns its buffered records. The rest waits, without an error and without a reset.
                waiting = asyncio.create_task(asyncio.to_thread(read, consumer, RECORDS - 500))
                local_topic = f"{topic_name}-local"
                await asyncio.to_thread(produce, proxy.bootstrap_servers, local_topic, values[:100])
                with consumer_at(proxy.bootstrap_servers, local_topic, 0) as neighbour:
                    assert await asyncio.to_thread(read, neighbour, 100) == expected[:100]
                # Records that are written now stay local.
                await asyncio.to_thread(produce, proxy.bootstrap_servers, topic_name, values[:100])
                with consumer_at(proxy.bootstrap_servers, topic_name, RECORDS) as tail:
                    assert await asyncio.to_thread(read, tail, 100) == list(enumerate(values[:100], RECORDS))
                assert not waiting.done()
            finally:
                s3.start()
            assert await waiting == expected[500:]

    shutil.rmtree(tmp_path / "state")
    with proxy_over_s3(kafka, tmp_path, s3, topic_name, disk_bytes=1 << 30) as proxy:
        asked_before = -1
        while (asked := gets_of(proxy)) != asked_before:  # in the end the local disk has all data
            asked_before = asked
            with consumer_at(proxy.bootstrap_servers, topic_name, 0) as consumer:
                assert await asyncio.to_thread(read, consumer, RECORDS) == expected
        assert asked
        assert proxy.metric("tidegate_request_latency_seconds_count", api="Fetch", tier="remote") > 0
    assert list((tmp_path / "state" / "index-remote-reader").glob(f"{topic_name}-0/*.remoteLogIndex"))
