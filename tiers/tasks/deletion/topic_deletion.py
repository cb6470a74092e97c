"""Deletes the remote logs of deleted topics, after a delay (docs/semantics.md 9.2).

* A topic is missing when every broker of the cluster answers UNKNOWN_TOPIC_ID for its id. A topic that is only missing
  from a listing may be one that the proxy is not authorized to see any more.
* A missing topic was deleted, or the cluster's metadata lost it: a KRaft log that was restored from a copy lacks topics
  as well. So it is deleted only if that is proved (`deleted_topics`), and if it is still missing after the delay.
* The owner of a topic's partition 0 records since when the topic is missing. It ends this record, and that of the
  topic's deletion, when a broker knows the topic, or when the remote tier has nothing of the topic.
* The owners delete nothing when no broker knows the metadata topic by the id under which it was read. The metadata then
  belongs to another cluster than the brokers, or to another time. Metadata in another log needs no comparison.
* The tier settings of the topic are removed too.
* The stored facts call every segment dead before the first one is deleted, so that `rebuild` does not restore any.
  They are deleted last: as long as the store refuses a deletion, they stay.
* The whole deletion is recorded: DELETE_PARTITION_MARKED, STARTED, every segment's own deletion, FINISHED.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from datetime import UTC, datetime
from functools import partial
from typing import Any, Protocol
from uuid import UUID

from kafka.protocol.metadata import MetadataRequest

from protocol.errors import ErrorCode
from tiers.bounded_gather import each_alone
from tiers.broker.client import BrokerClient
from tiers.errors import RemoteLogMetadataError
from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import (
    RemotePartitionDeleteMetadata,
    RemotePartitionDeleteState,
    TopicDeletionUpdate,
)
from tiers.tasks.alarms import AlarmReason
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
        asked = set(topic_ids)
        metadata = await self._client.named((), asked, timeout_ms)
        missing = asked - set(metadata.topics_by_id)
        for node_id in metadata.brokers:
            if not missing:
                break
            topics = [MetadataRequest.MetadataRequestTopic(topic_id=each, name=None) for each in missing]
            message = MetadataRequest(topics=topics, allow_auto_topic_creation=False)
            answer: Any = await self._client.request(node_id, message, timeout_ms, min_version=_METADATA_BY_TOPIC_ID)
            unknown = {topic.topic_id for topic in answer.topics if topic.error_code == ErrorCode.UNKNOWN_TOPIC_ID}
            missing = missing & unknown
        return missing


def deleted_topics(metadata: RemoteLogMetadataState) -> set[UUID]:
    """Returns the ids of the topics whose deletion is proved.

    A client's request to delete the topic was recorded, and the topic was missing soon after it. Or an operator said
    that the topic was deleted."""
    missing = metadata.missing_topics()
    return {each for each, deletion in metadata.topic_deletions().items() if deletion.is_proof(missing.get(each))}


class TopicDeletionTask:
    """Works on the partitions that this process owns. One round at a time."""

    def __init__(self, services: TaskServices, existence: TopicExistence) -> None:
        self._services = services
        self._existence = existence
        self._missing_since_ms: dict[UUID, int] = {}
        """Since when this process has found no broker that knows the topics."""
        self._idle_since_ms: dict[UUID, tuple[TopicDeletionUpdate | None, int]] = {}
        """The recorded deletion, and the time since which the records of the topic are not needed."""

    async def run(self) -> int:
        """Runs one round, and returns how many partitions were deleted completely.

        Raises the first error at the end of the round."""
        state, troubles = self._services.state, list[Exception]()
        partitions, configured = state.partitions(), state.topics_with_tier_config()
        names = {each.topic_id: each.topic for each in (*configured, *partitions)}
        known = names.keys() | state.missing_topics().keys() | state.topic_deletions().keys()
        topics = self._owned(TopicIdPartition(each, 0, names.get(each, "")) for each in known)
        partitions = self._owned(partitions)
        gone = await self._gone([*topics, *partitions]) if topics or partitions else ()
        now_ms = self._services.clock_ms()
        self._missing_since_ms = {each: self._missing_since_ms.get(each, now_ms) for each in gone}
        recorded, deletions = state.missing_topics(), state.topic_deletions()  # once: a cluster may miss many topics

        async def record(topic: TopicIdPartition) -> None:
            await self._record(
                topic, topic.topic_id in names, topic.topic_id in recorded, deletions.get(topic.topic_id)
            )

        await each_alone(topics, record, troubles)
        self._watch(topics)
        proved = self._proved()
        done = await each_alone([each for each in partitions if each.topic_id in proved], self._delete, troubles)
        set_up = [each for each in self._owned(configured) if each.topic_id in proved]
        await each_alone(set_up, self._forget_settings, troubles)
        if troubles:
            raise troubles[0]
        return sum(done)

    def _owned(self, partitions: Iterable[TopicIdPartition]) -> list[TopicIdPartition]:
        return [each for each in partitions if self._services.log.owns(each)]

    async def _record(
        self, topic: TopicIdPartition, is_left: bool, is_recorded: bool, deletion: TopicDeletionUpdate | None
    ) -> None:
        """Records that the topic is missing or is there again, or ends its records.

        `topic` is partition 0 of the topic. `is_left` is true when the metadata has segments or settings of it."""
        services, metadata, topic_id = self._services, self._services.metadata, topic.topic_id
        is_missing = topic_id in self._missing_since_ms
        if is_recorded and not is_missing:
            await metadata.put_topic_missing(topic_id, topic.topic, is_missing=False)
            logger.info("a topic that was missing is there again", extra={"topic": topic.topic, "id": str(topic_id)})
        elif not is_recorded and is_left and self._was_missing_before(topic_id):
            await metadata.put_topic_missing(topic_id, topic.topic, is_missing=True)
        if (is_missing and is_left) or not (is_recorded or deletion):
            self._idle_since_ms.pop(topic_id, None)
        elif self._is_idle_for_long(topic_id, deletion) and services.knows_all_partitions:
            if topic_id in metadata.state.missing_topics():
                await metadata.put_topic_missing(topic_id, topic.topic, is_missing=False)
            if deletion is not None and metadata.state.topic_deletions().get(topic_id) == deletion:
                await metadata.end_topic_deletion(topic_id)

    async def _forget_settings(self, topic: TopicIdPartition) -> None:
        nothing = dict.fromkeys(self._services.state.topic_tier_config(topic.topic_id))
        await self._services.metadata.change_topic_tier_config(topic.topic_id, topic.topic, nothing)

    def _was_missing_before(self, topic_id: UUID) -> bool:
        """Whether the topic was missing in an earlier round too: the brokers were asked twice."""
        since_ms = self._missing_since_ms.get(topic_id)
        return since_ms is not None and since_ms < self._services.clock_ms()

    def _is_idle_for_long(self, topic_id: UUID, deletion: TopicDeletionUpdate | None) -> bool:
        """Whether the records of the topic were not needed for the delay that a deletion waits.

        They are not needed when a broker knows the topic, or when the tier has nothing of it. The delay is needed since
        this process may read other metadata partitions late, and a broker may learn of a deletion late. It begins anew
        with each recorded deletion."""
        now_ms = self._services.clock_ms()
        known, since_ms = self._idle_since_ms.setdefault(topic_id, (deletion, now_ms))
        if known != deletion:
            self._idle_since_ms[topic_id] = deletion, now_ms
            return False
        return now_ms - since_ms >= self._services.settings.remote_log.topic_deletion_delay_ms

    def _proved(self) -> set[UUID]:
        """Returns the topics whose deletion is proved and that no broker has known for the deletion delay."""
        latest_ms = self._services.clock_ms() - self._services.settings.remote_log.topic_deletion_delay_ms
        missing_for_long = {each for each, since_ms in self._missing_since_ms.items() if since_ms <= latest_ms}
        return missing_for_long & deleted_topics(self._services.state)

    def _watch(self, topics: Iterable[TopicIdPartition]) -> None:
        """Raises an alarm, once per episode, for each of `topics` that is missing without a proof.

        This process owns partition 0 of `topics`."""
        metadata, alarms = self._services.state, self._services.metrics.alarms
        missing = metadata.missing_topics()
        recorded = missing.keys() - deleted_topics(metadata)
        unproved = {(each.topic, str(each.topic_id)): each for each in topics if each.topic_id in recorded}
        alarms.end_others(AlarmReason.TOPICS_MISSING, unproved)
        for (topic, about), each in unproved.items():
            since = f"{datetime.fromtimestamp(missing[each.topic_id] / 1000, UTC):%FT%TZ}"
            if alarms.begin(topic, AlarmReason.TOPICS_MISSING, about, f"missing since {since}"):
                logger.error(
                    "no broker knows a tiered topic any more, and its deletion is not proved: nothing of it is deleted"
                    " until an operator decides. If it was deleted, run `tidegate tier delete-missing`; if not,"
                    " restore the cluster's metadata with this topic under its id",
                    extra={"topic": topic, "id": about, "since": since},
                )

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
        """Deletes a partition. Returns False while the store has not deleted all segments. May be repeated."""
        services, states = self._services, RemotePartitionDeleteState
        reached = services.state.remote_partition_delete_state(partition)
        if reached is None:
            await self._write(partition, states.DELETE_PARTITION_MARKED)
            services.checkpoint("partition-marked")
        # If the deletion has finished, only a log start can be left that a proxy recorded late.
        if reached in (None, states.DELETE_PARTITION_MARKED):
            await self._write(partition, states.DELETE_PARTITION_STARTED)
            services.checkpoint("partition-deletion-started")
        facts = FactsTask(services, partition)
        await facts.require_proved()
        await facts.store_dead()
        segments = list(services.state.list_remote_log_segments(partition))
        if await delete_all(services, segments, partial(services.require_ownership, partition)) < len(segments):
            return False
        services.require_ownership(partition)
        await delete_facts(services, partition)
        services.checkpoint("facts-deleted")
        await self._write(partition, states.DELETE_PARTITION_FINISHED)
        services.checkpoint("partition-deletion-finished")
        await services.local_indexes.remove_below(partition, _NO_OFFSET_LEFT)
        logger.info("the remote log of a deleted topic was deleted", extra={"partition": str(partition)})
        return True

    async def _write(self, partition: TopicIdPartition, state: RemotePartitionDeleteState) -> None:
        services = self._services
        await services.metadata.put_remote_partition_delete_metadata(
            RemotePartitionDeleteMetadata(partition, services.settings.broker_id, services.wall_clock_ms(), state)
        )
