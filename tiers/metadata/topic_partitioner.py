"""Computes which metadata partition holds the records of a user partition, by two published formulas.

See docs/semantics.md 11.4.

`by_topic_id` is the formula of Kafka's releases. Tidegate writes with it, since it tells a topic from an earlier one of
the same name. `by_topic_name` is the founding formula (docs/founding.md, "Metadata partition").
"""

from __future__ import annotations

from functools import lru_cache

from tiers.model.ids import TopicIdPartition

_MASK = 0xFFFFFFFF
_POSITIVE = 0x7FFFFFFF
_MURMUR2_SEED = 0x9747B28C
_MURMUR2_M = 0x5BD1E995


@lru_cache(maxsize=8_192)
def by_topic_id(partition: TopicIdPartition, partition_count: int) -> int:
    """Kafka's RemoteLogMetadataTopicPartitioner."""
    most = partition.topic_id.int >> 64
    least = partition.topic_id.int & 0xFFFFFFFFFFFFFFFF
    hashed = 31 + _long_hash(least)
    hashed = 31 * hashed + _long_hash(most)
    hashed = (31 * hashed + partition.partition) & _MASK
    return (murmur2(hashed.to_bytes(4, "big")) & _POSITIVE) % partition_count


def by_topic_name(partition: TopicIdPartition, partition_count: int) -> int:
    """The founding formula: Java's hash of `topic-partition` without its sign."""
    return (java_string_hash(f"{partition.topic}-{partition.partition}") & _POSITIVE) % partition_count


def _long_hash(value: int) -> int:
    return (value ^ value >> 32) & _MASK


def java_string_hash(text: str) -> int:
    """Computes Java's `String.hashCode` over UTF-16 code units, as an unsigned number."""
    units = text.encode("utf-16-be", "surrogatepass")
    hashed = 0
    for index in range(0, len(units), 2):
        hashed = (31 * hashed + (units[index] << 8 | units[index + 1])) & _MASK
    return hashed


def murmur2(data: bytes) -> int:
    """Computes Kafka's variant of murmur2, as an unsigned number."""
    length = len(data)
    hashed = (_MURMUR2_SEED ^ length) & _MASK
    whole = length & ~3
    for index in range(0, whole, 4):
        k = int.from_bytes(data[index : index + 4], "little") * _MURMUR2_M & _MASK
        k ^= k >> 24
        hashed = (hashed * _MURMUR2_M & _MASK) ^ (k * _MURMUR2_M & _MASK)
    if whole < length:
        hashed ^= int.from_bytes(data[whole:], "little")
        hashed = hashed * _MURMUR2_M & _MASK
    hashed ^= hashed >> 13
    hashed = hashed * _MURMUR2_M & _MASK
    return hashed ^ hashed >> 15
