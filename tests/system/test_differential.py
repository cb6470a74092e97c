"""A heavily trimmed topic read through Tidegate equals an untrimmed topic read directly."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import ConfigResource
from confluent_kafka.admin._resource import ResourceType

from tests.support.clients.all_clients import CLIENTS
from tests.support.clients.client import READ_COMMITTED, READ_UNCOMMITTED, Client, OffsetOutOfRange
from tests.support.rigs.differential_answers import protocol_answers
from tests.support.rigs.differential_workload import (
    MAX_MESSAGE_BYTES,
    Operation,
    Topic,
    Trim,
    delete_records,
    operations,
    run,
)
from tests.support.rigs.strict_consumer import local_log_start, until_trimmed
from tests.support.rigs.waiting import TIMEOUT_S
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import create_topic
from tests.support.servers.tidegate import tidegate_over

pytestmark = pytest.mark.integration

MUST_DIFFER = frozenset(
    {
        "remote.storage.enable",
        "local.retention.ms",
        "local.retention.bytes",
        "remote.copy.lag.bytes",
        "remote.copy.lag.ms",
        "remote.log.retention.minutes",
        "remote.log.retention.bytes",
    }
)
"""The settings of the tier itself, which are the only visible difference between the two topics."""

REFUSED = {"MSG_SIZE_TOO_LARGE", "INVALID_CONFIG", "OFFSET_OUT_OF_RANGE", "_FENCED"}
"""The errors that every workload must cause."""

SEEKS = 6
SEEDS = os.environ.get("TIDEGATE_SEEDS", "1")
"""The number of seeds, or, with a comma, the seeds themselves: `TIDEGATE_SEEDS=20`, `TIDEGATE_SEEDS=17,`."""


def seeds() -> list[int]:
    if "," in SEEDS:
        return [int(each) for each in SEEDS.split(",") if each]
    # All processes of a run must collect the same tests, so the seeds depend on the run's id.
    dice = random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID"))
    return [dice.randrange(1 << 32) for _ in range(int(SEEDS))]


@pytest.mark.parametrize("seed", seeds())
def test_every_client_sees_one_log(kafka: KafkaCluster, tmp_path: Path, topic_name: str, seed: int) -> None:
    dice = random.Random(seed)
    settings: dict[str, str | int] = {
        "remote.log.metadata.topic.name": f"__metadata-{topic_name}"[:200],
        "remote.log.visible.after.ms": 2000,
    }
    tiered_name = f"{topic_name}-tiered"
    with tidegate_over(kafka, tmp_path, tiered=[tiered_name], segment_bytes=30_000, settings=settings) as proxy:
        plain = Topic(kafka.bootstrap_servers, f"{topic_name}-plain")
        tiered = Topic(proxy.bootstrap_servers, tiered_name)
        for topic in (plain, tiered):
            create_topic(topic.bootstrap, topic.name, config={"max.message.bytes": str(MAX_MESSAGE_BYTES)})

        def apply(todo: list[Operation]) -> None:
            for operation in todo:
                run(plain, operation)
                run(tiered, operation)
                assert tiered.outcomes[-1] == plain.outcomes[-1], operation
            assert (tiered.offsets, tiered.committed) == (plain.offsets, plain.committed)

        now_ms = int(time.time() * 1000)
        apply(operations(dice, 26, now_ms))
        first_end = tiered.log_end
        apply(operations(dice, 20, now_ms))
        until_trimmed(kafka, tiered.name, first_end)
        assert local_log_start(kafka, plain.name) == 0
        compare(dice, plain, tiered, now_ms)

        # The trims are below and above the end of the remote tier, and beyond the log end, which is refused.
        apply([Trim(0.1), Trim(1.5), Trim(0.3), *operations(dice, 20, now_ms)])
        compare(dice, plain, tiered, now_ms)
        apply([Trim(0.95)])
        compare(dice, plain, tiered, now_ms)
        assert delete_records(tiered, -1) == delete_records(plain, -1)
        for client in CLIENTS.values():
            same(offsets_at(client, now_ms), plain, tiered)
        assert proxy.metric("tidegate_request_latency_seconds_count", api="Fetch", tier="remote") > 0
        assert refusals(plain) == REFUSED
        for topic in (plain, tiered):
            topic.close()


def compare(dice: random.Random, plain: Topic, tiered: Topic, now_ms: int) -> None:
    """Compares both logs: all records at both isolation levels, seeks, errors, timestamps and settings."""
    assert configuration(tiered) == configuration(plain)
    seeks = [dice.randrange(plain.log_end) for _ in range(SEEKS)]
    seeks += [max(0, plain.log_start - 1), plain.log_start, plain.log_end + 1]
    times = [0, now_ms, now_ms + 3_600_000, *(now_ms - dice.randrange(3_600_000) for _ in range(3))]
    isolations = [dice.choice((READ_COMMITTED, READ_UNCOMMITTED)) for _ in seeks]

    def compare_by(client: Client) -> None:
        for isolation in (READ_COMMITTED, READ_UNCOMMITTED):
            same(reading(client, plain.log_start, 1 << 20, isolation), plain, tiered)
        for offset, isolation in zip(seeks, isolations, strict=True):
            same(reading(client, offset, 25, isolation), plain, tiered)
        for timestamp in times:
            same(offsets_at(client, timestamp), plain, tiered)

    with ThreadPoolExecutor(len(CLIENTS)) as pool:
        list(pool.map(compare_by, CLIENTS.values()))
    same(lambda topic: protocol_answers(topic, times, now_ms), plain, tiered)


def offsets_at(client: Client, timestamp: int) -> Callable[[Topic], object]:
    return lambda topic: client.offsets(topic.bootstrap, topic.name, timestamp)


def reading(client: Client, offset: int, at_most: int, isolation: str) -> Callable[[Topic], object]:
    def read(topic: Topic) -> object:
        there = topic.committed if isolation == READ_COMMITTED else topic.offsets
        count = min(at_most, sum(each >= offset for each in there))
        if not count and topic.log_start <= offset <= topic.log_end:
            return []  # no record to wait for
        try:
            return client.read(topic.bootstrap, topic.name, offset, max(1, count), isolation)
        except OffsetOutOfRange:
            return "OFFSET_OUT_OF_RANGE"

    return read


def same(see: Callable[[Topic], object], plain: Topic, tiered: Topic) -> None:
    assert see(tiered) == see(plain)


def refusals(topic: Topic) -> set[str]:
    answers = [each for outcome in topic.outcomes for each in (outcome if isinstance(outcome, list) else [outcome])]
    return {each for each in answers if isinstance(each, str)}


def configuration(topic: Topic) -> dict[str, str | None]:
    resource = ConfigResource(ResourceType.TOPIC, topic.name)
    admin = AdminClient({"bootstrap.servers": topic.bootstrap})
    described = admin.describe_configs([resource])[resource].result(TIMEOUT_S)
    return {name: entry.value for name, entry in described.items() if name not in MUST_DIFFER}
