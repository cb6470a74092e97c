"""Writes and reads the common parts of the metadata topic's records (docs/semantics.md 11.1)."""

from __future__ import annotations

import struct
from functools import lru_cache
from uuid import UUID

from protocol.errors import ProtocolError, TruncatedError
from protocol.primitives import (
    EMPTY_TAGGED_SECTION,
    INT32,
    Buffer,
    read_bytes_bounds,
    read_string_bounds,
    skip_tagged_section,
    write_bytes_length,
    write_string,
)
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.quick_values import quick_uuid

_ID_AND_NUMBER = struct.Struct(">16si")


def write_partition(partition: TopicIdPartition) -> bytes:
    return (
        write_string(partition.topic, compact=True)
        + partition.topic_id.bytes
        + INT32.pack(partition.partition)
        + EMPTY_TAGGED_SECTION
    )


def read_partition(buf: Buffer, pos: int) -> tuple[TopicIdPartition, int]:
    start, end = read_string_bounds(buf, pos, compact=True)
    if end < 0:
        end = start
    behind = end + _ID_AND_NUMBER.size
    if behind > len(buf):
        raise TruncatedError(f"a partition at byte {pos} exceeds the {len(buf)} bytes")
    return _partition(bytes(buf[start:behind])), skip_tagged_section(buf, behind)


@lru_cache(maxsize=4096)
def _partition(raw: bytes) -> TopicIdPartition:
    """Cached, since millions of records name the same few thousand partitions."""
    name = raw[: -_ID_AND_NUMBER.size]
    topic_id, partition = _ID_AND_NUMBER.unpack_from(raw, len(name))
    try:
        return TopicIdPartition(UUID(bytes=topic_id), partition, name.decode())
    except UnicodeDecodeError as error:
        raise ProtocolError("the name of a topic is not valid UTF-8") from error


def write_segment_id(segment_id: RemoteLogSegmentId) -> bytes:
    return write_partition(segment_id.topic_id_partition) + segment_id.id.bytes + EMPTY_TAGGED_SECTION


def read_segment_id(buf: Buffer, pos: int) -> tuple[RemoteLogSegmentId, int]:
    partition, pos = read_partition(buf, pos)
    end = pos + 16
    if end > len(buf):
        raise TruncatedError(f"a uuid at byte {pos} exceeds the {len(buf)} bytes")
    return RemoteLogSegmentId(partition, quick_uuid(bytes(buf[pos:end]))), skip_tagged_section(buf, end)


def write_nullable_bytes(value: bytes | None) -> bytes:
    return b"\x00" if value is None else write_bytes_length(len(value), compact=True) + value


def read_nullable_bytes(buf: Buffer, pos: int) -> tuple[bytes | None, int]:
    start, end = read_bytes_bounds(buf, pos, compact=True)
    return (None, start) if end < 0 else (bytes(buf[start:end]), end)
