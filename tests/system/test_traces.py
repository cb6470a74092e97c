"""A consumer reads both tiers through workers, and a collector gets its Fetches as traces over several processes."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import AsyncExitStack
from pathlib import Path

import confluent_kafka
import pytest

from tests.support.rigs.strict_consumer import local_log_start, until_trimmed
from tests.support.rigs.waiting import TIMEOUT_S
from tests.support.servers.collector import TakenSpan, running_collector
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import create_topic, produce, random_values
from tests.support.servers.tidegate import TidegateProcess, tidegate_over

pytestmark = pytest.mark.integration

RECORDS = 1_000


def read_all(proxy: TidegateProcess, topic: str) -> list[int]:
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": proxy.bootstrap_servers, "group.id": topic, "client.id": "backfill"}
    )
    consumer.assign([confluent_kafka.TopicPartition(topic, 0, 0)])
    try:
        return [message.offset() or 0 for message in consumer.consume(RECORDS, TIMEOUT_S)]
    finally:
        consumer.close()


async def test_a_backfill_through_workers_is_traced_over_processes(
    kafka: KafkaCluster, topic_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_topic(kafka.bootstrap_servers, topic_name)
    settings: dict[str, str | int] = {
        "workers": 1,
        "remote.log.metadata.topic.name": f"__metadata-{topic_name}"[:200],
        "remote.log.visible.after.ms": 1000,
    }
    async with AsyncExitStack() as stack:
        collector = await stack.enter_async_context(running_collector())
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "1")
        tracing = "[tracing]\nenabled = true\n"
        proxy = tidegate_over(
            kafka, tmp_path, tiered=[topic_name], segment_bytes=200_000, settings=settings, more=tracing
        )
        stack.push_async_callback(asyncio.to_thread, proxy.stop)
        await asyncio.to_thread(proxy.start)
        await asyncio.to_thread(produce, proxy.bootstrap_servers, topic_name, random_values(RECORDS))
        await asyncio.to_thread(until_trimmed, kafka, topic_name, RECORDS // 2)
        assert await asyncio.to_thread(read_all, proxy, topic_name) == list(range(RECORDS))
        local_start = await asyncio.to_thread(local_log_start, kafka, topic_name)  # trims went on meanwhile
        children = proxy.children()
        await asyncio.to_thread(proxy.stop)  # each process sends its last spans before it ends
        spans = {span.id: span for span in collector.taken()}

    traces: defaultdict[bytes, list[TakenSpan]] = defaultdict(list)
    for span in spans.values():
        traces[span.trace].append(span)
    gets = [span for span in spans.values() if span.name == "fetch_log_segment"]
    assert gets
    offsets = []
    for get in gets:
        read = spans[get.parent]
        fetch = spans[read.parent]
        assert (read.name, fetch.name, fetch.parent) == (f"read {topic_name}", "Fetch", b"")
        assert fetch.attributes["messaging.client.id"] == "backfill"
        assert {"forward Fetch", "judge", "purgatory"} <= {span.name for span in traces[get.trace]}
        assert read.attributes["messaging.destination.name"] == topic_name
        offset = read.attributes["messaging.kafka.offset"]
        assert isinstance(offset, int)
        offsets.append(offset)
        assert get.resource["process.pid"] == children["remote-reader"]
        assert read.resource["process.pid"] == fetch.resource["process.pid"] == children["worker-1"]
    assert min(offsets) == 0
    assert max(offsets) < local_start
