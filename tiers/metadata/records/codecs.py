"""Codecs of which the messages of the metadata records consist (docs/semantics.md 11.1)."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, NamedTuple
from uuid import UUID

from protocol.errors import ProtocolError, TruncatedError
from protocol.primitives import (
    EMPTY_TAGGED_SECTION,
    INT8,
    INT32,
    INT64,
    Buffer,
    read_array_length,
    read_bytes_bounds,
    read_int8,
    read_int32,
    read_int64,
    read_string,
    read_string_bounds,
    read_tag,
    read_tag_count,
    read_uuid,
    skip_tagged_section,
    write_array_length,
    write_bytes_length,
    write_string,
    write_uvarint,
)
from tiers.errors import RemoteLogMetadataError
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.log_start import UNKNOWN_EPOCH
from tiers.model.quick_values import quick
from tiers.model.segment_metadata import LeaderEpochEntry, RemoteLogSegmentMetadata, RemoteLogSegmentState

_ID_AND_NUMBER = struct.Struct(">16si")


class Codec(NamedTuple):
    """`write` returns the bytes of a value. `read` returns the value at a position, and the position after it."""

    write: Callable[[Any], bytes]
    read: Callable[[Buffer, int], tuple[Any, int]]


def converted(codec: Codec, make: Callable[[Any], Any], write: Callable[[Any], Any] | None = None) -> Codec:
    """Returns a codec of other values: `make` converts what was read, and `write` what is to be written."""

    def read(buf: Buffer, pos: int) -> tuple[Any, int]:
        value, pos = codec.read(buf, pos)
        return make(value), pos

    return Codec(codec.write if write is None else lambda value: codec.write(write(value)), read)


def fields(make: Callable[..., Any], **codecs: Codec) -> Codec:
    """Returns the codec of a value with these fields, without a tagged section."""
    write, read = _in_order(codecs)

    def read_value(buf: Buffer, pos: int) -> tuple[Any, int]:
        values, pos = read(buf, pos)
        return make(**values), pos

    return Codec(write, read_value)


def _in_order(codecs: Mapping[str, Codec]) -> Codec:
    """Returns a codec that writes these attributes of a value, and reads a dictionary."""
    read_fields = [(name, codec.read) for name, codec in codecs.items()]
    write_fields = [(attrgetter(name), codec.write) for name, codec in codecs.items()]

    def read(buf: Buffer, pos: int) -> tuple[dict[str, Any], int]:
        values = {}
        for name, read_field in read_fields:
            values[name], pos = read_field(buf, pos)
        return values, pos

    return Codec(lambda value: b"".join([write(get(value)) for get, write in write_fields]), read)


class Tag(NamedTuple):
    """An optional field in the tagged section of a message. A field that has its `default` is left out."""

    number: int
    name: str
    codec: Codec
    default: Any


def structure(make: Callable[..., Any], tags: Sequence[Tag] = (), /, **codecs: Codec) -> Codec:
    """Returns the codec of a value with these fields, and a tagged section behind them: all messages are flexible.

    Tags that are not in `tags` are skipped."""
    write_fields, read_fields = _in_order(codecs)
    by_number = {tag.number: tag for tag in tags}

    def write(value: Any) -> bytes:
        given = [(tag, getattr(value, tag.name)) for tag in tags]
        written = [(tag.number, tag.codec.write(one)) for tag, one in given if one != tag.default]
        section = [write_uvarint(number) + write_uvarint(len(data)) + data for number, data in written]
        return write_fields(value) + write_uvarint(len(section)) + b"".join(section)

    def read(buf: Buffer, pos: int) -> tuple[Any, int]:
        values, pos = read_fields(buf, pos)
        count, pos = read_tag_count(buf, pos)
        for _ in range(count):
            number, _, start, pos = read_tag(buf, pos)
            if number in by_number:
                tag = by_number[number]
                values[tag.name], end = tag.codec.read(buf, start)
                if end != pos:
                    raise TruncatedError(f"tag {number} has {pos - start} bytes, not {end - start}")
        return make(**values), pos

    return Codec(write, read)


def array(item: Codec, *, compact: bool = True) -> Codec:
    def write(values: Iterable[Any]) -> bytes:
        written = [item.write(value) for value in values]
        return write_array_length(len(written), compact=compact) + b"".join(written)

    def read(buf: Buffer, pos: int) -> tuple[tuple[Any, ...], int]:
        count, pos = read_array_length(buf, pos, compact=compact)
        values = []
        for _ in range(count):
            value, pos = item.read(buf, pos)
            values.append(value)
        return tuple(values), pos

    return Codec(write, read)


def _write_nullable_bytes(value: bytes | None) -> bytes:
    return b"\x00" if value is None else write_bytes_length(len(value), compact=True) + value


def _read_nullable_bytes(buf: Buffer, pos: int) -> tuple[bytes | None, int]:
    start, end = read_bytes_bounds(buf, pos, compact=True)
    return (None, start) if end < 0 else (bytes(buf[start:end]), end)


def _write_partition(partition: TopicIdPartition) -> bytes:
    topic = write_string(partition.topic, compact=True)
    return topic + _ID_AND_NUMBER.pack(partition.topic_id.bytes, partition.partition) + EMPTY_TAGGED_SECTION


def _read_partition(buf: Buffer, pos: int) -> tuple[TopicIdPartition, int]:
    start, end = read_string_bounds(buf, pos, compact=True)
    behind = max(start, end) + _ID_AND_NUMBER.size
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


BYTE = Codec(INT8.pack, read_int8)
FLAG = converted(BYTE, bool)
NUMBER = Codec(INT32.pack, read_int32)
LONG = Codec(INT64.pack, read_int64)
ID = Codec(attrgetter("bytes"), read_uuid)
TEXT = converted(
    Codec(partial(write_string, compact=True), partial(read_string, compact=True)), lambda text: text or ""
)
NULLABLE_BYTES = Codec(_write_nullable_bytes, _read_nullable_bytes)
PARTITION = Codec(_write_partition, _read_partition)
SEGMENT_ID = structure(quick(RemoteLogSegmentId), topic_id_partition=PARTITION, id=ID)
STATE = converted(BYTE, RemoteLogSegmentState)
SEGMENT_FIELDS = {
    "start_offset": LONG,
    "end_offset": LONG,
    "broker_id": NUMBER,
    "max_timestamp_ms": LONG,
    "event_timestamp_ms": LONG,
    "segment_leader_epochs": array(structure(quick(LeaderEpochEntry), epoch=NUMBER, start_offset=LONG)),
    "segment_size_bytes": NUMBER,
    "custom_metadata": NULLABLE_BYTES,
    "state": STATE,
}
"""The fields behind the segment's id in the two records of Kafka that contain a segment (KIP-917 for the metadata)."""
SEGMENT_TAGS = (Tag(0, "txn_index_empty", FLAG, False), Tag(10_000, "copy_epoch", NUMBER, UNKNOWN_EPOCH))
"""The copy epoch is Tidegate's own. Kafka ignores it."""
_SEGMENT = quick(RemoteLogSegmentMetadata)


def segment_of(*, segment_id: RemoteLogSegmentId, **values: Any) -> RemoteLogSegmentMetadata:
    """Returns the segment with the values that were read. Raises `RemoteLogMetadataError` if they fit no log."""
    segment: RemoteLogSegmentMetadata = _SEGMENT(segment_id=segment_id, **values)
    epochs, start_offset = segment.segment_leader_epochs, segment.start_offset
    if (
        not epochs
        or min([start_offset, *[each.start_offset for each in epochs]]) < 0
        or start_offset > segment.end_offset
    ):
        raise RemoteLogMetadataError(f"segment {segment_id.id} holds no offsets or no leader epoch")
    return segment
