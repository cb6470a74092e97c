"""`owned_tier` gives a job the ownership of the metadata partitions of its topics while the job runs.

The job joins the consumer group of the proxies and claims those partitions. Meanwhile no proxy copies, trims, expires
or deletes there, and the job's records are fenced like those of a proxy. When the job ends or its process dies, the
proxies own the partitions again. If two jobs claim the same partition, one waits and then gives up.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from tiers.access.open_tier import (
    OpenMetadata,
    OpenTier,
    RemoteTierError,
    metadata_to_now,
    open_storage,
    segments_without_metadata,
    storage_cluster_id,
    tier_of,
    tiered_cluster,
)
from tiers.access.progress import SILENCE, Progress
from tiers.config.tier_config import TierConfig
from tiers.metadata.topic.topic_based import TopicBasedMetadataLog
from tiers.metadata.topic_partitioner import by_topic_id
from tiers.model.ids import TopicIdPartition

CLAIM_TIMEOUT_MS = 60_000
"""How long a job waits for its claims; longer than the group waits for a dead member."""
_LOOK_AGAIN_MS = 100


@asynccontextmanager
async def owned_tier(
    config: TierConfig,
    choose: Callable[[OpenTier], Awaitable[Iterable[TopicIdPartition]]],
    timeout_ms: int = CLAIM_TIMEOUT_MS,
    *,
    is_new: bool = False,
    progress: Progress = SILENCE,
) -> AsyncIterator[OpenTier]:
    """Yields the tier once its `log` owns the metadata partitions of the partitions that `choose` returns.

    `choose` gets a tier that owns no partitions. If `is_new` is true and there is no metadata topic, the topic is
    created, unless the store already holds segments.

    Raises `RemoteTierError`, also when another process keeps the ownership for `timeout_ms`."""
    async with tiered_cluster(config, is_new=is_new) as (client, cluster):
        with tempfile.TemporaryDirectory(prefix="tidegate-") as name:
            folder = Path(name)
            cluster_id = storage_cluster_id(config, cluster.cluster_id)
            async with open_storage(config, cluster.cluster_id) as storage:
                refusal = partial(segments_without_metadata, config, cluster_id, storage)
                async with metadata_to_now(config, client, folder, None, refusal, progress) as log:
                    tier = tier_of(OpenMetadata(config, client, cluster, log, progress), storage)
                    chosen = list(await choose(tier))
                    count = log.topic.partition_count
                claims = frozenset(by_topic_id(partition, count) for partition in chosen)
                # The folder has the metadata that was read so far, so the member continues from there.
                async with metadata_to_now(config, client, folder, claims) as log:
                    await _wait_until_owned(log, claims, timeout_ms)
                    yield replace(tier, log=log)


async def _wait_until_owned(log: TopicBasedMetadataLog, claims: frozenset[int], timeout_ms: int) -> None:
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            while not claims <= (status := log.status()).owned_partitions:
                if status.alarm is not None:
                    raise RemoteTierError(status.alarm)
                await asyncio.sleep(_LOOK_AGAIN_MS / 1000)
    except TimeoutError as error:
        missing = sorted(claims - log.status().owned_partitions)
        raise RemoteTierError(
            f"the metadata partitions {', '.join(map(str, missing))} were not handed over in {timeout_ms} ms:"
            " another job runs on the same topics, or the consumer group keeps rebalancing; try again later"
        ) from error
