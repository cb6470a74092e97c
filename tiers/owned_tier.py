"""`owned_tier`: a job owns the metadata partitions of its topics for as long as it runs, as a proxy does otherwise.

It is a member of the proxies' group that claims those partitions: meanwhile nobody else copies, trims, expires or
deletes there, and what the job writes is fenced as theirs is. At the end, and when the process dies, they have them
again. Of two jobs that claim the same partition one waits, and then gives up.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from tiers.metadata.topic_based import TopicBasedRemoteLogMetadataManager
from tiers.metadata.topic_partitioner import by_topic_id
from tiers.model.ids import TopicIdPartition
from tiers.open_tier import (
    OpenTier,
    RemoteTierError,
    Watch,
    metadata_to_now,
    open_key_ring,
    open_storage,
    segments_without_metadata,
    storage_cluster_id,
    tiered_cluster,
    unwatched,
)
from tiers.tier_config import TierConfig

CLAIM_TIMEOUT_MS = 60_000
"""Longer than a group waits for a member that died."""
_LOOK_AGAIN_MS = 100


@asynccontextmanager
async def owned_tier(
    config: TierConfig,
    choose: Callable[[OpenTier], Awaitable[Iterable[TopicIdPartition]]],
    timeout_ms: int = CLAIM_TIMEOUT_MS,
    *,
    is_new: bool = False,
    watch: Watch = unwatched,
) -> AsyncIterator[OpenTier]:
    """The tier, once its `metadata` owns the partitions that `choose` returns; that one looks at a tier that owns none.

    `is_new`: where nothing was tiered yet, the metadata topic is created, unless the store holds segments already.

    Raises `RemoteTierError`, also when somebody else keeps the ownership for `timeout_ms`."""
    async with tiered_cluster(config, is_new=is_new) as (client, cluster):
        with tempfile.TemporaryDirectory(prefix="tidegate-") as name:
            folder = Path(name)
            cluster_id, key_ring = storage_cluster_id(config, cluster.cluster_id), open_key_ring(config)
            async with open_storage(config, cluster.cluster_id) as storage:
                refusal = partial(segments_without_metadata, config, cluster_id, storage)
                async with metadata_to_now(config, client, folder, None, refusal, watch) as metadata:
                    tier = OpenTier(config, client, cluster, metadata, storage, cluster_id, key_ring)
                    chosen = list(await choose(tier))
                    count = metadata.topic.partition_count
                claims = frozenset(by_topic_id(partition, count) for partition in chosen)
                # What was read so far is in the folder: the member goes on from there.
                async with metadata_to_now(config, client, folder, claims) as metadata:
                    await _wait_until_owned(metadata, claims, timeout_ms)
                    yield replace(tier, metadata=metadata)


async def _wait_until_owned(
    metadata: TopicBasedRemoteLogMetadataManager, claims: frozenset[int], timeout_ms: int
) -> None:
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            while not claims <= metadata.owned_metadata_partitions():
                if metadata.alarm is not None:
                    raise RemoteTierError(metadata.alarm)
                await asyncio.sleep(_LOOK_AGAIN_MS / 1000)
    except TimeoutError as error:
        missing = sorted(claims - metadata.owned_metadata_partitions())
        raise RemoteTierError(
            f"the metadata partitions {', '.join(map(str, missing))} were not handed over in {timeout_ms} ms:"
            " another job runs over the same topics, or the group does not come to rest"
        ) from error
