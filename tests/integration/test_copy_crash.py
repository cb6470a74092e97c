"""A copier with its metadata in the cluster (group, transactions, saved state) is killed after every step.

The scenarios run concurrently, since each waits until the group notices that its member is gone.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.rigs.killed_copier import LIMIT_S, STEPS, TIMEOUT_MS, Tiers, copier, until_settled
from tests.support.rigs.metadata_managers import TopicBasedManager
from tests.support.servers.copier import CopierOptions
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import filled_topic, topic_id_partition
from tiers.broker.client import BrokerClient
from tiers.log.broker_log import BrokerLogSource
from tiers.metadata.state.state import RemoteLogMetadataState, StateFiles
from tiers.metadata.topic.metadata_topic import MetadataTopicSettings
from tiers.metadata.topic.settings import TopicBasedSettings
from tiers.model.segment_metadata import RemoteLogSegmentMetadata

pytestmark = pytest.mark.integration
SCENARIOS: list[tuple[tuple[str, int], ...]] = [
    *((step,) for step in STEPS),
    # The copier is killed again while it goes on with the attempt that the first kill left.
    (("objects-written", 1), ("copy-finished-written", 1)),
    (("copy-started-written", 2), ("objects-written", 1), ("copy-finished-written", 1)),
]


class ClusterTiers(Tiers):
    """Tiers with their metadata in the cluster. The reader is not a member of the group."""

    def saved_segments(self) -> list[RemoteLogSegmentMetadata]:
        """Returns the segments in the copier's saved state, after the process has ended."""
        state = RemoteLogMetadataState(StateFiles.open_shared(self.options.state_folder))
        try:
            segments = list(state.list_remote_log_segments(self.partition))
            for segment in segments:
                found = state.remote_log_segment_metadata(self.partition, segment.end_offset)
                assert found is None or found in segments
            return segments
        finally:
            state.close()


@asynccontextmanager
async def cluster_tiers(kafka: KafkaCluster, topic: str, folder: Path) -> AsyncIterator[ClusterTiers]:
    await asyncio.to_thread(folder.mkdir)
    await asyncio.to_thread(filled_topic, kafka.bootstrap_servers, topic, 120)
    async with AsyncExitStack() as stack:
        client = BrokerClient([kafka.address()], client_id="test")
        stack.push_async_callback(client.close)
        settings = TopicBasedSettings(
            folder / "reader",
            topic=MetadataTopicSettings(f"metadata-of-{topic}", 1),
            is_member=False,
            open_timeout_ms=TIMEOUT_MS,
        )
        reader = TopicBasedManager(client, settings)
        stack.push_async_callback(reader.log.close)
        await reader.log.open()
        partition = await topic_id_partition(client, topic)
        options = CopierOptions(kafka.address(), topic, str(folder), metadata_topic=reader.log.topic.name)
        yield ClusterTiers(kafka, BrokerLogSource(client), partition, options, reader)


async def die(tiers: ClusterTiers, options: CopierOptions) -> None:
    async with copier(options) as process:
        assert await asyncio.wait_for(process.wait(), LIMIT_S) == -signal.SIGKILL
    await tiers.check_that_every_offset_is_readable()
    saved, known = tiers.saved_segments(), {one.segment_id: one for one in await tiers.segments()}
    # The saved state may be behind the topic. It is never ahead of it, and never contradicts it.
    assert all(one.segment_id not in known or one.state <= known[one.segment_id].state for one in saved)


async def live_through(kafka: KafkaCluster, topic: str, folder: Path, deaths: Sequence[tuple[str, int]]) -> None:
    async with cluster_tiers(kafka, topic, folder) as tiers:
        for step, at in deaths:
            await die(tiers, replace(tiers.options, kill_after=step, kill_at=at))
        await until_settled(tiers, tiers.options)
        assert await tiers.remote_bytes() == tiers.original
        await tiers.check_that_every_offset_is_readable()
        await tiers.check_that_nothing_is_left_over()
        assert tiers.saved_segments() == await tiers.segments()


@pytest.mark.full
@pytest.mark.timeout(3 * LIMIT_S)
async def test_a_copier_over_the_metadata_topic_survives_a_kill_after_any_step(
    kafka: KafkaCluster, topic_name: str, tmp_path: Path
) -> None:
    async with asyncio.TaskGroup() as scenarios:
        for number, deaths in enumerate(SCENARIOS):
            name = "-".join(step for step, _ in deaths)
            scenarios.create_task(
                live_through(kafka, f"{topic_name}-{number}", tmp_path / f"{number}", deaths), name=name
            )
