"""A proxy that stands still while segments expire, for longer than half of the metadata topic's `delete.retention.ms`.

By default it stands still for 45 s. `make soak` lets five minutes pass by the clock, with a retention of two minutes.
The brokers have then removed the tombstones that the proxy did not read.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from uuid import UUID

import pytest

from tests.support.rigs.metadata_managers import TopicBasedManager
from tests.support.rigs.topic_config_client import alter
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.pausing import pause_group
from tests.support.servers.producing import create_topic, produce, random_values, topic_id_partition
from tests.support.servers.tidegate import tidegate_over
from tests.support.tiers.waiting import until
from tiers.broker.client import BrokerClient
from tiers.metadata.state.state import RemoteLogMetadataState, StateFiles
from tiers.metadata.topic.metadata_topic import MetadataTopicSettings
from tiers.metadata.topic.settings import TopicBasedSettings
from tiers.model.ids import TopicIdPartition

pytestmark = pytest.mark.integration

CUT_OFF_S = float(os.environ.get("TIDEGATE_CUT_OFF_S", "45"))
DELETE_RETENTION_MS = max(60_000, int(CUT_OFF_S * 400))
SEGMENT_BYTES = 20_000
READ_AGAIN = "is cleared and read again from the topic"


def saved_segments(home: Path) -> set[UUID]:
    """Returns the segments in the saved state of a proxy that has ended."""
    state = RemoteLogMetadataState(StateFiles.open_shared(home / "state" / "metadata"))
    try:
        return {one.segment_id.id for each in state.partitions() for one in state.list_remote_log_segments(each)}
    finally:
        state.close()


async def segments_of_the_topic(
    kafka: KafkaCluster, folder: Path, topic: str, partition: TopicIdPartition
) -> set[UUID]:
    """Returns the segments that a process without a saved state reads."""
    client = BrokerClient([kafka.address()], client_id="test")
    settings = TopicBasedSettings(folder, topic=MetadataTopicSettings(topic, 1), is_member=False)
    manager = TopicBasedManager(client, settings)
    try:
        await manager.log.open()
        await manager.log.ensure_fresh(partition, 0, 60_000)
        return {one.segment_id.id for one in manager.state.list_remote_log_segments(partition)}
    finally:
        await manager.log.close()
        await client.close()


async def test_a_proxy_that_stood_still_knows_no_segment_that_expired_meanwhile(
    kafka: KafkaCluster, tmp_path: Path, topic_name: str
) -> None:
    (tmp_path / "tier").mkdir()
    metadata_topic = f"metadata-of-{topic_name}"
    settings: dict[str, str | int] = {
        "remote.log.metadata.topic.name": metadata_topic,
        "remote.log.metadata.topic.num.partitions": 1,
        "remote.log.deleted.segment.retention.ms": 10_000,
    }
    create_topic(kafka.bootstrap_servers, topic_name, config={"retention.ms": "15000"})
    with ExitStack() as stack:
        still, other = (
            stack.enter_context(
                tidegate_over(
                    kafka,
                    tmp_path / name,
                    tiered=[topic_name],
                    segment_bytes=SEGMENT_BYTES,
                    storage={"implementation": "local", "path": str(tmp_path / "tier")},
                    settings=settings,
                )
            )
            for name in ("still", "other")
        )
        compacted = {
            "delete.retention.ms": str(DELETE_RETENTION_MS),
            "segment.ms": "5000",
            "min.cleanable.dirty.ratio": "0.0001",
        }
        assert await asyncio.to_thread(alter, kafka.bootstrap_servers, {metadata_topic: compacted}) == [0]

        async def keep_producing() -> None:
            while True:
                await asyncio.to_thread(produce, kafka.bootstrap_servers, topic_name, random_values(30))
                await asyncio.sleep(1)

        producing = asyncio.create_task(keep_producing())
        try:
            copied = "tidegate_remote_copy_bytes_total"
            await until(lambda: still.metric(copied) + other.metric(copied) > 4 * SEGMENT_BYTES)
            await asyncio.to_thread(pause_group, still.pid)
            await asyncio.sleep(CUT_OFF_S)
            assert READ_AGAIN not in still.output.read_text()
            os.killpg(still.pid, signal.SIGCONT)
            await until(lambda: READ_AGAIN in still.output.read_text())
            # The other proxy writes nothing more, and the group waits for it. So this one reads, and owns nothing yet.
            await asyncio.to_thread(pause_group, other.pid)
            stopped_s = time.monotonic()
            age = "tidegate_remote_log_metadata_freshness_age_seconds"
            await until(lambda: 0 < still.metric(age) < time.monotonic() - stopped_s - 1)
            still.stop(signal.SIGKILL)
        finally:
            producing.cancel()
            await asyncio.wait([producing])
        other.stop(signal.SIGKILL)
    client = BrokerClient([kafka.address()], client_id="test")
    partition = await topic_id_partition(client, topic_name)
    await client.close()
    known = await segments_of_the_topic(kafka, tmp_path / "state", metadata_topic, partition)
    assert saved_segments(tmp_path / "still") == known
