"""Deleted topics: what remains of them in the remote tier goes too, after a delay (semantics 9.2).

* A topic is gone when every broker of the cluster says UNKNOWN_TOPIC_ID for its id, again after the delay. A topic that
  is only missing from a listing may be one that we are no longer allowed to see.
* Tier settings that the topic was given are forgotten.
* The manifest calls every segment dead before the first one goes, so that `rebuild` brings none back, and goes last: as
  long as the store refuses to delete anything, it stays.
* The whole deletion is recorded: DELETE_PARTITION_MARKED, STARTED, every segment's own deletion, FINISHED.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from typing import Any, Protocol
from uuid import UUID

from kafka.protocol.metadata import MetadataRequest

from protocol.errors import ErrorCode
from tiers.broker.client import BrokerClient
from tiers.errors import OwnershipLostError, RemoteLogError
from tiers.manager.partition_manifest import bury_manifest, delete_manifest
from tiers.manager.segment_deletion import delete_all
from tiers.manager.task_services import TaskServices
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata, RemotePartitionDeleteMetadata
from tiers.model.segment_state import RemotePartitionDeleteState

_LOG = logging.getLogger(__name__)
_METADATA_BY_TOPIC_ID = 12


class TopicExistence(Protocol):
    async def gone(self, topic_ids: Iterable[UUID], timeout_ms: int) -> set[UUID]:
        """Those of `topic_ids` that no broker of the cluster knows; empty when one does not answer."""


class ClusterTopicExistence:
    """Asks every broker by topic id: unlike a listing, that tells a deleted topic from a forbidden one."""

    def __init__(self, client: BrokerClient) -> None:
        self._client = client

    async def gone(self, topic_ids: Iterable[UUID], timeout_ms: int) -> set[UUID]:
        return (await self.gone_and_doubtful(topic_ids, timeout_ms))[0]

    async def gone_and_doubtful(self, topic_ids: Iterable[UUID], timeout_ms: int) -> tuple[set[UUID], set[UUID]]:
        """Doubtful are those that one broker does not list and another one does not call unknown."""
        metadata = await self._client.metadata(0, timeout_ms)
        missing = unlisted = set(topic_ids) - set(metadata.topics_by_id)
        for node_id in metadata.brokers:
            if not missing:
                break
            topics = [MetadataRequest.MetadataRequestTopic(topic_id=each, name=None) for each in missing]
            message = MetadataRequest(topics=topics, allow_auto_topic_creation=False)
            answer: Any = await self._client.request(node_id, message, timeout_ms, min_version=_METADATA_BY_TOPIC_ID)
            unknown = {topic.topic_id for topic in answer.topics if topic.error_code == ErrorCode.UNKNOWN_TOPIC_ID}
            missing = missing & unknown
        return missing, unlisted - missing


class TopicDeletionTask:
    """For the partitions that this process owns. One round at a time."""

    def __init__(self, services: TaskServices, existence: TopicExistence) -> None:
        self._services = services
        self._existence = existence
        self._missing_since_ms: dict[UUID, int] = {}

    async def run(self) -> int:
        """One round; returns how many partitions were deleted to the end. Raises the first trouble, after the rest."""
        services = self._services
        owned = [each for each in services.metadata.partitions() if services.metadata.owns(each)]
        configured = [each for each in services.metadata.topics_with_tier_config() if services.metadata.owns(each)]
        topic_ids = {each.topic_id for each in (*owned, *configured)}
        gone = await self._existence.gone(topic_ids, services.settings.request_timeout_ms)
        now_ms = services.clock_ms()
        self._missing_since_ms = {each: self._missing_since_ms.get(each, now_ms) for each in gone}
        deleted = 0
        troubles: list[RemoteLogError] = []
        for partition in owned:
            since_ms = self._missing_since_ms.get(partition.topic_id)
            if since_ms is not None and now_ms - since_ms >= services.settings.topic_deletion_delay_ms:
                try:
                    deleted += await self._delete(partition)
                except RemoteLogError as error:
                    troubles.append(error)
        for topic in configured:
            since_ms = self._missing_since_ms.get(topic.topic_id)
            if since_ms is not None and now_ms - since_ms >= services.settings.topic_deletion_delay_ms:
                nothing = dict.fromkeys(services.metadata.topic_tier_config(topic.topic_id))
                try:
                    await services.metadata.change_topic_tier_config(topic.topic_id, topic.topic, nothing)
                except RemoteLogError as error:
                    troubles.append(error)
        if troubles:
            raise troubles[0]
        return deleted

    async def _delete(self, partition: TopicIdPartition) -> bool:
        """False while segments remain that the store does not delete."""
        segments = await begin_partition_deletion(self._services, partition)
        if await delete_all(self._services, segments, partial(_check, self._services, partition)) < len(segments):
            return False
        await end_partition_deletion(self._services, partition)
        return True


async def begin_partition_deletion(
    services: TaskServices, partition: TopicIdPartition
) -> list[RemoteLogSegmentMetadata]:
    """Of a topic that is gone: what of it is to be deleted. May be repeated."""
    states = RemotePartitionDeleteState
    reached = services.metadata.remote_partition_delete_state(partition)
    if reached is None:
        await _write(services, partition, states.DELETE_PARTITION_MARKED)
        services.checkpoint("partition-marked")
    # Finished already: a log start that was recorded late, by whoever may, is all that can be left.
    if reached in (None, states.DELETE_PARTITION_MARKED):
        await _write(services, partition, states.DELETE_PARTITION_STARTED)
        services.checkpoint("partition-deletion-started")
    await bury_manifest(services, partition)
    services.checkpoint("manifest-buried")
    return list(services.metadata.list_remote_log_segments(partition))


async def end_partition_deletion(services: TaskServices, partition: TopicIdPartition) -> None:
    """Every segment that `begin_partition_deletion` named is gone."""
    _check(services, partition)
    await delete_manifest(services, partition)
    services.checkpoint("manifest-deleted")
    await _write(services, partition, RemotePartitionDeleteState.DELETE_PARTITION_FINISHED)
    services.checkpoint("partition-deletion-finished")
    _LOG.info("the remote log of a deleted topic is gone", extra={"partition": str(partition)})


def _check(services: TaskServices, partition: TopicIdPartition) -> None:
    if not services.metadata.owns(partition):
        raise OwnershipLostError(f"{partition} is owned by another member")


async def _write(services: TaskServices, partition: TopicIdPartition, state: RemotePartitionDeleteState) -> None:
    await services.metadata.put_remote_partition_delete_metadata(
        RemotePartitionDeleteMetadata(partition, services.settings.broker_id, services.wall_clock_ms(), state)
    )
