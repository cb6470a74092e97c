"""`__delete_failed_remote_log_segments` on a real broker, and `tidegate tier failed-deletes`, which lists it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import patch
from uuid import UUID, uuid4

import pytest
from typer.testing import CliRunner

from proxy import cli
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import create_topic, delete_topic
from tiers.broker.client import BrokerClient
from tiers.tasks.deletion.failed_deletions import (
    FAILED_DELETIONS_TOPIC,
    FailedDeletion,
    FailedDeletionsTopic,
    read_failed_deletions,
)

pytestmark = pytest.mark.integration
TIMEOUT_MS = 300_000


def failed(number: int) -> FailedDeletion:
    return FailedDeletion(
        "orders", str(uuid4()), 3, str(uuid4()), number * 10, number * 10 + 9, 1 << 20, 5, 1_700_000_000_000, 0, "403"
    )


async def listed(config: Path, *options: str) -> str:
    """Runs the command with retries."""
    arguments = ["tier", "failed-deletes", "--config", str(config), *options]
    with (
        patch("tiers.access.open_tier.TIMEOUT_MS", TIMEOUT_MS),
        patch("proxy.commands.tier.failed_deletes.TIMEOUT_MS", TIMEOUT_MS),
    ):
        done = await asyncio.to_thread(CliRunner().invoke, cli.app, arguments)
    assert done.exit_code == 0, done.output
    return done.output


async def test_a_published_failure_is_listed_until_it_is_taken_back(
    kafka: KafkaCluster, topic_name: str, tmp_path: Path
) -> None:
    await asyncio.to_thread(create_topic, kafka.bootstrap_servers, topic_name)
    config = tmp_path / "tidegate.toml"
    config.write_text(
        f'remote.log.metadata.topic.name = "{topic_name}"\n[upstream]\n'
        f'bootstrap.servers = "{kafka.bootstrap_servers}"\n'
    )
    client = BrokerClient([kafka.address()], client_id="test")
    # A process that read the cluster's metadata before the topic existed.
    another = BrokerClient([kafka.address()], client_id="another")
    topic = FailedDeletionsTopic(client, TIMEOUT_MS)
    try:
        await another.open()
        first, second = failed(1), replace(failed(2), topic="payments")
        await topic.retract(UUID(first.segment))
        assert FAILED_DELETIONS_TOPIC not in (await client.metadata()).topics
        assert json.loads(await listed(config, "--json")) == []

        await topic.publish(first)
        await topic.publish(second)
        again = replace(first, attempts=6, error="403 [still]")
        await FailedDeletionsTopic(client, TIMEOUT_MS).publish(again)
        assert await read_failed_deletions(client, TIMEOUT_MS) == [again, second]
        assert json.loads(await listed(config, "--json")) == [asdict(again), asdict(second)]
        table = await listed(config)
        for word in ("orders-3", again.segment, "403 [still]", "payments-3", "2023-11-14T22:13:20+00:00"):
            assert word in table

        await FailedDeletionsTopic(another, TIMEOUT_MS).retract(UUID(first.segment))
        assert await read_failed_deletions(client, TIMEOUT_MS) == [second]
        await topic.retract(UUID(second.segment))
        assert json.loads(await listed(config, "--json")) == []
    finally:
        await client.close()
        await another.close()
        await asyncio.to_thread(delete_topic, kafka.bootstrap_servers, FAILED_DELETIONS_TOPIC)
