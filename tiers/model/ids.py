"""Identifiers of partitions and segments. Topics are identified by id, because a recreated topic is another topic."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID


@dataclass(frozen=True, slots=True)
class TopicIdPartition:
    """KIP-405's identifier of a partition.

    `topic` is only for people and for the APIs that take names, so it does not count in comparisons."""

    topic_id: UUID
    partition: int
    topic: str = ""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TopicIdPartition):
            return NotImplemented
        return self.partition == other.partition and self.topic_id.int == other.topic_id.int

    def __hash__(self) -> int:
        return hash((self.topic_id.int, self.partition))

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"

    @property
    def of_settings(self) -> TopicIdPartition:
        """The topic's partition 0. The tier settings of the topic are in the metadata partition of this one."""
        return TopicIdPartition(self.topic_id, 0, self.topic)


TIER_PARTITION = TopicIdPartition(UUID(int=0), -1)
"""A partition of no topic. Its metadata partition has the records about the whole tier."""


@dataclass(frozen=True, slots=True)
class RemoteLogSegmentId:
    """The identifier of one attempt to copy one segment. Each attempt has a new `id`, even for the same offsets."""

    topic_id_partition: TopicIdPartition
    id: UUID
