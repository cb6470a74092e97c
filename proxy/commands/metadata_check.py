"""The part of `tidegate check` about the metadata: whether the metadata topic is lost."""

from __future__ import annotations

import asyncio

from proxy.config import TidegateConfig
from proxy.process.remote_log import METADATA_FOLDER
from tiers.access.open_tier import RemoteTierError, open_storage, segments_without_metadata, storage_cluster_id
from tiers.broker.client import BrokerClient
from tiers.errors import RemoteLogError, RemoteStorageError
from tiers.metadata.state.writer import saved_identity
from tiers.metadata.topic.metadata_topic import find_metadata_topic


async def metadata_topic_trouble(
    config: TidegateConfig, client: BrokerClient, cluster_id: str, timeout_ms: int, *, has_store: bool
) -> str | None:
    """Returns why the metadata topic is lost, or must not be used. None: it is in order, or `serve` may create it.

    Compares the topic with the saved state in `state.path`, and with the store if the topic has no record and the store
    answers (`has_store`). Creates nothing."""

    async def refusal_to_create() -> str | None:
        if not has_store:
            return None  # the report has the store's problem
        try:
            async with open_storage(config, cluster_id) as storage:
                return await segments_without_metadata(config, storage_cluster_id(config, cluster_id), storage)
        except (RemoteTierError, RemoteStorageError) as error:
            return f"topic {config.remote_log.metadata_topic} has no record, and the store cannot be listed: {error}"

    try:
        saved = await asyncio.to_thread(saved_identity, config.state.path / METADATA_FOLDER)
        topic = config.remote_log.metadata_topic_settings
        await find_metadata_topic(client, topic, timeout_ms, saved, refusal_to_create)
    except RemoteLogError as error:
        return str(error)
    return None
