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
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from uuid import UUID

from protocol.errors import ProtocolError, TruncatedError
from protocol.primitives import Buffer, read_int16, read_int64, read_uuid, read_uvarint, write_uvarint
from tiers.durable_folders import sync_folder
from tiers.errors import RemoteLogMetadataError
from tiers.metadata.records.codecs import (
    BYTE,
    ID,
    LONG,
    NUMBER,
    SEGMENT_FIELDS,
    SEGMENT_TAGS,
    STATE,
    Codec,
    array,
    converted,
    fields,
    segment_of,
    structure,
)
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.segment_metadata import LeaderEpochEntry, RemoteLogSegmentMetadata, RemotePartitionDeleteState

MAGIC = 0
_STORED_SEGMENT = 0, 0
_DELETE_STATE = 1, 0
_SEGMENT_SNAPSHOT = 3, 0
_UNKNOWN_BROKER = -1
_HEADER = struct.Struct(">h16sq")


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


_DELETION = fields(
    PartitionDeleteEntry,
    leader_epoch=NUMBER,
    event_timestamp_ms=LONG,
    state=converted(BYTE, RemotePartitionDeleteState),
)
_UUID = "segment_id.id"
_SNAPSHOT = structure(dict, SEGMENT_TAGS, **{_UUID: ID}, **SEGMENT_FIELDS)
_FOUNDING_FIELDS = fields(
    lambda leader_epoch, **values: values | {"broker_id": _UNKNOWN_BROKER},  # the leader epoch is that of the writer
    **{_UUID: ID},
    start_offset=LONG,
    end_offset=LONG,
    leader_epoch=NUMBER,
    max_timestamp_ms=LONG,
    event_timestamp_ms=LONG,
    segment_leader_epochs=array(fields(LeaderEpochEntry, epoch=NUMBER, start_offset=LONG), compact=False),
    segment_size_bytes=NUMBER,
    state=STATE,
)
_CODECS: Final[dict[tuple[int, int], Codec]] = {
    _SEGMENT_SNAPSHOT: _SNAPSHOT,
    _STORED_SEGMENT: _FOUNDING_FIELDS,
    _DELETE_STATE: _DELETION,
}


def encode_flat_file(file: FlatFile) -> bytes:
    entries = [_entry(_SEGMENT_SNAPSHOT, segment) for segment in file.segments]
    if file.deletion is not None:
        entries.append(_entry(_DELETE_STATE, file.deletion))
    return _HEADER.pack(MAGIC, file.topic_id.bytes, file.metadata_offset) + b"".join(entries)


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
            kind, at = read_uvarint(buf, pos)
            version, at = read_uvarint(buf, at)
            codec = _CODECS.get((kind, version))
            if codec is None:
                raise RemoteLogMetadataError(f"the file has an unknown entry of type {kind}, version {version}")
            entry, pos = codec.read(memoryview(buf)[:end], at)
            if pos != end:
                raise RemoteLogMetadataError(f"an entry of the metadata file has {end - pos} unknown bytes at its end")
            if isinstance(entry, PartitionDeleteEntry):
                deletion = entry
            else:
                segment_id = RemoteLogSegmentId(partition, entry.pop(_UUID))
                segments.append(segment_of(segment_id=segment_id, **entry))
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


def _entry(kind_and_version: tuple[int, int], value: RemoteLogSegmentMetadata | PartitionDeleteEntry) -> bytes:
    body = b"".join(map(write_uvarint, kind_and_version)) + _CODECS[kind_and_version].write(value)
    return write_uvarint(len(body)) + body
