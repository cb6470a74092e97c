"""`tidegate tier bounds` on a real cluster."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.fakes.log_starts import user_log_start
from tests.support.rigs import tier_command
from tests.support.rigs.metadata_managers import TopicBasedManager, bear_standstills
from tests.support.rigs.tier_command import Answer
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import (
    TopicWith,
    delete_topic,
    topic_id_partition,
)
from tests.support.tiers.segment_metadata import copied, segment
from tests.support.tiers.waiting import until
from tiers.broker.client import BrokerClient
from tiers.log.broker_log import BrokerLogSource
from tiers.metadata.topic.metadata_topic import MetadataTopicSettings
from tiers.metadata.topic.settings import TopicBasedSettings
from tiers.model.log_start import LogGap

pytestmark = pytest.mark.integration
TIMEOUT_MS = 60_000


class Operator:
    def __init__(self, kafka: KafkaCluster, folder: Path, metadata_topic: str) -> None:
        self.config = folder / "tidegate.toml"
        self.config.write_text(
            f'remote.log.metadata.topic.name = "{metadata_topic}"\nremote.log.metadata.topic.num.partitions = 2\n'
            f'[upstream]\nbootstrap.servers = "{kafka.bootstrap_servers}"\n'
        )

    async def tier_bounds(self, *arguments: str) -> Answer:
        return await tier_command.run(self.config, "bounds", *arguments)

    async def tier_bounds_as_json(self, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
        code, out, err = await self.tier_bounds("--json", *arguments)
        assert err == ""
        return code, json.loads(out)


async def test_the_bounds_of_both_tiers(
    kafka: KafkaCluster, topic_name: str, topic_with: TopicWith, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bear_standstills(monkeypatch)
    metadata_topic = f"metadata-of-{topic_name}"
    operator = Operator(kafka, tmp_path, metadata_topic)
    code, out, err = await tier_command.as_process(operator.config, "bounds")
    assert (code, out) == (3, "")
    assert err.startswith(f"tidegate: the cluster has no topic {metadata_topic}: either nothing was tiered yet, or")
    assert err.count("\n") == 1

    await asyncio.to_thread(topic_with, 100)
    client = BrokerClient([kafka.address()], client_id="test")
    topic = MetadataTopicSettings(metadata_topic, partition_count=2)
    settings = TopicBasedSettings(tmp_path / "state", topic=topic, write_timeout_ms=TIMEOUT_MS)
    metadata = TopicBasedManager(client, settings)
    try:
        await metadata.log.open()
        partition = await topic_id_partition(client, topic_name)
        assert await operator.tier_bounds_as_json() == (0, [])

        code, [line] = await operator.tier_bounds_as_json(topic_name)
        assert (code, line["holds"], line["remote_end"], line["next_local_offset"]) == (0, True, None, 0)

        await until(lambda: metadata.log.owns(partition))
        await metadata.put_log_start(partition, user_log_start(5))
        await copied(metadata, segment(partition, 0, 59))
        source = BrokerLogSource(client)
        epoch = (await source.bounds(partition, TIMEOUT_MS)).leader_epoch
        await source.delete_records(partition, 40, epoch, TIMEOUT_MS, lambda: None)
        code, lines = await operator.tier_bounds_as_json()
        assert code == 0
        assert lines == [
            {
                "topic": topic_name,
                "partition": 0,
                "log_start_offset": 5,
                "remote_start": 0,
                "remote_end": 59,
                "next_local_offset": 60,
                "local_log_start": 40,
                "last_stable_offset": 100,
                "high_watermark": 100,
                "gaps": [],
                "unknown": [],
                "violated": [],
                "trouble": None,
                "holds": True,
            }
        ]
        code, out, err = await operator.tier_bounds(topic_name)
        assert (code, err) == (0, "")
        assert out.strip().splitlines()[-1].split() == [
            f"{topic_name}-0",
            "5",
            "0",
            "59",
            "60",
            "40",
            "100",
            "100",
            "hold",
        ]

        await metadata.put_log_gap(partition, LogGap(60, 70), epoch)
        _, [line] = await operator.tier_bounds_as_json()
        assert (line["gaps"], line["next_local_offset"]) == ([{"first_offset": 60, "next_offset": 70}], 60)
        _, out, _ = await operator.tier_bounds(topic_name)
        assert "gap: the brokers removed the offsets 60 to 69 before they were copied" in out

        await copied(metadata, segment(partition, 60, 100))
        code, out, _ = await tier_command.as_process(operator.config, "bounds")
        assert (code, "violated: Ly>Ry" in out) == (1, True)

        code, out, err = await operator.tier_bounds("no-such-topic")
        assert (code, out, err) == (2, "", "tidegate: the cluster has no topic no-such-topic\n")
        await asyncio.to_thread(delete_topic, kafka.bootstrap_servers, topic_name)
        code, [line] = await operator.tier_bounds_as_json()
        assert (code, line["trouble"], line["remote_end"]) == (1, "the topic was deleted", 100)
    finally:
        await metadata.log.close()
        await client.close()
