"""`ClusterMetadata`: what responses to Metadata said, as frozen values, with the error codes of topics and partitions.

A response for a whole cluster may have megabytes. `read_cluster_metadata` decodes it in slices, and gives way to other
tasks after each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from uuid import UUID

from protocol.apis.metadata import BrokerEntry, MetadataReader, PartitionColumns, PartitionMetadata
from protocol.errors import ErrorCode
from protocol.primitives import Buffer
from tiers.model.ids import TopicIdPartition

SLICE_BYTES = 16 * 1024
"""Some 350 partitions: less than a millisecond of work."""
Broker = BrokerEntry
_UNKNOWN = (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_TOPIC_ID)


@dataclass(frozen=True, slots=True)
class TopicMetadata:
    name: str
    topic_id: UUID
    partitions: Mapping[int, PartitionMetadata]
    is_internal: bool = False
    error: int = 0


@dataclass(frozen=True, slots=True)
class ClusterMetadata:
    """The brokers as one answer named them, and topics. `fetched_at_ms` is the time of the request for the brokers."""

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

    def with_topics_of(
        self, known: ClusterMetadata, ids: Collection[UUID]
    ) -> tuple[ClusterMetadata, list[TopicMetadata]]:
        """Returns this answer about some topics together with the other topics of an earlier one.

        The request asked for the topics `ids`. If the answer lacks one of them, there is no such topic. Also returns
        the topics of the earlier answer that it replaced or removed."""
        topics, topics_by_id = dict(known.topics), dict(known.topics_by_id)
        found = [*(known.topics_by_id.get(each) for each in ids), *(known.topics.get(name) for name in self.topics)]
        replaced = [topic for topic in found if topic is not None]
        for topic in replaced:
            topics.pop(topic.name, None)
            topics_by_id.pop(topic.topic_id, None)
        topics.update(self.topics)
        topics_by_id.update(self.topics_by_id)
        return replace(self, topics=topics, topics_by_id=topics_by_id), replaced


async def read_cluster_metadata(
    body: Buffer, version: int, asked_at_ms: int, last_known: Callable[[UUID], TopicMetadata | None]
) -> ClusterMetadata:
    """Decodes the body of a Metadata response in slices. Its topics are not older than `last_known` says.

    Raises `ProtocolError`."""
    reader = MetadataReader(body, version)
    topics: dict[str, TopicMetadata] = {}
    topics_by_id: dict[UUID, TopicMetadata] = {}
    for entry in reader.read(SLICE_BYTES):
        if entry is None:
            await asyncio.sleep(0)
        elif entry.name is not None:
            topic = await not_older(
                TopicMetadata(entry.name, entry.topic_id, entry.partitions, entry.is_internal, entry.error),
                last_known(entry.topic_id),
            )
            topics[topic.name] = topic
            if topic.topic_id.int:
                topics_by_id[topic.topic_id] = topic
    brokers = {each.node_id: each for each in reader.brokers}
    return ClusterMetadata(reader.cluster_id or "", reader.controller_id, brokers, topics, asked_at_ms, topics_by_id)


async def not_older(topic: TopicMetadata, known: TopicMetadata | None) -> TopicMetadata:
    """Takes over the partitions of `known` that are newer, or missing in `topic`, which the caller has just read.

    A broker may lag behind the one that was asked before. So no partition goes back to an earlier leader epoch, and no
    topic loses a partition. If both say the same, it returns `known`, and no new objects stay."""
    columns = topic.partitions
    if known is None or not isinstance(columns, PartitionColumns):
        return topic
    for _ in columns.keep_newer(known.partitions):
        await asyncio.sleep(0)
    is_same = (
        isinstance(known.partitions, PartitionColumns)
        and columns.is_same(known.partitions)
        and (known.name, known.is_internal, known.error) == (topic.name, topic.is_internal, topic.error)
    )
    return known if is_same else topic


def without_unknown(metadata: ClusterMetadata) -> ClusterMetadata:
    """Returns an answer about some topics without those that the broker does not know, as a list of all topics is."""
    topics = {name: topic for name, topic in metadata.topics.items() if topic.error not in _UNKNOWN}
    return metadata if len(topics) == len(metadata.topics) else replace(metadata, topics=topics)
