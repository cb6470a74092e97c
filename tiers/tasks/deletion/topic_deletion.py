"""Deletes the remote logs of deleted topics, after a delay (docs/semantics.md 9.2).

* A topic is gone when every broker of the cluster answers UNKNOWN_TOPIC_ID for its id, and again after the delay. A
  topic that is only missing from a listing may be one that the proxy is not authorized to see any more.
* A gone topic is deleted only if its deletion is proved (`MissingTopics`).
* The owners delete nothing when no broker knows the metadata topic by the id under which it was read. The metadata then
  belongs to another cluster than the brokers, or to another time. Metadata in another log needs no comparison.
* The tier settings of the topic are removed too.
* The stored facts call every segment dead before the first one is deleted, so that `rebuild` does not restore any.
  They are deleted last: as long as the store refuses a deletion, they stay.
* The whole deletion is recorded: DELETE_PARTITION_MARKED, STARTED, every segment's own deletion, FINISHED.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol
from uuid import UUID

from kafka.protocol.metadata import MetadataRequest

from protocol.errors import ErrorCode
from tiers.broker.client import BrokerClient
from tiers.errors import RemoteLogError, RemoteLogMetadataError
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata, RemotePartitionDeleteMetadata
from tiers.model.segment_state import RemotePartitionDeleteState
from tiers.tasks.deletion.missing_topics import MissingTopics
from tiers.tasks.deletion.segment_deletion import delete_all
from tiers.tasks.history.stored_facts import FactsTask, delete_facts
from tiers.tasks.task_services import TaskServices

logger = logging.getLogger(__name__)
_METADATA_BY_TOPIC_ID = 12
_NO_OFFSET_LEFT = (1 << 63) - 1


class TopicExistence(Protocol):
    async def gone(self, topic_ids: Iterable[UUID], timeout_ms: int) -> set[UUID]:
        """Returns those of `topic_ids` that no broker of the cluster knows. Raises `BrokerError`."""


class ClusterTopicExistence:
    """Asks every broker by topic id. Unlike a listing, that distinguishes a deleted topic from a forbidden one."""

    def __init__(self, client: BrokerClient) -> None:
        self._client = client

    async def gone(self, topic_ids: Iterable[UUID], timeout_ms: int) -> set[UUID]:
        return (await self.gone_and_doubtful(topic_ids, timeout_ms))[0]

    async def gone_and_doubtful(self, topic_ids: Iterable[UUID], timeout_ms: int) -> tuple[set[UUID], set[UUID]]:
        """Returns the ids that no broker knows, and the doubtful ones.

        One broker does not describe a doubtful id, but another broker does not call it unknown."""
        asked = set(topic_ids)
        metadata = await self._client.named((), asked, timeout_ms)
        missing = unlisted = asked - set(metadata.topics_by_id)
        for node_id in metadata.brokers:
            if not missing:
                break
            topics = [MetadataRequest.MetadataRequestTopic(topic_id=each, name=None) for each in missing]
            message = MetadataRequest(topics=topics, allow_auto_topic_creation=False)
            answer: Any = await self._client.request(node_id, message, timeout_ms, min_version=_METADATA_BY_TOPIC_ID)
            unknown = {topic.topic_id for topic in answer.topics if topic.error_code == ErrorCode.UNKNOWN_TOPIC_ID}
            missing = missing & unknown
        return missing, unlisted - missing


@contextmanager
def _put_off(troubles: list[RemoteLogError]) -> Iterator[None]:
    """Collects the error of one topic, so that it does not stop the work on the others."""
    try:
        yield
    except RemoteLogError as error:
        troubles.append(error)


class TopicDeletionTask:
    """Works on the partitions that this process owns. One round at a time."""

    def __init__(self, services: TaskServices, existence: TopicExistence) -> None:
        self._services = services
        self._existence = existence
        self._missing = MissingTopics(services)

    async def run(self) -> int:
        """Runs one round, and returns how many partitions were deleted completely.

        Raises the first error at the end of the round."""
        metadata = self._services.metadata
        partitions, configured = metadata.state.partitions(), metadata.state.topics_with_tier_config()
        names = {each.topic_id: each.topic for each in (*configured, *partitions)}
        recorded = metadata.state.missing_topics().keys() | metadata.state.topic_deletions().keys()
        topics = self._owned(TopicIdPartition(each, 0, names.get(each, "")) for each in names.keys() | recorded)
        partitions = self._owned(partitions)
        if not topics and not partitions:
            self._missing.see(())
            self._missing.watch(())
            return 0
        self._missing.see(await self._gone([*topics, *partitions]))
        troubles: list[RemoteLogError] = []
        for topic in topics:
            with _put_off(troubles):
                await self._missing.record(topic, is_left=topic.topic_id in names)
        self._missing.watch(topics)
        deletable = self._missing.proved([*topics, *partitions])
        deleted = 0
        for partition in partitions:
            if partition.topic_id in deletable:
                with _put_off(troubles):
                    deleted += await self._delete(partition)
        for topic in self._owned(configured):
            if topic.topic_id in deletable:
                with _put_off(troubles):
                    nothing = dict.fromkeys(metadata.state.topic_tier_config(topic.topic_id))
                    await metadata.change_topic_tier_config(topic.topic_id, topic.topic, nothing)
        if troubles:
            raise troubles[0]
        return deleted

    def _owned(self, partitions: Iterable[TopicIdPartition]) -> list[TopicIdPartition]:
        return [each for each in partitions if self._services.log.owns(each)]

    async def _gone(self, partitions: Collection[TopicIdPartition]) -> set[UUID]:
        """Returns the ids of the topics that no broker knows."""
        services = self._services
        metadata_topic_id = services.log.topic_id
        asked = {each.topic_id for each in partitions}
        if metadata_topic_id is not None:
            asked.add(metadata_topic_id)
        gone = await self._existence.gone(asked, services.settings.request_timeout_ms)
        if metadata_topic_id in gone:
            raise RemoteLogMetadataError(f"no broker knows the metadata topic by its id {metadata_topic_id}")
        return gone

    async def _delete(self, partition: TopicIdPartition) -> bool:
        """Deletes a partition. Returns False while the store has not deleted all segments."""
        segments = await begin_partition_deletion(self._services, partition)
        if await delete_all(self._services, segments, partial(self._services.require_ownership, partition)) < len(
            segments
        ):
            return False
        await end_partition_deletion(self._services, partition)
        return True


async def begin_partition_deletion(
    services: TaskServices, partition: TopicIdPartition
) -> list[RemoteLogSegmentMetadata]:
    """Begins the deletion of a partition of a deleted topic, and returns its segments. May be repeated."""
    states = RemotePartitionDeleteState
    reached = services.state.remote_partition_delete_state(partition)
    if reached is None:
        await _write(services, partition, states.DELETE_PARTITION_MARKED)
        services.checkpoint("partition-marked")
    # If the deletion has finished, only a log start can be left that a proxy recorded late.
    if reached in (None, states.DELETE_PARTITION_MARKED):
        await _write(services, partition, states.DELETE_PARTITION_STARTED)
        services.checkpoint("partition-deletion-started")
    facts = FactsTask(services, partition)
    await facts.require_proved()
    await facts.store_dead()
    return list(services.state.list_remote_log_segments(partition))


async def end_partition_deletion(services: TaskServices, partition: TopicIdPartition) -> None:
    """Ends the deletion, after every segment that `begin_partition_deletion` returned is gone."""
    services.require_ownership(partition)
    await delete_facts(services, partition)
    services.checkpoint("facts-deleted")
    await _write(services, partition, RemotePartitionDeleteState.DELETE_PARTITION_FINISHED)
    services.checkpoint("partition-deletion-finished")
    await services.local_indexes.remove_below(partition, _NO_OFFSET_LEFT)
    logger.info("the remote log of a deleted topic was deleted", extra={"partition": str(partition)})


async def _write(services: TaskServices, partition: TopicIdPartition, state: RemotePartitionDeleteState) -> None:
    await services.metadata.put_remote_partition_delete_metadata(
        RemotePartitionDeleteMetadata(partition, services.settings.broker_id, services.wall_clock_ms(), state)
    )
