"""`StreamOffsets`: what a stream's checkpoint keeps: the JSON of Spark's own Kafka source, and of which topics it is.

`{"orders": {"0": next offset}, "orders@topic id": {}}`: a topic that was deleted and made again under its name is
another one, of which nothing was read yet. No name has an `@`, and a topic without partitions is none to whoever reads
such JSON: a checkpoint's can still be given as `startingOffsets`, to the Kafka source as well. Offsets that its own
checkpoints have are of any topic of the name.
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
    """Exclusive ends: what is read next."""
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
