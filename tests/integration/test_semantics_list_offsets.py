"""ListOffsets over both tiers answers as the broker did with the whole log, and never skips remote records.

The test first asks the broker, at every version and with both isolation levels. Then the tiers share the log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import Producer

from protocol.errors import ErrorCode
from tests.support.rigs.late_tier import Answer, listed
from tests.support.rigs.two_tiers_rig import PATTERN, TwoTiers, two_tiers
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.peer import Peer
from tests.support.servers.producing import create_topic, filled_topic, produce, random_values, transactional_producer

pytestmark = pytest.mark.integration

TIMEOUT_S = 300.0
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
VERSIONS = range(1, 12)
LATEST, EARLIEST, MAX_TIMESTAMP, EARLIEST_LOCAL, LATEST_TIERED, EARLIEST_PENDING_UPLOAD = range(-1, -7, -1)
BEGINNING_MS = 1_600_000_000_000
COUNT = 150
KEEP = {"retention.ms": "-1"}


def timestamp_of(number: int) -> int:
    """Timestamps are ten milliseconds apart. Every eleventh is in the past, and one in each tier is in the future."""
    shift = -600 if number % 11 == 5 else 0
    return BEGINNING_MS + 10 * number + shift + (10_000 if number in (20, 140) else 0)


LOOK_UPS = sorted(
    {
        *(BEGINNING_MS + 10 * number for number in range(-2, COUNT + 2, 7)),
        *(BEGINNING_MS + 10 * number - 3 for number in range(0, COUNT, 13)),
        *(timestamp_of(number) + more for number in (0, 5, 20, 100, 140, COUNT - 1) for more in (-1, 0, 1)),
    }
)


def produce_with_timestamps(
    bootstrap: str, topic: str, partition: int, codec: str, of_number: Callable[[int], int] = timestamp_of
) -> None:
    """Produces exactly ten records per batch, so that the border of the tiers does not depend on timing."""
    settings: dict[str, str | int | float | bool] = {"batch.num.messages": 10, "linger.ms": 60_000}
    settings |= {"enable.idempotence": True, "compression.type": codec}
    producer = Producer({"bootstrap.servers": bootstrap, **settings})
    for number, value in enumerate(random_values(COUNT)):
        producer.produce(topic, value, partition=partition, timestamp=of_number(number))
        if number % 10 == 9:
            assert producer.flush(TIMEOUT_S) == 0


def ask_everything(
    address: tuple[str, int], topic: str, partitions: int, timestamps: list[int]
) -> dict[tuple[int, int, int], list[Answer]]:
    """Returns the answers for all partitions, by version, isolation level and timestamp."""
    found = {}
    with Peer(address) as peer:
        for version in VERSIONS:
            for isolation_level in (0, 1) if version >= 2 else (0,):
                for timestamp in timestamps:
                    asked = [(partition, timestamp) for partition in range(partitions)]
                    answers = listed(peer, version, topic, asked, isolation_level=isolation_level)
                    found[version, isolation_level, timestamp] = answers
    return found


@pytest.mark.full
async def test_every_version_by_timestamp_and_by_name(kafka: KafkaCluster, tmp_path: Path, topic: str) -> None:
    """The partitions have all codecs. The newest timestamp is remote, and the local tier has another newest one."""
    create_topic(kafka.bootstrap_servers, topic, partitions=len(CODECS), config=KEEP)
    for partition, codec in enumerate(CODECS):
        await asyncio.to_thread(produce_with_timestamps, kafka.bootstrap_servers, topic, partition, codec)
    asked = [*LOOK_UPS[::9], *range(-1, -8, -1)]
    before = await asyncio.to_thread(ask_everything, kafka.address(), topic, len(CODECS), asked)
    dense = await asyncio.to_thread(ask_densely, kafka.address(), topic)
    async with two_tiers(kafka, tmp_path, PATTERN) as tiers:
        starts = [await tiers.settled(topic, partition) for partition in range(len(CODECS))]
        assert all(20 < start <= 140 for start in starts)
        after = await asyncio.to_thread(ask_everything, tiers.address, topic, len(CODECS), asked)
        assert await asyncio.to_thread(ask_densely, tiers.address, topic) == dense
        assert tiers.storage.gets
    end = COUNT - 1
    for (version, isolation_level, timestamp), answers in after.items():
        expected = before[version, isolation_level, timestamp]
        if timestamp == MAX_TIMESTAMP and version < 7:
            expected = [(partition, 0, -1, end + 1, -1) for partition in range(len(CODECS))]
        if timestamp == EARLIEST_LOCAL and version >= 8:
            expected = [(partition, 0, -1, start, 0) for partition, start in enumerate(starts)]
        if timestamp == LATEST_TIERED and version >= 9:
            expected = [(partition, 0, -1, end, 0) for partition in range(len(CODECS))]
        if timestamp == EARLIEST_PENDING_UPLOAD and version >= 11:
            expected = [(partition, 0, -1, end + 1, -1) for partition in range(len(CODECS))]
        assert sorted(answers) == sorted(expected), (version, isolation_level, timestamp)


def ask_densely(address: tuple[str, int], topic: str) -> list[list[Answer]]:
    with Peer(address) as peer:
        return [
            listed(peer, 7, topic, [(partition, timestamp) for partition in range(len(CODECS))])
            for timestamp in [*LOOK_UPS, MAX_TIMESTAMP]
        ]


async def test_the_greatest_timestamp_stands_in_both_tiers(kafka: KafkaCluster, tmp_path: Path, topic: str) -> None:
    """The answer is the earlier record, as the broker answered with the whole log."""
    create_topic(kafka.bootstrap_servers, topic, config=KEEP)

    def of_number(number: int) -> int:
        return BEGINNING_MS + (10_000 if number in (30, 33, 145) else 0)

    await asyncio.to_thread(produce_with_timestamps, kafka.bootstrap_servers, topic, 0, "none", of_number)
    asked = [MAX_TIMESTAMP, BEGINNING_MS + 1, BEGINNING_MS + 10_000]
    before = await asyncio.to_thread(ask_of_one, kafka.address(), topic, asked)
    assert before == [[(0, 0, BEGINNING_MS + 10_000, 30, 0)]] * 3
    async with two_tiers(kafka, tmp_path, PATTERN) as tiers:
        assert 33 < await tiers.settled(topic) <= 145
        assert await asyncio.to_thread(ask_of_one, tiers.address, topic, asked) == before


@pytest.mark.full
async def test_log_append_time(kafka: KafkaCluster, tmp_path: Path, topic: str) -> None:
    """All records of a batch have the same timestamp. The answer is the first record."""
    config = {"message.timestamp.type": "LogAppendTime"}
    create_topic(kafka.bootstrap_servers, topic, config=config)
    for _ in range(10):
        await asyncio.to_thread(produce, kafka.bootstrap_servers, topic, random_values(10))
    with Peer(kafka.address()) as peer:
        (_, _, newest_ms, _, _), *_ = peer.list_offsets(7, topic, [(0, MAX_TIMESTAMP)])
        (_, _, oldest_ms, _, _), *_ = peer.list_offsets(7, topic, [(0, 0)])
    asked = [0, MAX_TIMESTAMP, *range(oldest_ms - 2, newest_ms + 3, max(1, (newest_ms - oldest_ms) // 100))]
    before = await asyncio.to_thread(ask_of_one, kafka.address(), topic, asked)
    async with two_tiers(kafka, tmp_path, PATTERN) as tiers:
        await tiers.settled(topic)
        assert await asyncio.to_thread(ask_of_one, tiers.address, topic, asked) == before


def ask_of_one(
    address: tuple[str, int], topic: str, timestamps: list[int], isolation_level: int = 0
) -> list[list[Answer]]:
    with Peer(address) as peer:
        return [listed(peer, 9, topic, [(0, one)], isolation_level=isolation_level) for one in timestamps]


@pytest.mark.full
async def test_an_open_transaction_bounds_committed_look_ups(kafka: KafkaCluster, tmp_path: Path, topic: str) -> None:
    """The newest timestamps are above the last stable offset. That hides them only from read_committed."""
    await asyncio.to_thread(filled_topic, kafka.bootstrap_servers, topic, 120)
    producer = transactional_producer(kafka.bootstrap_servers, topic)
    producer.begin_transaction()
    for value in random_values(20):
        producer.produce(topic, value, partition=0)
    assert producer.flush(TIMEOUT_S) == 0
    with Peer(kafka.address()) as peer:
        (_, _, newest_ms, _, _), *_ = peer.list_offsets(7, topic, [(0, MAX_TIMESTAMP)])
    asked = [-1, -2, -3, 0, *range(newest_ms - 400, newest_ms + 2, 10), newest_ms]
    before = [await asyncio.to_thread(ask_of_one, kafka.address(), topic, asked, level) for level in (0, 1)]
    assert before[0] != before[1]
    async with two_tiers(kafka, tmp_path, PATTERN) as tiers:
        assert await tiers.settled(topic, is_decided=False) > 0
        after = [await asyncio.to_thread(ask_of_one, tiers.address, topic, asked, level) for level in (0, 1)]
    producer.abort_transaction(TIMEOUT_S)
    assert after == before


async def test_partitions_of_both_kinds_and_duplicates_in_one_request(tiers: TwoTiers, topic: str) -> None:
    """One partition is trimmed, one is local, one is empty. One is named twice, which the broker refuses."""
    create_topic(tiers.kafka.bootstrap_servers, topic, partitions=4, config=KEEP)
    for partition in (0, 3):
        await asyncio.to_thread(produce_with_timestamps, tiers.kafka.bootstrap_servers, topic, partition, "none")
    await asyncio.to_thread(produce, tiers.kafka.bootstrap_servers, topic, [b"v"], partition=1)
    for partition in (0, 3):
        await tiers.settled(topic, partition)

    def ask() -> list[Answer]:
        with Peer(tiers.address) as peer:
            asked = [(0, EARLIEST), (1, EARLIEST), (2, EARLIEST), (3, EARLIEST), (3, BEGINNING_MS)]
            return listed(peer, 11, topic, asked)

    def ask_broker() -> list[Answer]:
        with Peer(tiers.kafka.address()) as peer:
            return peer.list_offsets(11, topic, [(2, EARLIEST), (3, EARLIEST), (3, BEGINNING_MS)])

    answers = await asyncio.to_thread(ask)
    # The broker answers in the order of a hash. It answers once for a partition that is named twice.
    empty, twice = sorted(await asyncio.to_thread(ask_broker))
    assert twice[:2] == (3, ErrorCode.INVALID_REQUEST)
    assert sorted(answers) == [(0, 0, -1, 0, 0), (1, 0, -1, 0, 0), empty, twice]
