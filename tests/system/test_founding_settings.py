"""A proxy whose settings have the names of docs/founding.md copies, trims and serves a backfill."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from tests.support.repository import ROOT
from tests.support.rigs.strict_consumer import consumer_at, read, until_trimmed
from tests.support.rigs.topic_config_client import described
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.ports import consecutive_free_ports, free_ports
from tests.support.servers.producing import create_topic, produce, random_values
from tests.support.servers.tidegate import TidegateProcess
from tiers.config.total_retention import RETENTION_BYTES, RETENTION_MINUTES

pytestmark = pytest.mark.integration

RECORDS = 4_000
FOUNDING_KEYS = """\
remote.log.storage.enable = true
remote.log.storage.manager.class.name = "local"
remote.log.metadata.manager.class.name = "topic_based"
remote.log.manager.thread.pool.size = 2
rlm_process_interval_ms = 1000
rlm_retry_interval_ms = 500
remote.log.reader.threads = 3
remote.log.reader.max.pending.tasks = 20
remote.log.metadata.custom.metadata.max.bytes = 0
"""
"""The top of the file. Two keys of the managers are added to it: the folder of the store, and the name of the metadata
topic, since tests share a cluster."""

FOUNDING_TOPIC_KEYS = """\
remote.log.retention.minutes = 20160
remote.log.retention.bytes = -1
"""
"""Longer than the seven days of the broker: a first total that is shorter needs a confirmed command."""


def proxy_with_founding_keys(cluster: KafkaCluster, home: Path, topic: str) -> TidegateProcess:
    bootstrap_port = consecutive_free_ports(1 + len(cluster.brokers))
    (admin_port,) = free_ports(1)
    tier = home / "tier"
    tier.mkdir()
    config = f"""\
{FOUNDING_KEYS}
remote.log.storage.path = "{tier}"
remote.log.metadata.topic.name = "__metadata-{topic[-60:]}"

[upstream]
bootstrap.servers = "{cluster.bootstrap_servers}"

[listener]
host = "127.0.0.1"
advertised.host = "127.0.0.1"
bootstrap.port = {bootstrap_port}
base.port = {bootstrap_port}

[admin]
host = "127.0.0.1"
port = {admin_port}

[state]
path = "{home / "state"}"

[[topics]]
name = "{topic}"
{FOUNDING_TOPIC_KEYS}\
local.retention.bytes = 1
segment.bytes = "64KiB"
segment.ms = "5s"
"""
    return TidegateProcess(config, address=("127.0.0.1", bootstrap_port), admin=("127.0.0.1", admin_port))


def test_every_key_has_a_row() -> None:
    keys = re.findall(r"^(\S+) = ", FOUNDING_KEYS + FOUNDING_TOPIC_KEYS, re.MULTILINE)
    page = (ROOT / "docs" / "founding.md").read_text()
    assert keys
    assert [key for key in keys if f"| `{key}` |" not in page] == []


async def test_it_copies_trims_and_serves_a_backfill(kafka: KafkaCluster, topic_name: str, tmp_path: Path) -> None:
    values = random_values(RECORDS)
    create_topic(kafka.bootstrap_servers, topic_name)
    with proxy_with_founding_keys(kafka, tmp_path, topic_name) as proxy:
        await asyncio.to_thread(produce, proxy.bootstrap_servers, topic_name, values)
        await asyncio.to_thread(until_trimmed, kafka, topic_name, RECORDS // 2)  # only the tier has the first half now
        assert list((tmp_path / "tier").rglob("*.log"))
        with consumer_at(proxy.bootstrap_servers, topic_name, 0) as consumer:
            assert await asyncio.to_thread(read, consumer, RECORDS) == list(enumerate(values))
        assert proxy.metric("tidegate_request_latency_seconds_count", api="Fetch", tier="remote") > 0
        entries = await asyncio.to_thread(described, proxy.bootstrap_servers, topic_name)
        assert [entries[key].value for key in (RETENTION_MINUTES, RETENTION_BYTES)] == ["20160", "-1"]
