"""A topic with two retentions: the broker empties the local tier by its own, and the total expires remote segments."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin._config import ConfigSource
from confluent_kafka.cimpl import KafkaError

from proxy.commands.check import check
from proxy.config import load_config
from tests.support.rigs import tier_command
from tests.support.rigs.strict_consumer import consumer_at, local_log_start, read, until_trimmed
from tests.support.rigs.topic_config_client import alter, described, replace
from tests.support.rigs.waiting import TIMEOUT_S, until
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import create_topic, produce, random_values
from tests.support.servers.tidegate import TidegateProcess, tidegate_over
from tiers.config.total_retention import RETENTION_BYTES, RETENTION_MINUTES

pytestmark = pytest.mark.integration

RECORDS = 6_000
MIB = 1 << 20
NINETY_DAYS = "129600"
LINE = f"{RETENTION_MINUTES} = {NINETY_DAYS}\n"
ALARM = "tidegate_remote_log_alarms_total"


def earliest(bootstrap: str, topic: str) -> int:
    with consumer_at(bootstrap, topic, 0) as consumer:
        return int(consumer.get_watermark_offsets(TopicPartition(topic, 0), TIMEOUT_S)[0])


def alarms(proxy: TidegateProcess, topic: str) -> dict[str, float]:
    """Returns how often each alarm of the topic has begun, without those that never did."""
    lines = [line for line in proxy.metrics().splitlines() if line.startswith(f"{ALARM}{{") and f'"{topic}"' in line]
    counts = {line.split('reason="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1]) for line in lines}
    return {reason: count for reason, count in counts.items() if count}


async def wait(condition: Callable[[], bool]) -> None:
    await asyncio.to_thread(until, condition)


@pytest.mark.full
async def test_the_broker_bounds_the_local_tier_and_the_total_is_ours(
    kafka: KafkaCluster, topic_name: str, tmp_path: Path
) -> None:
    topic, values = topic_name, random_values(RECORDS)
    rule = f'[[topics]]\nname = "{topic}"\nsegment.bytes = "1MiB"\nsegment.ms = "2s"\n'
    settings: dict[str, str | int] = {
        "remote.log.metadata.topic.name": f"__metadata-{topic}"[:200],
        "remote.log.visible.after.ms": 1000,
    }
    await asyncio.to_thread(create_topic, kafka.bootstrap_servers, topic)
    with tidegate_over(kafka, tmp_path, settings=settings, more=rule + LINE) as proxy:
        bootstrap = proxy.bootstrap_servers

        async def change(changes: dict[str, str | None]) -> int:
            (code,) = await asyncio.to_thread(alter, bootstrap, {topic: changes})
            return code

        async def recorded(key: str) -> tuple[str | None, bool]:
            entry = (await asyncio.to_thread(described, bootstrap, topic))[key]
            return entry.value, ConfigSource(entry.source) is ConfigSource.DYNAMIC_TOPIC_CONFIG

        await wait(lambda: described(bootstrap, topic)[RETENTION_MINUTES].value == NINETY_DAYS)
        assert await recorded(RETENTION_MINUTES) == (NINETY_DAYS, True)
        assert await recorded(RETENTION_BYTES) == ("-2", False)

        await asyncio.to_thread(produce, bootstrap, topic, values)
        while await remote_end(proxy, topic) != RECORDS - 1:  # noqa: ASYNC110 - another process copies
            await asyncio.sleep(0.5)
        assert await change({"retention.bytes": str(MIB)}) == 0
        await asyncio.to_thread(until_trimmed, kafka, topic, RECORDS // 2)
        assert await asyncio.to_thread(earliest, bootstrap, topic) == 0
        with consumer_at(bootstrap, topic, 0) as consumer:
            assert await asyncio.to_thread(read, consumer, RECORDS) == list(enumerate(values))
        report = await check(load_config(proxy.config), proxy.config)
        assert not [problem for problem in report.problems if topic in problem]

        # A change that would shorten the total without a number is refused, or leaves the total unchanged.
        assert await change({RETENTION_MINUTES: None}) == KafkaError.INVALID_CONFIG
        assert await asyncio.to_thread(replace, bootstrap, topic, {"retention.bytes": str(MIB)}) == 0
        assert await recorded(RETENTION_MINUTES) == (NINETY_DAYS, True)

        # While the file differs, a shorter total expires nothing.
        assert await change({RETENTION_MINUTES: "129599", RETENTION_BYTES: str(2 * MIB)}) == 0
        await wait(lambda: alarms(proxy, topic).get("retention-differs", 0) > 0)
        report = await check(load_config(proxy.config), proxy.config)
        assert [problem for problem in report.problems if problem.startswith(f"{topic}: nothing expires")]
        assert await asyncio.to_thread(earliest, bootstrap, topic) == 0
        assert set(alarms(proxy, topic)) == {"retention-differs"}

    with tidegate_over(kafka, tmp_path, settings=settings, more=rule) as proxy:
        bootstrap = proxy.bootstrap_servers
        await wait(lambda: earliest(bootstrap, topic) > RECORDS // 2)
        start = await asyncio.to_thread(earliest, bootstrap, topic)
        assert start <= local_log_start(kafka, topic)
        with consumer_at(bootstrap, topic, start) as consumer:
            kept = await asyncio.to_thread(read, consumer, RECORDS - start)
        assert kept == list(enumerate(values))[start:]
        await wait(lambda: stored_bytes(tmp_path) < 3 * MIB)
        assert stored_bytes(tmp_path) >= 2 * MIB


async def remote_end(proxy: TidegateProcess, topic: str) -> int | None:
    code, out, _ = await tier_command.run(proxy.config, "bounds", topic, "--json")
    assert code == 0, out
    found: int | None = json.loads(out)[0]["remote_end"]
    return found


def stored_bytes(home: Path) -> int:
    return sum(path.stat().st_size for path in (home / "tier").rglob("*.log"))
