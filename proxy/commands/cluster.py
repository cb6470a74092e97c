"""How a command reaches the cluster, and everything that the metadata topic says by now. It only looks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from proxy.app import broker_client
from proxy.config import TidegateConfig
from proxy.remote_log import RemoteTierError
from tiers.broker.client import BrokerClient
from tiers.broker.cluster_metadata import ClusterMetadata
from tiers.errors import BrokerError, RemoteLogError
from tiers.metadata.metadata_topic import MetadataTopicSettings
from tiers.metadata.topic_based import TopicBasedRemoteLogMetadataManager, TopicBasedSettings

TIMEOUT_MS = 15_000


@asynccontextmanager
async def tiered_cluster(
    config: TidegateConfig, *, is_new: bool = False
) -> AsyncIterator[tuple[BrokerClient, ClusterMetadata]]:
    """Raises `RemoteTierError` in one line, of whatever is done in it too. `is_new`: nothing need be tiered yet."""
    client = broker_client(config)
    try:
        cluster = await _cluster(config, client)
        metadata_topic = config.remote_log.metadata_topic
        if metadata_topic not in cluster.topics and not is_new:
            # Opening the manager would create it; a command only looks.
            raise RemoteTierError(f"the cluster has no topic {metadata_topic}: nothing was tiered yet")
        yield client, cluster
    except RemoteLogError as error:
        raise RemoteTierError(str(error)) from error
    finally:
        await client.close()


@asynccontextmanager
async def metadata_to_now(
    config: TidegateConfig, client: BrokerClient, folder: Path
) -> AsyncIterator[TopicBasedRemoteLogMetadataManager]:
    """Everything that the metadata topic says; `folder` is for this alone."""
    remote_log = config.remote_log
    metadata_topic = MetadataTopicSettings(remote_log.metadata_topic, remote_log.metadata_topic_partitions)
    settings = TopicBasedSettings(folder, topic=metadata_topic, is_member=False, open_timeout_ms=TIMEOUT_MS)
    metadata = TopicBasedRemoteLogMetadataManager(client, settings)
    try:
        await metadata.open()
        for number in range(metadata.topic.partition_count):
            await metadata.follower.ensure_fresh(number, TIMEOUT_MS, TIMEOUT_MS)
        yield metadata
    finally:
        await metadata.close()


async def _cluster(config: TidegateConfig, client: BrokerClient) -> ClusterMetadata:
    try:
        return await client.metadata(0, TIMEOUT_MS)
    except BrokerError as error:
        servers = ", ".join(f"{host}:{port}" for host, port in config.upstream.bootstrap_servers)
        raise RemoteTierError(f"no broker answers at {servers}: {error}") from error
