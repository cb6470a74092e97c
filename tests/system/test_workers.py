"""Several processes act as one proxy: clients do not notice which one answers, or that one died."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import confluent_kafka
import confluent_kafka.admin
import kafka as kafka_python
import pytest
from prometheus_client.parser import text_string_to_metric_families

from protocol.errors import ErrorCode
from tests.support.rigs.waiting import TIMEOUT_S
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.pausing import pause_process
from tests.support.servers.producing import create_topic, produce, random_values, topic_id_partition
from tests.support.servers.tidegate import TidegateProcess, is_running, tidegate_over
from tiers.broker.client import BrokerClient
from tiers.broker.fetch import FetchedPartition, FetchPosition, fetch_raw
from tiers.log.broker_log import BrokerLogSource
from tiers.model.ids import TopicIdPartition

pytestmark = pytest.mark.integration


TIMEOUT_MS = 300_000
RECORD = tuple[int, bytes]
"""An offset and a value."""
NAMES = {"worker-1", "worker-2", "remote-log", "remote-reader"}


@pytest.fixture
def topic(topic_name: str, kafka: KafkaCluster) -> str:
    create_topic(kafka.bootstrap_servers, topic_name)
    return topic_name


@pytest.fixture
def tidegate(kafka: KafkaCluster, topic: str, tmp_path: Path) -> Iterator[TidegateProcess]:
    settings: dict[str, str | int] = {
        "workers": 2,
        "remote.log.visible.after.ms": "2s",
        "remote.log.metadata.topic.name": f"__remote_log_metadata-{topic}"[:200],
    }
    with tidegate_over(kafka, tmp_path, tiered=[topic], segment_bytes=200_000, settings=settings) as running:
        yield running


@asynccontextmanager
async def client_of(address: tuple[str, int]) -> AsyncIterator[BrokerClient]:
    client = BrokerClient([address], client_id="test")
    try:
        yield client
    finally:
        await client.close()


async def settled(kafka: KafkaCluster, topic: str) -> int:
    """Waits until the broker has trimmed the topic to less than a third. Returns the local log start."""
    async with client_of(kafka.address()) as client, asyncio.timeout(TIMEOUT_S):
        partition = await topic_id_partition(client, topic)
        source = BrokerLogSource(client)
        while True:
            bounds = await source.bounds(partition, 60_000)
            if bounds.log_start_offset > bounds.high_watermark * 2 // 3:
                return bounds.log_start_offset
            await asyncio.sleep(0.2)


async def fetch(client: BrokerClient, partition: TopicIdPartition, offset: int = 0) -> FetchedPartition:
    (fetched,) = await fetch_raw(
        client,
        1,
        [FetchPosition(partition.topic_id, partition.partition, offset)],
        max_bytes=1 << 20,
        max_wait_ms=100,
    )
    return fetched


async def answered(client: BrokerClient, partition: TopicIdPartition, offset: int) -> FetchedPartition:
    """Fetches, and retries as every client does."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            fetched = await fetch(client, partition, offset)
            if fetched.error != ErrorCode.REPLICA_NOT_AVAILABLE:
                return fetched
            await asyncio.sleep(0.1)


async def fetch_until(
    client: BrokerClient, partition: TopicIdPartition, holds: Callable[[FetchedPartition], bool]
) -> None:
    """Fetches offset 0 repeatedly. No answer may make a consumer reset its position."""
    async with asyncio.timeout(TIMEOUT_S):
        while not holds(fetched := await fetch(client, partition)):
            assert fetched.error in (ErrorCode.NONE, ErrorCode.REPLICA_NOT_AVAILABLE)
            await asyncio.sleep(0.1)


def replace_killed(tidegate: TidegateProcess, name: str) -> None:
    """Kills a process. Returns when another process has replaced it and is ready."""
    killed = tidegate.children()[name]
    os.kill(killed, signal.SIGKILL)
    deadline = time.monotonic() + TIMEOUT_S
    while tidegate.children().get(name, killed) == killed:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    tidegate.wait_until_ready()


Events = dict[int, Callable[[], None]]
"""Functions to call when that many records were read."""


def read_with_kafka_python(bootstrap: str, topic: str, count: int, events: Events) -> list[RECORD]:
    consumer = kafka_python.KafkaConsumer(
        bootstrap_servers=bootstrap,
        auto_offset_reset="none",
        max_partition_fetch_bytes=50_000,
        consumer_timeout_ms=int(1000 * TIMEOUT_S),
    )
    partition = kafka_python.TopicPartition(topic, 0)
    consumer.assign([partition])
    consumer.seek(partition, 0)
    found: list[RECORD] = []
    try:
        for message in consumer:
            found.append((message.offset, message.value))
            if len(found) in events:
                events[len(found)]()
            if len(found) == count:
                break
    finally:
        consumer.close()
    return found


def read_with_librdkafka(bootstrap: str, topic: str, count: int, events: Events) -> list[RECORD]:
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "unused",
            "auto.offset.reset": "error",
            "check.crcs": True,
            "fetch.message.max.bytes": 50_000,
            "queued.max.messages.kbytes": 100,
        }
    )
    consumer.assign([confluent_kafka.TopicPartition(topic, 0, 0)])
    found: list[RECORD] = []
    deadline = time.monotonic() + TIMEOUT_S
    try:
        while len(found) < count and time.monotonic() < deadline:
            for message in consumer.consume(1, 1.0):
                error = message.error()
                if error is not None:
                    assert error.code() != confluent_kafka.KafkaError._AUTO_OFFSET_RESET
                    continue
                offset, value = message.offset(), message.value()
                assert offset is not None
                assert isinstance(value, bytes)
                found.append((offset, value))
                if len(found) in events:
                    events[len(found)]()
    finally:
        consumer.close()
    return found


@pytest.mark.parametrize("read", [read_with_kafka_python, read_with_librdkafka])
async def test_no_record_is_lost_or_doubled_when_processes_die(
    kafka: KafkaCluster,
    tidegate: TidegateProcess,
    topic: str,
    read: Callable[[str, str, int, Events], list[RECORD]],
) -> None:
    values = random_values(2000)
    await asyncio.to_thread(produce, tidegate.bootstrap_servers, topic, values)
    await settled(kafka, topic)
    events: Events = {
        300: partial(replace_killed, tidegate, "worker-1"),
        600: partial(replace_killed, tidegate, "remote-reader"),
        900: partial(replace_killed, tidegate, "worker-2"),
        1200: partial(replace_killed, tidegate, "remote-reader"),
    }
    found = await asyncio.to_thread(read, tidegate.bootstrap_servers, topic, len(values), events)
    assert found == list(enumerate(values))
    assert samples(tidegate, "tidegate_process_restarts_total") == {
        "worker-1": 1,
        "worker-2": 1,
        "remote-log": 0,
        "remote-reader": 2,
    }


def samples(tidegate: TidegateProcess, name: str, **labels: str) -> dict[str, float]:
    """Returns the values of a metric by process."""
    return {
        sample.labels["process"]: sample.value
        for family in text_string_to_metric_families(tidegate.metrics())
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    }


async def test_records_are_stored_once_when_workers_die(tidegate: TidegateProcess, topic: str) -> None:
    values = random_values(3000)

    def sent() -> Iterator[bytes]:
        for number, value in enumerate(values):
            if number in (1000, 2000):
                replace_killed(tidegate, f"worker-{number // 1000}")
            yield value

    await asyncio.to_thread(produce, tidegate.bootstrap_servers, topic, sent())
    found = await asyncio.to_thread(read_with_librdkafka, tidegate.bootstrap_servers, topic, len(values), {})
    assert found == list(enumerate(values))


async def test_trimmed_offsets_are_unavailable_without_the_remote_log_process(
    kafka: KafkaCluster, tidegate: TidegateProcess, topic: str
) -> None:
    await asyncio.to_thread(produce, tidegate.bootstrap_servers, topic, random_values(1000))
    await settled(kafka, topic)
    async with client_of(tidegate.address) as client:
        partition = await topic_id_partition(client, topic)
        await fetch_until(client, partition, lambda fetched: len(fetched.records) > 0)
        stopped = tidegate.children()["remote-log"]
        await asyncio.to_thread(pause_process, stopped)
        await fetch_until(client, partition, lambda fetched: fetched.error == ErrorCode.REPLICA_NOT_AVAILABLE)
        last = await fetch(client, partition, 999)
        assert last.error == ErrorCode.NONE
        assert len(last.records) > 0
        await asyncio.to_thread(replace_killed, tidegate, "remote-log")
        await fetch_until(client, partition, lambda fetched: len(fetched.records) > 0)


async def test_records_deleted_through_one_worker_are_gone_from_all(
    kafka: KafkaCluster, tidegate: TidegateProcess, topic: str
) -> None:
    await asyncio.to_thread(produce, tidegate.bootstrap_servers, topic, random_values(1000))
    await settled(kafka, topic)

    def delete() -> int:
        """Deletes once. If a killed owner's transaction delays the write, the proxy waits for the client's timeout."""
        admin = confluent_kafka.admin.AdminClient({"bootstrap.servers": tidegate.bootstrap_servers})
        (result,) = admin.delete_records([confluent_kafka.TopicPartition(topic, 0, 77)]).values()
        return int(result.result(TIMEOUT_S).low_watermark)

    assert await asyncio.to_thread(delete) == 77
    for _ in range(8):
        async with client_of(tidegate.address) as client:
            partition = await topic_id_partition(client, topic)
            assert (await answered(client, partition, 76)).error == ErrorCode.OFFSET_OUT_OF_RANGE
            assert (await answered(client, partition, 77)).error == ErrorCode.NONE


def all_gone(pids: Sequence[int]) -> bool:
    return not any(is_running(pid) for pid in pids)


def wait_until_gone(pids: Sequence[int]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not all_gone(pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_sigterm_ends_everything_in_good_order(tidegate: TidegateProcess) -> None:
    children = tidegate.children()
    assert set(children) == NAMES
    os.kill(tidegate.pid, signal.SIGTERM)
    assert tidegate.wait() == 0
    assert all_gone(list(children.values()))


def test_children_end_with_a_killed_supervisor_and_a_new_one_starts(
    tidegate: TidegateProcess,
) -> None:
    children = tidegate.children()
    os.kill(tidegate.pid, signal.SIGKILL)
    assert tidegate.wait() == -signal.SIGKILL
    tidegate.start()
    wait_until_gone(list(children.values()))
    assert set(tidegate.children()) == NAMES
