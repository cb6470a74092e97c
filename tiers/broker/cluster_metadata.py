"""`ClusterMetadata`: one response to Metadata as frozen values. It keeps the error codes of topics and partitions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

from tiers.model.ids import TopicIdPartition


@dataclass(frozen=True, slots=True)
class Broker:
    node_id: int
    host: str
    port: int
    rack: str | None = None


@dataclass(frozen=True, slots=True)
class PartitionMetadata:
    """One partition. `leader_id` is -1 while it has no leader; `leader_epoch` is -1 in Metadata below v7."""

    index: int
    leader_id: int
    leader_epoch: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    error: int = 0


@dataclass(frozen=True, slots=True)
class TopicMetadata:
    name: str
    topic_id: UUID
    partitions: Mapping[int, PartitionMetadata]
    is_internal: bool = False
    error: int = 0


@dataclass(frozen=True, slots=True)
class ClusterMetadata:
    """The cluster's metadata. `fetched_at_ms` is the time of the request, by the client's monotonic clock."""

    cluster_id: str
    controller_id: int
    brokers: Mapping[int, Broker]
    topics: Mapping[str, TopicMetadata]
    fetched_at_ms: int
    topics_by_id: Mapping[UUID, TopicMetadata] = field(default_factory=dict)

    def partition(self, partition: TopicIdPartition) -> PartitionMetadata | None:
        """Returns a partition by its topic id: a topic that was recreated under the same name is another topic."""
        topic = self.topics_by_id.get(partition.topic_id)
        return None if topic is None else topic.partitions.get(partition.partition)

    def not_older_than(self, known: ClusterMetadata) -> ClusterMetadata:
        """Returns this metadata, but with the partitions of `known` that are newer or missing here.

        A broker may lag behind the one that was asked before. So no partition goes back to an earlier leader epoch, and
        no topic loses a partition, because topics never do."""
        topics = {name: _merged(topic, known.topics_by_id.get(topic.topic_id)) for name, topic in self.topics.items()}
        return replace(self, topics=topics, topics_by_id=_by_id(topics))


_NO_ID = UUID(int=0)
"""The id of a topic that the broker does not know. kafka-python decodes it as None."""


def _merged(topic: TopicMetadata, known: TopicMetadata | None) -> TopicMetadata:
    if known is None:
        return topic
    newer = {
        index: old
        for index, old in known.partitions.items()
        if index not in topic.partitions or topic.partitions[index].leader_epoch < old.leader_epoch
    }
    return replace(topic, partitions={**topic.partitions, **newer}) if newer else topic


def _by_id(topics: Mapping[str, TopicMetadata]) -> dict[UUID, TopicMetadata]:
    return {topic.topic_id: topic for topic in topics.values() if topic.topic_id != _NO_ID}


def from_response(response: Any, fetched_at_ms: int) -> ClusterMetadata:
    """Builds the metadata from kafka-python's MetadataResponse of version 10 or later, which has topic ids."""
    topics = {
        topic.name: TopicMetadata(
            name=topic.name,
            topic_id=topic.topic_id or _NO_ID,
            partitions={
                partition.partition_index: PartitionMetadata(
                    index=partition.partition_index,
                    leader_id=partition.leader_id,
                    leader_epoch=partition.leader_epoch,
                    replicas=tuple(partition.replica_nodes),
                    isr=tuple(partition.isr_nodes),
                    error=partition.error_code,
                )
                for partition in topic.partitions
            },
            is_internal=topic.is_internal,
            error=topic.error_code,
        )
        for topic in response.topics
        if topic.name is not None
    }
    return ClusterMetadata(
        cluster_id=response.cluster_id or "",
        controller_id=response.controller_id,
        brokers={
            broker.node_id: Broker(broker.node_id, broker.host, broker.port, broker.rack) for broker in response.brokers
        },
        topics=topics,
        fetched_at_ms=fetched_at_ms,
        topics_by_id=_by_id(topics),
    )
