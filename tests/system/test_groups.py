"""Classic and new consumer groups, and the tools that use them, over topics whose head is remote."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from functools import partial

import confluent_kafka
import kafka as kafka_python
import pytest

from tests.support.rigs.two_tiers_rig import TwoTiers
from tests.support.servers.kafka import CONSUMER_GROUP_COMMAND
from tests.support.servers.producing import create_topic, produce, random_values, transactional_producer

pytestmark = pytest.mark.integration

TIMEOUT_S = 300.0
PROTOCOLS = ["classic", "consumer"]
RECORD = tuple[str, int, int, bytes]
"""A record: topic, partition, offset and value."""


async def fill(tiers: TwoTiers, topic: str, partitions: int, count: int) -> set[RECORD]:
    """Creates a topic. Most of each partition is remote."""
    create_topic(tiers.kafka.bootstrap_servers, topic, partitions=partitions)
    made: set[RECORD] = set()
    for n in range(partitions):
        values = random_values(count)
        await asyncio.to_thread(partial(produce, tiers.bootstrap, topic, values, partition=n))
        made |= {(topic, n, offset, value) for offset, value in enumerate(values)}
    for n in range(partitions):
        assert await tiers.settled(topic, n) > 0
    return made


class Member(threading.Thread):
    """A consumer that polls until `leave`."""

    def __init__(self, bootstrap: str, group: str, protocol: str, topics: Sequence[str]) -> None:
        super().__init__(daemon=True)
        self.records: list[RECORD] = []
        self.assigned = threading.Event()
        self.failures: list[confluent_kafka.KafkaError] = []
        self._leave = threading.Event()
        self._consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": group,
                "group.protocol": protocol,
                "auto.offset.reset": "earliest",
                "auto.commit.interval.ms": 200,
                "topic.metadata.refresh.interval.ms": 500,
                "fetch.queue.backoff.ms": 10,
            }
        )
        self._consumer.subscribe(list(topics), on_assign=self._on_assign)
        self.start()

    def _on_assign(self, consumer: confluent_kafka.Consumer, partitions: list[confluent_kafka.TopicPartition]) -> None:
        if partitions:
            self.assigned.set()

    def run(self) -> None:
        while not self._leave.is_set():
            for message in self._consumer.consume(100, 0.1):
                error, at = message.error(), message.offset()
                topic, partition, value = message.topic(), message.partition(), message.value()
                if error is not None:
                    self.failures.append(error)
                elif at is not None and topic is not None and partition is not None and isinstance(value, bytes):
                    self.records.append((topic, partition, at, value))
        self._consumer.close()

    def leave(self) -> None:
        self._leave.set()
        self.join(TIMEOUT_S)
        assert not self.is_alive()
        assert self.failures == []


async def until_read(wanted: set[RECORD], *members: Member) -> None:
    def wait() -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not wanted <= {one for member in members for one in member.records}:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    await asyncio.to_thread(wait)


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_two_members_rebalance_over_both_tiers_and_tools_see_their_lag(
    tiers: TwoTiers, topic: str, protocol: str
) -> None:
    made = await fill(tiers, topic, 2, 120)
    first = Member(tiers.bootstrap, topic, protocol, [topic])
    await asyncio.to_thread(first.assigned.wait, TIMEOUT_S)
    second = Member(tiers.bootstrap, topic, protocol, [topic])
    assert await asyncio.to_thread(second.assigned.wait, TIMEOUT_S), "the second member gets no partition"
    await until_read(made, first, second)
    await asyncio.to_thread(second.leave)
    more = random_values(10)
    for n in range(2):
        await asyncio.to_thread(partial(produce, tiers.bootstrap, topic, more, partition=n))
    added = {(topic, n, 120 + at, value) for n in range(2) for at, value in enumerate(more)}
    await until_read(made | added, first, second)
    await asyncio.to_thread(first.leave)
    assert {*first.records, *second.records} == made | added

    def groups_tool(*args: str) -> list[list[str]]:
        done = tiers.kafka.run_tool(
            CONSUMER_GROUP_COMMAND,
            *("--bootstrap-server", tiers.bootstrap, "--timeout", "120000", "--group", topic, *args),
        )
        return [line.split() for line in done.stdout.splitlines() if topic in line]

    described = await asyncio.to_thread(groups_tool, "--describe")
    lags = {row[2]: row[3:6] for row in described if row[0] == topic and row[1] == topic}
    assert lags == {"0": ["130", "130", "0"], "1": ["130", "130", "0"]}
    if protocol == "classic":
        reset = ("--reset-offsets", "--to-earliest", "--topic", topic, "--execute")
        rows = await asyncio.to_thread(groups_tool, *reset)
        assert sorted((row[2], row[3]) for row in rows) == [("0", "0"), ("1", "0")]


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_pattern_finds_topics_that_are_remote_and_those_that_come_later(
    tiers: TwoTiers, topic: str, protocol: str
) -> None:
    """MirrorMaker subscribes with a pattern too."""
    made = await fill(tiers, f"{topic}-a", 1, 120)
    member = Member(tiers.bootstrap, topic, protocol, [f"^{topic}-.*"])
    await until_read(made, member)
    made |= await fill(tiers, f"{topic}-b", 1, 120)
    await until_read(made, member)
    await asyncio.to_thread(member.leave)
    assert sorted(member.records) == sorted(made), "nothing twice"


async def test_offsets_are_committed_in_transactions_that_read_the_remote_tier(tiers: TwoTiers, topic: str) -> None:
    """Consumes, transforms and produces exactly once. Every second attempt is aborted and repeated."""
    made = [value for _, _, _, value in sorted(await fill(tiers, topic, 1, 120))]
    out = f"{topic}-out"
    create_topic(tiers.kafka.bootstrap_servers, out)

    def transform() -> None:
        consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": tiers.bootstrap,
                "group.id": topic,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
            }
        )
        consumer.subscribe([topic])
        producer = transactional_producer(tiers.bootstrap, topic)
        position, attempts = 0, 0
        deadline = time.monotonic() + TIMEOUT_S
        while position < len(made):
            assert time.monotonic() < deadline
            messages = consumer.consume(20, 1.0)
            if not messages:
                continue
            producer.begin_transaction()
            for message in messages:
                assert message.error() is None
                producer.produce(out, message.value())
            at = confluent_kafka.TopicPartition(topic, 0, (messages[-1].offset() or 0) + 1)
            producer.send_offsets_to_transaction([at], consumer.consumer_group_metadata(), TIMEOUT_S)
            attempts += 1
            if attempts % 2:
                producer.abort_transaction(TIMEOUT_S)
                consumer.seek(confluent_kafka.TopicPartition(topic, 0, position))
            else:
                producer.commit_transaction(TIMEOUT_S)
                position = at.offset
        (committed,) = consumer.committed([confluent_kafka.TopicPartition(topic, 0)], TIMEOUT_S)
        assert committed.offset == len(made)
        consumer.close()

    def results() -> list[bytes]:
        consumer = kafka_python.KafkaConsumer(
            out,
            bootstrap_servers=tiers.bootstrap,
            auto_offset_reset="earliest",
            isolation_level="read_committed",
            consumer_timeout_ms=120_000,
        )
        try:
            return [message.value for _, message in zip(range(len(made)), consumer, strict=False)]
        finally:
            consumer.close()

    await asyncio.to_thread(transform)
    await tiers.settled(out)
    assert await asyncio.to_thread(results) == made
