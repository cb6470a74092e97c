"""Old message sets of magic 0 and 1 on a broker are copied, trimmed and read like any other records.

Current brokers do not write them, so the test puts the segment file into the log folder while the broker is down. The
proxy's answers after a trim must equal the broker's own answers before it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import confluent_kafka
import kafka as kafka_python
import pytest

from protocol.records.record_reader import Record
from tests.support.fakes.record_batches import legacy_message, legacy_wrapper, record
from tests.support.rigs.two_tiers_rig import TwoTiers, two_tiers
from tests.support.servers.kafka import CONSOLE_CONSUMER, KafkaCluster
from tests.support.servers.producing import create_topic, produce, random_values

pytestmark = pytest.mark.integration

TIMEOUT_S = 300.0
T0_MS = 1_600_000_000_000
PER_SET = 40
CODECS = range(4)
MAGIC_0 = [(0, codec, False) for codec in CODECS]
MAGIC_1 = [
    (1, codec, is_append_time) for codec in CODECS for is_append_time in (False, True) if codec or not is_append_time
]
KINDS = {
    "legacy-python": MAGIC_0[:-1] + MAGIC_1,
    "legacy-librdkafka": MAGIC_0 + MAGIC_1,
    "legacy-java": MAGIC_0 + MAGIC_1,
    "legacy-offsets": MAGIC_0 + MAGIC_1,
    "legacy-magic-0": MAGIC_0,
}
"""The kinds of message sets: magic, codec, and whether the wrapper has a log append time."""

PRODUCED = 60
"""The number of records in the current format behind the old ones."""


class Seen(NamedTuple):
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None


def message_sets(topic: str) -> list[bytes]:
    """Returns message sets of all kinds of a topic. The offsets are contiguous from 0 on."""
    sets: list[bytes] = []
    offset = 0
    for magic, codec, is_append_time in KINDS[topic]:
        made = [old_record(n) for n in range(offset, offset + PER_SET)]
        offset += PER_SET
        if codec:
            append_time = made[-1].timestamp if is_append_time else None
            sets.append(legacy_wrapper(magic, made[0].offset, made, codec, append_time))
        else:
            sets += [legacy_message(magic, r.offset, r.timestamp, r.key, r.value) for r in made]
    return sets


def old_records(topic: str) -> int:
    return PER_SET * len(KINDS[topic])


def old_record(offset: int) -> Record:
    """Returns a record. Every seventh has no key, every eleventh has no value, and some timestamps decrease."""
    timestamp = T0_MS + offset * 1000 - (5000 if offset % 10 == 9 else 0)
    key = None if offset % 7 == 0 else b"k%d" % offset
    value = None if offset % 11 == 0 else random.Random(offset).randbytes(300).hex().encode()
    return record(offset, timestamp, key, value)


@pytest.fixture(scope="module")
def old_cluster(kafka: KafkaCluster) -> KafkaCluster:
    """The cluster, with a topic of old segments for each of `KINDS`."""
    for topic in KINDS:
        create_topic(kafka.bootstrap_servers, topic, config={"retention.ms": "-1"})
    kafka.stop_broker(1)
    try:
        for topic in KINDS:
            lay_segment(kafka.log_folder(topic, 0), message_sets(topic))
    finally:
        kafka.start_broker(1)
    return kafka


def lay_segment(folder: Path, sets: Sequence[bytes]) -> None:
    for index in folder.glob("*.*index"):
        index.unlink()
    (folder / f"{0:020}.log").write_bytes(b"".join(sets))


def by_kafka_python(bootstrap: str, topic: str, offset: int, count: int) -> list[Seen]:
    consumer = kafka_python.KafkaConsumer(
        bootstrap_servers=bootstrap, auto_offset_reset="none", consumer_timeout_ms=120_000
    )
    partition = kafka_python.TopicPartition(topic, 0)
    consumer.assign([partition])
    consumer.seek(partition, offset)
    try:
        return [Seen(m.offset, m.timestamp, m.key, m.value) for _, m in zip(range(count), consumer, strict=False)]
    finally:
        consumer.close()


def by_librdkafka(bootstrap: str, topic: str, offset: int, count: int) -> list[Seen]:
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "unused", "auto.offset.reset": "error", "check.crcs": True}
    )
    consumer.assign([confluent_kafka.TopicPartition(topic, 0, offset)])
    found: list[Seen] = []
    deadline = time.monotonic() + TIMEOUT_S
    try:
        while len(found) < count and time.monotonic() < deadline:
            for message in consumer.consume(count - len(found), 1.0):
                assert message.error() is None, message.error()
                key, value, at = message.key(), message.value(), message.offset()
                assert at is not None
                assert key is None or isinstance(key, bytes)
                assert value is None or isinstance(value, bytes)
                found.append(Seen(at, message.timestamp()[1], key, value))
    finally:
        consumer.close()
    return found


Read = Callable[[str, str, int, int], list[Seen]]
CLIENTS: dict[str, Read] = {
    "legacy-python": by_kafka_python,
    "legacy-librdkafka": by_librdkafka,
}


async def trimmed(tiers: TwoTiers, topic: str) -> int:
    local_start = await tiers.settled(topic)
    assert local_start > old_records(topic) // 2
    return local_start


@pytest.mark.parametrize("topic", CLIENTS)
async def test_old_records_read_as_the_broker_gave_them(old_cluster: KafkaCluster, tmp_path: Path, topic: str) -> None:
    read, broker, old = CLIENTS[topic], old_cluster.bootstrap_servers, old_records(topic)
    await asyncio.to_thread(produce, broker, topic, random_values(PRODUCED))
    expected = await asyncio.to_thread(read, broker, topic, 0, old + PRODUCED)
    assert [(one.offset, one.key, one.value) for one in expected[:old]] == [
        (one.offset, one.key, one.value) for one in map(old_record, range(old))
    ]
    async with two_tiers(old_cluster, tmp_path, topic) as tiers:
        assert await trimmed(tiers, topic) >= old
        assert await asyncio.to_thread(read, tiers.bootstrap, topic, 0, old + PRODUCED) == expected
        for offset in (1, PER_SET, PER_SET + 17, 5 * PER_SET - 1, 5 * PER_SET + 3, old - 1):
            assert await asyncio.to_thread(read, tiers.bootstrap, topic, offset, 3) == expected[offset : offset + 3]
        assert tiers.storage.gets


async def test_the_java_client_reads_old_records(old_cluster: KafkaCluster, tmp_path: Path) -> None:
    topic = "legacy-java"
    await asyncio.to_thread(produce, old_cluster.bootstrap_servers, topic, [b"new-%d" % n for n in range(PRODUCED)])

    def read(bootstrap: str) -> list[str]:
        consumed = old_cluster.run_tool(
            CONSOLE_CONSUMER,
            *("--bootstrap-server", bootstrap, "--topic", topic, "--from-beginning"),
            *("--max-messages", str(old_records(topic) + PRODUCED), "--timeout-ms", "120000"),
            *("--formatter-property", "print.timestamp=true", "--formatter-property", "print.key=true"),
            *("--formatter-property", "print.offset=true"),
        )
        return consumed.stdout.splitlines()

    expected = await asyncio.to_thread(read, old_cluster.bootstrap_servers)
    assert len(expected) >= old_records(topic) + PRODUCED
    async with two_tiers(old_cluster, tmp_path, topic) as tiers:
        await tiers.settled(topic)
        assert await asyncio.to_thread(read, tiers.bootstrap) == expected


def offsets_for_times(bootstrap: str, topic: str, timestamps: Sequence[int]) -> list[tuple[int, int] | None]:
    consumer = kafka_python.KafkaConsumer(bootstrap_servers=bootstrap)
    partition = kafka_python.TopicPartition(topic, 0)
    try:
        found = [consumer.offsets_for_times({partition: at})[partition] for at in timestamps]
        return [None if one is None else (one.offset, one.timestamp) for one in found]
    finally:
        consumer.close()


async def test_timestamps_in_old_records_are_found_where_the_broker_found_them(
    old_cluster: KafkaCluster, tmp_path: Path
) -> None:
    topic = "legacy-offsets"
    broker = old_cluster.bootstrap_servers
    await asyncio.to_thread(produce, broker, topic, random_values(PRODUCED))
    last_ms = T0_MS + old_records(topic) * 1000
    inside = [T0_MS + n * 1000 + extra for n in range(3, old_records(topic), 31) for extra in (0, 1)]
    timestamps = [0, 1, T0_MS - 1, T0_MS, *inside, last_ms, last_ms + 1]
    expected = await asyncio.to_thread(offsets_for_times, broker, topic, timestamps)
    assert len({one for one in expected if one is not None}) > 10
    async with two_tiers(old_cluster, tmp_path, topic) as tiers:
        await trimmed(tiers, topic)
        assert await asyncio.to_thread(offsets_for_times, tiers.bootstrap, topic, timestamps) == expected


async def test_records_without_any_timestamp(old_cluster: KafkaCluster, tmp_path: Path) -> None:
    """No record of the current format follows: the log has only the current leader epoch, and no timestamps."""
    topic = "legacy-magic-0"
    broker = old_cluster.bootstrap_servers
    timestamps = [0, T0_MS]
    expected = await asyncio.to_thread(by_librdkafka, broker, topic, 0, old_records(topic))
    found = await asyncio.to_thread(offsets_for_times, broker, topic, timestamps)
    async with two_tiers(old_cluster, tmp_path, topic) as tiers:
        assert await tiers.settled(topic) > 0
        assert await asyncio.to_thread(by_librdkafka, tiers.bootstrap, topic, 0, old_records(topic)) == expected
        assert await asyncio.to_thread(offsets_for_times, tiers.bootstrap, topic, timestamps) == found
