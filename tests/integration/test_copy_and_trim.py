"""Copy and trim on a real broker, in a process that is killed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.rigs.killed_copier import LIMIT_S, STEPS, TIMEOUT_MS, Tiers, copier, until_settled
from tests.support.servers.copier import CopierOptions
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import (
    TopicWith,
    produce_transaction,
    random_values,
    topic_id_partition,
)
from tiers.broker.client import BrokerClient
from tiers.log.broker_log import BrokerLogSource

pytestmark = pytest.mark.integration


@asynccontextmanager
async def made_tiers(kafka: KafkaCluster, client: BrokerClient, topic: str, folder: Path) -> AsyncIterator[Tiers]:
    """Makes a topic. Waits for the transaction markers, which brokers write after the commit has returned."""
    partition = await topic_id_partition(client, topic)
    source = BrokerLogSource(client)
    async with asyncio.timeout(120):
        while True:
            bounds = await source.bounds(partition, TIMEOUT_MS)
            if bounds.last_stable_offset == bounds.high_watermark:
                break
            await asyncio.sleep(0.05)
    options = CopierOptions(kafka.address(), topic, str(folder))
    reader = options.following("reader")
    await reader.open()
    try:
        yield Tiers(kafka, source, partition, options, reader)
    finally:
        await reader.close()


async def test_the_remote_tier_holds_the_brokers_own_segment_file_byte_for_byte(
    kafka: KafkaCluster, client: BrokerClient, topic_name: str, topic_with: TopicWith, tmp_path: Path
) -> None:
    topic_with(200)
    produce_transaction(kafka.bootstrap_servers, topic_name, random_values(20), transactional_id="a", commit=False)
    produce_transaction(kafka.bootstrap_servers, topic_name, random_values(20), transactional_id="b", commit=True)
    async with made_tiers(kafka, client, topic_name, tmp_path) as tiers:
        await until_settled(tiers, tiers.options)
        assert await tiers.remote_bytes() == tiers.original
        assert len(await tiers.segments()) >= 7
        await tiers.check_that_nothing_is_left_over()


async def test_a_copier_killed_after_a_step_loses_nothing(
    kafka: KafkaCluster,
    client: BrokerClient,
    topic_name: str,
    topic_with: TopicWith,
    tmp_path: Path,
) -> None:
    """Of all steps, test_copy_crash.py shows it with the metadata topic."""
    step, at = STEPS[2]
    topic_with(120)
    async with made_tiers(kafka, client, topic_name, tmp_path) as tiers:
        async with copier(replace(tiers.options, kill_after=step, kill_at=at)) as process:
            assert await asyncio.wait_for(process.wait(), LIMIT_S) == -signal.SIGKILL
        await tiers.check_that_every_offset_is_readable()

        await until_settled(tiers, tiers.options)
        assert await tiers.remote_bytes() == tiers.original
        await tiers.check_that_every_offset_is_readable()
        await tiers.check_that_nothing_is_left_over()
