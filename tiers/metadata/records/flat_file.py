"""The founding flat file (docs/semantics.md 11.3): one user partition's metadata in one file, for export and import.

    int16 magic 0, uuid topic id, int64 offset of the metadata partition up to which it was read,
    then entries: uvarint length of the rest of the entry, uvarint type, uvarint version, data

A type is the api key of the record's schema.

* Type 3, version 0, is a segment: Kafka's RemoteLogSegmentMetadataSnapshotRecord, which is flexible and has the custom
  metadata (KIP-917).
* Type 0, version 0, is a segment of the founding text: RemoteLogSegmentMetadataRecordStored. It has neither the custom
  metadata nor the broker id. It is read, and not written.
* Type 1, version 0, is the state of the partition's deletion.

The format has no field for the partition number and the topic name. A file that ends inside an entry is torn, and no
entry of it is used. A file that lost whole entries looks complete. Therefore a file is always replaced as a whole.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from protocol.errors import ProtocolError, TruncatedError
from protocol.primitives import (
    INT8,
    INT32,
    INT64,
    Buffer,
    read_array_length,
    read_int8,
    read_int16,
    read_int32,
    read_int64,
    read_uuid,
    read_uvarint,
    write_uvarint,
)
from tiers.durable_folders import sync_folder
from tiers.errors import RemoteLogMetadataError
from tiers.metadata.records.segment_fields import (
    SEGMENT_METADATA_SNAPSHOT_API_KEY,
    SEGMENT_METADATA_SNAPSHOT_VERSION,
    read_snapshot,
    write_snapshot,
)
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.segment_metadata import LeaderEpochEntry, RemoteLogSegmentMetadata
from tiers.model.segment_state import RemoteLogSegmentState, RemotePartitionDeleteState

MAGIC = 0
_STORED_SEGMENT = 0
_DELETE_STATE = 1
_SEGMENT_SNAPSHOT = SEGMENT_METADATA_SNAPSHOT_API_KEY
_UNKNOWN_BROKER = -1
_HEADER = struct.Struct(">h16sq")
_FIRST_FIELDS = struct.Struct(">16sqqiqq")


@dataclass(frozen=True, slots=True)
class PartitionDeleteEntry:
    leader_epoch: int
    event_timestamp_ms: int
    state: RemotePartitionDeleteState


@dataclass(frozen=True, slots=True)
class FlatFile:
    topic_id: UUID
    metadata_offset: int
    segments: tuple[RemoteLogSegmentMetadata, ...]
    deletion: PartitionDeleteEntry | None = None


def encode_flat_file(file: FlatFile) -> bytes:
    entries: Iterable[bytes] = (
        _entry(_SEGMENT_SNAPSHOT, SEGMENT_METADATA_SNAPSHOT_VERSION, write_snapshot(segment))
        for segment in file.segments
    )
    encoded = _HEADER.pack(MAGIC, file.topic_id.bytes, file.metadata_offset) + b"".join(entries)
    if file.deletion is not None:
        state = file.deletion
        data = INT32.pack(state.leader_epoch) + INT64.pack(state.event_timestamp_ms) + INT8.pack(state.state)
        encoded += _entry(_DELETE_STATE, 0, data)
    return encoded


def decode_flat_file(buf: Buffer, partition: TopicIdPartition) -> FlatFile:
    """Decodes a file. `partition` is the partition to which the file belongs by its place.

    Raises `RemoteLogMetadataError` when the file is torn or belongs to another topic."""
    segments: list[RemoteLogSegmentMetadata] = []
    deletion: PartitionDeleteEntry | None = None
    try:
        magic, pos = read_int16(buf, 0)
        topic_id, pos = read_uuid(buf, pos)
        metadata_offset, pos = read_int64(buf, pos)
        if magic != MAGIC or topic_id != partition.topic_id:
            raise RemoteLogMetadataError(
                f"the metadata file has magic {magic} and topic id {topic_id}: it does not belong to {partition}"
            )
        while pos < len(buf):
            length, pos = read_uvarint(buf, pos)
            end = pos + length
            if end > len(buf):
                raise TruncatedError(f"an entry ends at byte {end}, and the file has {len(buf)} bytes")
            entry = memoryview(buf)[pos:end]
            kind, at = read_uvarint(entry, 0)
            version, at = read_uvarint(entry, at)
            if kind == _SEGMENT_SNAPSHOT and version == SEGMENT_METADATA_SNAPSHOT_VERSION:
                segment, at = read_snapshot(entry, at, partition)
                _check_end(entry, at)
                segments.append(segment)
            elif kind == _STORED_SEGMENT and version == 0:
                segments.append(_read_stored_segment(entry, at, partition))
            elif kind == _DELETE_STATE and version == 0:
                deletion = _read_deletion(entry, at)
            else:
                raise RemoteLogMetadataError(f"the file has an unknown entry of type {kind}, version {version}")
            pos = end
    except (ProtocolError, ValueError, struct.error) as error:
        raise RemoteLogMetadataError(f"the metadata file of {partition} cannot be read: {error}") from error
    return FlatFile(topic_id, metadata_offset, tuple(segments), deletion)


def write_flat_file(path: Path, file: FlatFile) -> None:
    """Replaces `path` atomically and durably."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as stream:
        stream.write(encode_flat_file(file))
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def _entry(kind: int, version: int, data: bytes) -> bytes:
    body = write_uvarint(kind) + write_uvarint(version) + data
    return write_uvarint(len(body)) + body


def _read_stored_segment(entry: memoryview, pos: int, partition: TopicIdPartition) -> RemoteLogSegmentMetadata:
    uuid, start_offset, end_offset, _, max_timestamp_ms, event_timestamp_ms = _FIRST_FIELDS.unpack_from(entry, pos)
    count, pos = read_array_length(entry, pos + _FIRST_FIELDS.size, compact=False)
    epochs = []
    for _ in range(count):
        epoch, pos = read_int32(entry, pos)
        epoch_start, pos = read_int64(entry, pos)
        epochs.append(LeaderEpochEntry(epoch, epoch_start))
    segment_size_bytes, pos = read_int32(entry, pos)
    state, pos = read_int8(entry, pos)
    _check_end(entry, pos)
    return RemoteLogSegmentMetadata(
        segment_id=RemoteLogSegmentId(partition, UUID(bytes=uuid)),
        start_offset=start_offset,
        end_offset=end_offset,
        broker_id=_UNKNOWN_BROKER,
        max_timestamp_ms=max_timestamp_ms,
        event_timestamp_ms=event_timestamp_ms,
        segment_leader_epochs=tuple(epochs),
        segment_size_bytes=segment_size_bytes,
        state=RemoteLogSegmentState(state),
    )


def _read_deletion(entry: memoryview, pos: int) -> PartitionDeleteEntry:
    leader_epoch, pos = read_int32(entry, pos)
    event_timestamp_ms, pos = read_int64(entry, pos)
    state, pos = read_int8(entry, pos)
    _check_end(entry, pos)
    return PartitionDeleteEntry(leader_epoch, event_timestamp_ms, RemotePartitionDeleteState(state))


def _check_end(entry: memoryview, pos: int) -> None:
    if pos != len(entry):
        raise RemoteLogMetadataError(f"an entry of the metadata file has {len(entry) - pos} unknown bytes at its end")
