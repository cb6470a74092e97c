"""`RemoteSizes`: the bytes of every partition in the remote tier, by the broker that leads the partition.

All requests share one count, which is used for a minute. It visits every partition in the metadata, in short slices, so
the event loop serves clients meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Final

from protocol.apis.log_dirs import PartitionSizes
from tiers.broker.client import BrokerClient
from tiers.errors import RemoteLogError
from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.model.ids import TopicIdPartition

logger = logging.getLogger(__name__)

MAX_AGE_MS: Final = 60_000
SLICE_PARTITIONS: Final = 64
_METADATA_TIMEOUT_MS = 10_000

_NOTHING: PartitionSizes = {}


class RemoteSizes:
    def __init__(
        self,
        metadata: RemoteLogMetadataState,
        client: BrokerClient,
        clock_ms: Callable[[], int],
        spawn: Callable[[Coroutine[None, None, None]], asyncio.Task[None]],
    ) -> None:
        self._metadata = metadata
        self._client = client
        self._clock_ms = clock_ms
        self._spawn = spawn
        self._sizes: Mapping[int, PartitionSizes] | None = None
        """By the node id of the leader. None before the first count."""
        self._until_ms = 0
        self._counting: asyncio.Task[None] | None = None

    async def led_by(self, node_id: int, timeout_ms: int) -> PartitionSizes:
        """Returns the sizes of the remote partitions that the broker leads.

        Waits at most `timeout_ms` for a new count, and then returns an older one, or nothing before the first."""
        if self._clock_ms() >= self._until_ms:
            if self._counting is None or self._counting.done():
                self._counting = self._spawn(self._count())
            await asyncio.wait({self._counting}, timeout=timeout_ms / 1000)
        return _NOTHING if self._sizes is None else self._sizes.get(node_id, _NOTHING)

    async def _count(self) -> None:
        try:
            self._sizes = await self._counted()
        except RemoteLogError as error:
            logger.debug("the sizes of the remote partitions cannot be read: %s", error)
            return
        except Exception as error:  # a state that was replaced during the count must not end the server's task group
            logger.warning("the sizes of the remote partitions cannot be read: %s", error)
            return
        self._until_ms = self._clock_ms() + MAX_AGE_MS

    async def _counted(self) -> Mapping[int, PartitionSizes]:
        partitions = self._metadata.partitions()
        cluster = await self._client.named((), {each.topic_id for each in partitions}, _METADATA_TIMEOUT_MS)
        sizes: dict[int, dict[str, dict[int, int]]] = {}
        for number, partition in enumerate(partitions):
            if number % SLICE_PARTITIONS == 0:
                await asyncio.sleep(0)
            topic, led = cluster.topics_by_id.get(partition.topic_id), cluster.partition(partition)
            if topic is not None and led is not None and (size_bytes := self._size_of(partition)):
                sizes.setdefault(led.leader_id, {}).setdefault(topic.name, {})[partition.partition] = size_bytes
        return sizes

    def _size_of(self, partition: TopicIdPartition) -> int:
        apart = (each for each in self._metadata.segments_apart(partition) if each.is_finished)
        return self._metadata.cover_size(partition).whole_bytes + sum(each.segment_size_bytes for each in apart)
