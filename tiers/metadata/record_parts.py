"""What the records of the metadata topic are made of (semantics 11.1)."""

from __future__ import annotations

from protocol.primitives import (
    EMPTY_TAGGED_SECTION,
    INT32,
    Buffer,
    read_bytes_bounds,
    read_int32,
    read_string,
    read_uuid,
    skip_tagged_section,
    write_bytes_length,
    write_string,
)
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition


def write_partition(partition: TopicIdPartition) -> bytes:
    return (
        write_string(partition.topic, compact=True)
        + partition.topic_id.bytes
        + INT32.pack(partition.partition)
        + EMPTY_TAGGED_SECTION
    )


def read_partition(buf: Buffer, pos: int) -> tuple[TopicIdPartition, int]:
    topic, pos = read_string(buf, pos, compact=True)
    topic_id, pos = read_uuid(buf, pos)
    partition, pos = read_int32(buf, pos)
    return TopicIdPartition(topic_id, partition, topic or ""), skip_tagged_section(buf, pos)


def write_segment_id(segment_id: RemoteLogSegmentId) -> bytes:
    return write_partition(segment_id.topic_id_partition) + segment_id.id.bytes + EMPTY_TAGGED_SECTION


def read_segment_id(buf: Buffer, pos: int) -> tuple[RemoteLogSegmentId, int]:
    partition, pos = read_partition(buf, pos)
    uuid, pos = read_uuid(buf, pos)
    return RemoteLogSegmentId(partition, uuid), skip_tagged_section(buf, pos)


def write_nullable_bytes(value: bytes | None) -> bytes:
    return b"\x00" if value is None else write_bytes_length(len(value), compact=True) + value


def read_nullable_bytes(buf: Buffer, pos: int) -> tuple[bytes | None, int]:
    start, end = read_bytes_bounds(buf, pos, compact=True)
    return (None, start) if end < 0 else (bytes(buf[start:end]), end)
