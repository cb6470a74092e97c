"""`metadata_context` makes what a metadata manager gets, without brokers."""

from __future__ import annotations

from pathlib import Path

from tiers.broker.client import BrokerClient
from tiers.metadata.record_log import MetadataManagerContext
from tiers.metadata.topic.metadata_topic import MetadataTopicSettings


def metadata_context(
    state_folder: Path, *, cluster_id: str = "c", refusal: str | None = None
) -> MetadataManagerContext:
    """Returns a context for a manager that uses no broker."""

    async def refusal_to_create() -> str | None:
        return refusal

    client = BrokerClient([("127.0.0.1", 1)], client_id="test")
    return MetadataManagerContext(state_folder, client, cluster_id, MetadataTopicSettings(), refusal_to_create)
