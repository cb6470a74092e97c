"""`StreamOffsets`: the offsets in a stream's checkpoint: the JSON of Spark's own Kafka source plus the topics' ids.

The JSON is `{"orders": {"0": next offset}, "orders@topic id": {}}`. A topic that was deleted and recreated under its
name has another id, so none of its records were read yet. Topic names have no `@`, and readers of such JSON ignore a
topic without partitions. So the offsets can still be given as `startingOffsets`, to Spark's Kafka source as well.
Offsets from checkpoints of that source have no ids and apply to any topic of the name.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import NamedTuple
from uuid import UUID

from pipeline.source.options import TopicPartition

Offsets = dict[TopicPartition, int]


class StreamOffsets(NamedTuple):
    offsets: Offsets
    """The next offset to read of each partition."""
    topic_ids: Mapping[str, UUID]


def encode_offsets(of: StreamOffsets) -> dict[str, dict[str, int]]:
    encoded: dict[str, dict[str, int]] = {}
    for (topic, partition), offset in sorted(of.offsets.items()):
        encoded.setdefault(topic, {})[str(partition)] = offset
    for topic in list(encoded):
        if topic in of.topic_ids:
            encoded[f"{topic}@{base64.urlsafe_b64encode(of.topic_ids[topic].bytes).decode().rstrip('=')}"] = {}
    return encoded


def decode_offsets(encoded: Mapping[str, Mapping[str, int]]) -> StreamOffsets:
    offsets: Offsets = {}
    topic_ids: dict[str, UUID] = {}
    for key, numbers in encoded.items():
        topic, is_id, text = key.partition("@")
        if is_id:
            topic_ids[topic] = UUID(bytes=base64.urlsafe_b64decode(text + "=="))
        else:
            offsets |= {(topic, int(partition)): offset for partition, offset in numbers.items()}
    return StreamOffsets(offsets, topic_ids)
