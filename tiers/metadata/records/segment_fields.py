"""Writes and reads the fields of a segment that two of Kafka's records share (docs/semantics.md 11.1).

    RemoteLogSegmentMetadataRecord          api key 0, metadata topic    segment id with its partition | fields
    RemoteLogSegmentMetadataSnapshotRecord  api key 3, flat file         uuid of the segment | fields

Both messages are flexible. The fields are StartOffset, EndOffset, BrokerId, MaxTimestampMs, EventTimestampMs,
SegmentLeaderEpochs, SegmentSizeInBytes, CustomMetadata (KIP-917), RemoteLogSegmentState; tagged 0 TxnIndexEmpty, and
Tidegate's own tagged 10000 CopyEpoch, which Kafka ignores.
"""

from __future__ import annotations

import struct
from typing import Any

from protocol.errors import TruncatedError
from protocol.primitives import (
    EMPTY_TAGGED_SECTION,
    INT8,
    INT32,
    INT64,
    Buffer,
    read_array_length,
    read_int8,
    read_int32,
    read_uuid,
    read_uvarint,
    skip_tagged_section,
    write_array_length,
    write_uvarint,
)
from tiers.errors import RemoteLogMetadataError
from tiers.metadata.records.codecs import NULLABLE_BYTES, SEGMENT_ID, Codec
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.log_start import UNKNOWN_EPOCH
from tiers.model.quick_values import quick
from tiers.model.segment_metadata import LeaderEpochEntry, RemoteLogSegmentMetadata
from tiers.model.segment_state import RemoteLogSegmentState

SEGMENT_METADATA_SNAPSHOT_API_KEY = 3
SEGMENT_METADATA_SNAPSHOT_VERSION = 0

_TXN_INDEX_EMPTY_TAG = 0
_TXN_INDEX_EMPTY = b"\x00\x01\x01"
_COPY_EPOCH_TAG = 10_000
_OFFSETS_AND_TIMES = struct.Struct(">qqiqq")
_LEADER_EPOCH = struct.Struct(">iq")
_SEGMENT = quick(RemoteLogSegmentMetadata)


def write_snapshot(metadata: RemoteLogSegmentMetadata) -> bytes:
    """Writes a RemoteLogSegmentMetadataSnapshotRecord. It does not name the segment's partition."""
    return metadata.segment_id.id.bytes + write_segment_fields(metadata)


def read_snapshot(buf: Buffer, pos: int, partition: TopicIdPartition) -> tuple[RemoteLogSegmentMetadata, int]:
    """Reads a RemoteLogSegmentMetadataSnapshotRecord of a segment of `partition`."""
    uuid, pos = read_uuid(buf, pos)
    return read_segment_fields(buf, pos, RemoteLogSegmentId(partition, uuid))


def _write_segment(metadata: RemoteLogSegmentMetadata) -> bytes:
    return SEGMENT_ID.write(metadata.segment_id) + write_segment_fields(metadata)


def _read_segment(buf: Buffer, pos: int) -> tuple[RemoteLogSegmentMetadata, int]:
    segment_id, pos = SEGMENT_ID.read(buf, pos)
    return read_segment_fields(buf, pos, segment_id)


SEGMENT = Codec(_write_segment, _read_segment)


def write_segment_fields(metadata: RemoteLogSegmentMetadata) -> bytes:
    return b"".join(
        (
            INT64.pack(metadata.start_offset),
            INT64.pack(metadata.end_offset),
            INT32.pack(metadata.broker_id),
            INT64.pack(metadata.max_timestamp_ms),
            INT64.pack(metadata.event_timestamp_ms),
            write_array_length(len(metadata.segment_leader_epochs), compact=True),
            *(
                INT32.pack(entry.epoch) + INT64.pack(entry.start_offset) + EMPTY_TAGGED_SECTION
                for entry in metadata.segment_leader_epochs
            ),
            INT32.pack(metadata.segment_size_bytes),
            NULLABLE_BYTES.write(metadata.custom_metadata),
            INT8.pack(metadata.state),
            _write_tagged(metadata),
        )
    )


def read_segment_fields(buf: Buffer, pos: int, segment_id: RemoteLogSegmentId) -> tuple[RemoteLogSegmentMetadata, int]:
    """Reads the fields behind the segment's id. Raises `RemoteLogMetadataError` and errors of the protocol."""
    start_offset, end_offset, broker_id, max_timestamp_ms, event_timestamp_ms = _unpack(_OFFSETS_AND_TIMES, buf, pos)
    count, pos = read_array_length(buf, pos + _OFFSETS_AND_TIMES.size, compact=True)
    epochs = []
    for _ in range(count):
        epochs.append(LeaderEpochEntry(*_unpack(_LEADER_EPOCH, buf, pos)))
        pos = skip_tagged_section(buf, pos + _LEADER_EPOCH.size)
    segment_size_bytes, pos = read_int32(buf, pos)
    custom_metadata, pos = NULLABLE_BYTES.read(buf, pos)
    state, pos = read_int8(buf, pos)
    txn_index_empty, copy_epoch, pos = _read_tagged(buf, pos)
    if not epochs or min([start_offset, *[each.start_offset for each in epochs]]) < 0 or start_offset > end_offset:
        raise RemoteLogMetadataError(f"segment {segment_id.id} holds no offsets or no leader epoch")
    metadata = _SEGMENT(
        segment_id=segment_id,
        start_offset=start_offset,
        end_offset=end_offset,
        broker_id=broker_id,
        max_timestamp_ms=max_timestamp_ms,
        event_timestamp_ms=event_timestamp_ms,
        segment_leader_epochs=tuple(epochs),
        segment_size_bytes=segment_size_bytes,
        state=RemoteLogSegmentState(state),
        custom_metadata=custom_metadata,
        txn_index_empty=txn_index_empty,
        copy_epoch=copy_epoch,
    )
    return metadata, pos


def _unpack(fields: struct.Struct, buf: Buffer, pos: int) -> tuple[Any, ...]:
    try:
        return fields.unpack_from(buf, pos)
    except struct.error as error:
        raise TruncatedError(f"{fields.size} bytes at byte {pos} exceed the {len(buf)} bytes") from error


def _write_tagged(metadata: RemoteLogSegmentMetadata) -> bytes:
    fields = [_TXN_INDEX_EMPTY] if metadata.txn_index_empty else []
    if metadata.copy_epoch != UNKNOWN_EPOCH:
        fields.append(write_uvarint(_COPY_EPOCH_TAG) + write_uvarint(INT32.size) + INT32.pack(metadata.copy_epoch))
    return write_uvarint(len(fields)) + b"".join(fields)


def _read_tagged(buf: Buffer, pos: int) -> tuple[bool, int, int]:
    """Returns whether the transaction index is empty, the epoch of the copy, and the position after the section."""
    end = skip_tagged_section(buf, pos)
    txn_index_empty, copy_epoch = False, UNKNOWN_EPOCH
    count, pos = read_uvarint(buf, pos)
    for _ in range(count):
        tag, pos = read_uvarint(buf, pos)
        size, pos = read_uvarint(buf, pos)
        if tag == _TXN_INDEX_EMPTY_TAG:
            if size != 1:
                raise TruncatedError(f"a flag has {size} bytes, not 1")
            txn_index_empty = buf[pos] != 0
        elif tag == _COPY_EPOCH_TAG:
            if size != INT32.size:
                raise TruncatedError(f"a leader epoch has {size} bytes, not {INT32.size}")
            copy_epoch = read_int32(buf, pos)[0]
        pos += size
    return txn_index_empty, copy_epoch, end
