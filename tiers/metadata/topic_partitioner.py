"""Computes which metadata partition holds the records of a user partition, as Kafka's releases do.

See docs/semantics.md 11.4. The formula distinguishes a topic from an earlier one of the same name.
"""

from __future__ import annotations

from functools import lru_cache

from kafka.partitioner import murmur2

from tiers.model.ids import TopicIdPartition

_MASK = 0xFFFFFFFF
_POSITIVE = 0x7FFFFFFF


@lru_cache(maxsize=8_192)
def by_topic_id(partition: TopicIdPartition, partition_count: int) -> int:
    """Kafka's RemoteLogMetadataTopicPartitioner."""
    most = partition.topic_id.int >> 64
    least = partition.topic_id.int & 0xFFFFFFFFFFFFFFFF
    hashed = 31 + _long_hash(least)
    hashed = 31 * hashed + _long_hash(most)
    hashed = (31 * hashed + partition.partition) & _MASK
    return int(murmur2(hashed.to_bytes(4, "big")) & _POSITIVE) % partition_count


def _long_hash(value: int) -> int:
    return (value ^ value >> 32) & _MASK
