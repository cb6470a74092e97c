"""Names of things: a topic is its id (a recreated topic is another topic), an attempt to copy is its uuid."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID


@dataclass(frozen=True, slots=True)
class TopicIdPartition:
    """KIP-405's key of everything. `topic` is for people and for the APIs that still take names: not compared."""

    topic_id: UUID
    partition: int
    topic: str = ""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TopicIdPartition):
            return NotImplemented
        return self.partition == other.partition and self.topic_id == other.topic_id

    def __hash__(self) -> int:
        return hash((self.topic_id, self.partition))

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


@dataclass(frozen=True, slots=True)
class RemoteLogSegmentId:
    """One attempt to copy one segment: `id` is new for every attempt, also for the same offsets."""

    topic_id_partition: TopicIdPartition
    id: UUID
