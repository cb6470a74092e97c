"""Encodes and decodes the values and keys of the records in the remote log metadata topic.

* The values of api keys 0 to 2 are Kafka's own, byte for byte (docs/semantics.md 11.1): uvarint frame version, uvarint
  api key, uvarint version, then a flexible message, and nothing after it. Api keys from 1000 on are Tidegate's.
* A reader may ignore an unknown record whose api key is 2000 or above. It may not ignore any other record of Tidegate:
  a record with an unknown api key below 2000, or an unknown version, is of a later release (`UnknownRecordError`). A
  record with an api key below 1000, or in a frame of another version, is Tidegate's only if it was written in a
  transaction: brokers write their own records without one.
* Kafka writes no keys. Tidegate does, so that the topic can be compacted. The key names the subject of the record. A
  segment has one key for its addition and one for its updates, since an update cannot be read without the addition.
* A record with a null value is a tombstone: the subject of its key is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from protocol.errors import ProtocolError
from protocol.primitives import (
    EMPTY_TAGGED_SECTION,
    INT8,
    INT32,
    INT64,
    Buffer,
    read_int8,
    read_int32,
    read_int64,
    read_uuid,
    read_uvarint,
    skip_tagged_section,
    write_uvarint,
)
from tiers.errors import RemoteLogMetadataError
from tiers.metadata.records.own_records import (
    read_copy_plan,
    read_cut,
    read_local_log_start,
    read_log_gap,
    read_log_start,
    read_tier_config,
    read_tier_marker,
    read_topic_deletion,
    read_topic_missing,
    read_unfinished_rebuild,
    write_copy_plan,
    write_cut,
    write_head_alone,
    write_local_log_start,
    write_log_gap,
    write_log_start,
    write_tier_config,
    write_tier_marker,
    write_topic_deletion,
)
from tiers.metadata.records.record_parts import (
    read_nullable_bytes,
    read_partition,
    read_segment_id,
    write_nullable_bytes,
    write_partition,
    write_segment_id,
)
from tiers.metadata.records.segment_fields import read_segment_fields, write_segment_fields
from tiers.model.copy_plan import CopyPlan
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.log_start import LogStart
from tiers.model.segment_metadata import (
    CutUpdate,
    LocalLogStartUpdate,
    LogGapUpdate,
    LogStartOffsetUpdate,
    RemoteLogSegmentMetadata,
    RemoteLogSegmentMetadataUpdate,
    RemotePartitionDeleteMetadata,
    TierMarkerUpdate,
    TopicDeletionUpdate,
    TopicMissingUpdate,
    TopicTierConfigUpdate,
    UnfinishedRebuildUpdate,
)
from tiers.model.segment_state import RemoteLogSegmentState, RemotePartitionDeleteState

SEGMENT_METADATA_API_KEY = 0
SEGMENT_METADATA_UPDATE_API_KEY = 1
PARTITION_DELETE_API_KEY = 2
LOG_START_OFFSET_API_KEY = 1000
TOPIC_TIER_CONFIG_API_KEY = 1001
CUT_API_KEY = 1002
LOCAL_LOG_START_API_KEY = 1004
COPY_PLAN_API_KEY = 1005
LOG_GAP_API_KEY = 1006
UNFINISHED_REBUILD_API_KEY = 1009
TIER_MARKER_API_KEY = 1010
TOPIC_DELETION_API_KEY = 2000
TOPIC_MISSING_API_KEY = 2001

_FIRST_OWN_API_KEY = 1000
_FIRST_IGNORABLE_API_KEY = 2000
_FRAME_VERSION = 1
_MESSAGE_VERSIONS = {
    LOG_START_OFFSET_API_KEY: 2,
    CUT_API_KEY: 1,
    LOCAL_LOG_START_API_KEY: 1,
    COPY_PLAN_API_KEY: 1,
}
"""The message versions of the record types whose messages changed. All other types have version 0."""

MetadataRecord = (
    RemoteLogSegmentMetadata
    | RemoteLogSegmentMetadataUpdate
    | RemotePartitionDeleteMetadata
    | LogStartOffsetUpdate
    | TopicTierConfigUpdate
    | CutUpdate
    | LocalLogStartUpdate
    | CopyPlan
    | LogGapUpdate
    | UnfinishedRebuildUpdate
    | TierMarkerUpdate
    | TopicDeletionUpdate
    | TopicMissingUpdate
)

KeyAndValue = tuple[bytes, bytes | None]
"""An encoded record. A value of None is a tombstone: it removes the record with this key."""


class UnknownRecordError(RemoteLogMetadataError):
    """An error about a record that this release does not know and may not ignore: a later release wrote it.

    If `is_surely_ours` is false and the record was written without a transaction, another program may have written
    it."""

    def __init__(self, what: str, *, is_surely_ours: bool) -> None:
        super().__init__(f"{what}, which a later release wrote")
        self.is_surely_ours = is_surely_ours


class RecordType(NamedTuple):
    api_key: int
    version: int


class RecordKey(NamedTuple):
    """The subject of a record. `name` is the uuid of a segment or a plan, a log start, or empty."""

    api_key: int
    topic_id_partition: TopicIdPartition
    name: bytes = b""


def key_of(record: MetadataRecord) -> RecordKey:
    match record:
        case RemoteLogSegmentMetadata():
            return RecordKey(SEGMENT_METADATA_API_KEY, record.topic_id_partition, record.segment_id.id.bytes)
        case RemoteLogSegmentMetadataUpdate():
            partition = record.segment_id.topic_id_partition
            return RecordKey(SEGMENT_METADATA_UPDATE_API_KEY, partition, record.segment_id.id.bytes)
        case RemotePartitionDeleteMetadata():
            return RecordKey(PARTITION_DELETE_API_KEY, record.topic_id_partition)
        case LogStartOffsetUpdate():
            return log_start_key(record.topic_id_partition, record.log_start)
        case TopicTierConfigUpdate():
            return RecordKey(TOPIC_TIER_CONFIG_API_KEY, record.topic_id_partition)
        case CutUpdate():
            return cut_key(record.topic_id_partition, record.leader_epoch, record.offset)
        case LocalLogStartUpdate():
            # Only owners write this record, one after the other, so the last record counts.
            return local_log_start_key(record.topic_id_partition)
        case CopyPlan():
            return RecordKey(COPY_PLAN_API_KEY, record.topic_id_partition, record.plan_id.bytes)
        case LogGapUpdate():
            return log_gap_key(record.topic_id_partition, record.gap.first_offset)
        case UnfinishedRebuildUpdate():
            return unfinished_rebuild_key(record.topic_id_partition)
        case TierMarkerUpdate():
            return tier_marker_key(record.topic_id_partition, record.location)
        case TopicDeletionUpdate():
            return topic_deletion_key(record.topic_id_partition)
        case TopicMissingUpdate():
            return topic_missing_key(record.topic_id_partition)


def segment_keys(segment_id: RemoteLogSegmentId) -> tuple[RecordKey, RecordKey]:
    """Returns both keys of a segment, in the order of writing. DELETE_SEGMENT_FINISHED is followed by tombstones."""
    partition, name = segment_id.topic_id_partition, segment_id.id.bytes
    return (
        RecordKey(SEGMENT_METADATA_API_KEY, partition, name),
        RecordKey(SEGMENT_METADATA_UPDATE_API_KEY, partition, name),
    )


def log_start_key(partition: TopicIdPartition, start: LogStart) -> RecordKey:
    """The key names the whole log start, so no record replaces another log start, in whatever order records come.

    A log start that was only seen deletes nothing: of these the last record counts."""
    if not start.deletes:
        return RecordKey(LOG_START_OFFSET_API_KEY, partition)
    position = INT32.pack(start.leader_epoch) + INT64.pack(start.offset)
    name = position + INT8.pack(start.reason) + INT32.pack(start.last_epoch)
    return RecordKey(LOG_START_OFFSET_API_KEY, partition, name)


def nothing_key(partition: TopicIdPartition) -> RecordKey:
    """Returns a key whose tombstone has no meaning: no log start is ever recorded under this name.

    A process writes the tombstone to learn the time of the append, or to make another process read."""
    return RecordKey(LOG_START_OFFSET_API_KEY, partition, b"clock")


def cut_key(partition: TopicIdPartition, leader_epoch: int, offset: int) -> RecordKey:
    return RecordKey(CUT_API_KEY, partition, INT32.pack(leader_epoch) + INT64.pack(offset))


def local_log_start_key(partition: TopicIdPartition) -> RecordKey:
    return RecordKey(LOCAL_LOG_START_API_KEY, partition)


def log_gap_key(partition: TopicIdPartition, first_offset: int) -> RecordKey:
    return RecordKey(LOG_GAP_API_KEY, partition, INT64.pack(first_offset))


def unfinished_rebuild_key(metadata_partition: TopicIdPartition) -> RecordKey:
    return RecordKey(UNFINISHED_REBUILD_API_KEY, metadata_partition)


def tier_marker_key(partition: TopicIdPartition, location: str) -> RecordKey:
    return RecordKey(TIER_MARKER_API_KEY, partition, location.encode())


def topic_deletion_key(partition: TopicIdPartition) -> RecordKey:
    return RecordKey(TOPIC_DELETION_API_KEY, partition)


def topic_missing_key(partition: TopicIdPartition) -> RecordKey:
    return RecordKey(TOPIC_MISSING_API_KEY, partition)


def key_and_value(record: MetadataRecord) -> KeyAndValue:
    return encode_key(key_of(record)), encode_value(record)


def tombstone(key: RecordKey) -> KeyAndValue:
    return encode_key(key), None


def message_version(api_key: int) -> int:
    """Returns the message version that this release writes. It is also the only one that this release reads."""
    return _MESSAGE_VERSIONS.get(api_key, 0)


def known_record_types() -> frozenset[RecordType]:
    """Returns the record types that this release reads."""
    read = {RecordType(api_key, message_version(api_key)) for api_key in _READERS}
    return frozenset(read | _SAY_NOTHING)


def read_record_type(value: Buffer) -> RecordType:
    """Returns the record type of a value that `encode_value` wrote."""
    _, pos = read_uvarint(value, 0)
    api_key, pos = read_uvarint(value, pos)
    return RecordType(api_key, read_uvarint(value, pos)[0])


def check_known(key: RecordKey) -> None:
    """Checks the key of a tombstone. Raises `UnknownRecordError` if this release does not know it."""
    if key.api_key not in _READERS and not is_ignorable(key.api_key):
        is_surely_ours = key.api_key >= _FIRST_OWN_API_KEY
        raise UnknownRecordError(f"a tombstone of api key {key.api_key}", is_surely_ours=is_surely_ours)


def is_ignorable(api_key: int) -> bool:
    """Returns whether a reader that does not know the record type may ignore the record."""
    return api_key >= _FIRST_IGNORABLE_API_KEY


def encode_key(key: RecordKey) -> bytes:
    partition = key.topic_id_partition
    return write_uvarint(key.api_key) + partition.topic_id.bytes + INT32.pack(partition.partition) + key.name


def decode_key(buf: Buffer) -> RecordKey:
    """Decodes a key. It does not contain the topic's name. Raises `RemoteLogMetadataError`."""
    try:
        api_key, pos = read_uvarint(buf, 0)
        topic_id, pos = read_uuid(buf, pos)
        partition, pos = read_int32(buf, pos)
    except ProtocolError as error:
        raise RemoteLogMetadataError(f"the key of a metadata record cannot be read: {error}") from error
    return RecordKey(api_key, TopicIdPartition(topic_id, partition), bytes(buf[pos:]))


def encode_value(record: MetadataRecord) -> bytes:
    match record:
        case RemoteLogSegmentMetadata():
            api_key, message = SEGMENT_METADATA_API_KEY, _write_metadata(record)
        case RemoteLogSegmentMetadataUpdate():
            api_key, message = SEGMENT_METADATA_UPDATE_API_KEY, _write_update(record)
        case RemotePartitionDeleteMetadata():
            api_key, message = PARTITION_DELETE_API_KEY, _write_partition_delete(record)
        case LogStartOffsetUpdate():
            api_key, message = LOG_START_OFFSET_API_KEY, write_log_start(record)
        case TopicTierConfigUpdate():
            api_key, message = TOPIC_TIER_CONFIG_API_KEY, write_tier_config(record)
        case CutUpdate():
            api_key, message = CUT_API_KEY, write_cut(record)
        case LocalLogStartUpdate():
            api_key, message = LOCAL_LOG_START_API_KEY, write_local_log_start(record)
        case CopyPlan():
            api_key, message = COPY_PLAN_API_KEY, write_copy_plan(record)
        case LogGapUpdate():
            api_key, message = LOG_GAP_API_KEY, write_log_gap(record)
        case UnfinishedRebuildUpdate():
            api_key, message = UNFINISHED_REBUILD_API_KEY, write_head_alone(record)
        case TierMarkerUpdate():
            api_key, message = TIER_MARKER_API_KEY, write_tier_marker(record)
        case TopicDeletionUpdate():
            api_key, message = TOPIC_DELETION_API_KEY, write_topic_deletion(record)
        case TopicMissingUpdate():
            api_key, message = TOPIC_MISSING_API_KEY, write_head_alone(record)
    frame = write_uvarint(_FRAME_VERSION) + write_uvarint(api_key) + write_uvarint(message_version(api_key))
    return frame + message


def decode_value(buf: Buffer) -> MetadataRecord | None:
    """Decodes a value; None for an unknown record that a reader may ignore.

    Raises `UnknownRecordError` for an unknown record that a reader may not ignore, and `RemoteLogMetadataError` for
    torn or otherwise unreadable bytes."""
    try:
        frame_version, pos = read_uvarint(buf, 0)
        api_key, pos = read_uvarint(buf, pos)
        version, pos = read_uvarint(buf, pos)
        if frame_version != _FRAME_VERSION:
            raise UnknownRecordError(f"a metadata record of frame version {frame_version}", is_surely_ours=False)
        read = _READERS.get(api_key)
        if read is None or version != message_version(api_key):
            if (api_key, version) not in _SAY_NOTHING:
                _refuse_unless_ignorable(api_key, version)
            return None
        record, pos = read(buf, pos)
    except (ProtocolError, ValueError) as error:
        raise RemoteLogMetadataError(f"a metadata record of {len(buf)} bytes cannot be read: {error}") from error
    if pos != len(buf):
        raise RemoteLogMetadataError(f"a metadata record has {len(buf) - pos} unknown bytes at its end")
    return record


def _refuse_unless_ignorable(api_key: int, version: int) -> None:
    if not is_ignorable(api_key):
        what = f"a metadata record of api key {api_key}, version {version}"
        raise UnknownRecordError(what, is_surely_ours=api_key >= _FIRST_OWN_API_KEY)


def _write_metadata(metadata: RemoteLogSegmentMetadata) -> bytes:
    return write_segment_id(metadata.segment_id) + write_segment_fields(metadata)


def _read_metadata(buf: Buffer, pos: int) -> tuple[RemoteLogSegmentMetadata, int]:
    segment_id, pos = read_segment_id(buf, pos)
    return read_segment_fields(buf, pos, segment_id)


def _write_update(update: RemoteLogSegmentMetadataUpdate) -> bytes:
    return (
        write_segment_id(update.segment_id)
        + INT32.pack(update.broker_id)
        + INT64.pack(update.event_timestamp_ms)
        + write_nullable_bytes(update.custom_metadata)
        + INT8.pack(update.state)
        + EMPTY_TAGGED_SECTION
    )


def _read_update(buf: Buffer, pos: int) -> tuple[RemoteLogSegmentMetadataUpdate, int]:
    segment_id, pos = read_segment_id(buf, pos)
    broker_id, pos = read_int32(buf, pos)
    event_timestamp_ms, pos = read_int64(buf, pos)
    custom_metadata, pos = read_nullable_bytes(buf, pos)
    state, pos = read_int8(buf, pos)
    update = RemoteLogSegmentMetadataUpdate(
        segment_id, broker_id, event_timestamp_ms, RemoteLogSegmentState(state), custom_metadata
    )
    return update, skip_tagged_section(buf, pos)


def _write_partition_delete(metadata: RemotePartitionDeleteMetadata) -> bytes:
    return (
        write_partition(metadata.topic_id_partition)
        + INT32.pack(metadata.broker_id)
        + INT64.pack(metadata.event_timestamp_ms)
        + INT8.pack(metadata.state)
        + EMPTY_TAGGED_SECTION
    )


def _read_partition_delete(buf: Buffer, pos: int) -> tuple[RemotePartitionDeleteMetadata, int]:
    partition, pos = read_partition(buf, pos)
    broker_id, pos = read_int32(buf, pos)
    event_timestamp_ms, pos = read_int64(buf, pos)
    state, pos = read_int8(buf, pos)
    metadata = RemotePartitionDeleteMetadata(
        partition, broker_id, event_timestamp_ms, RemotePartitionDeleteState(state)
    )
    return metadata, skip_tagged_section(buf, pos)


_READERS: dict[int, Callable[[Buffer, int], tuple[MetadataRecord, int]]] = {
    SEGMENT_METADATA_API_KEY: _read_metadata,
    SEGMENT_METADATA_UPDATE_API_KEY: _read_update,
    PARTITION_DELETE_API_KEY: _read_partition_delete,
    LOG_START_OFFSET_API_KEY: read_log_start,
    TOPIC_TIER_CONFIG_API_KEY: read_tier_config,
    CUT_API_KEY: read_cut,
    LOCAL_LOG_START_API_KEY: read_local_log_start,
    COPY_PLAN_API_KEY: read_copy_plan,
    LOG_GAP_API_KEY: read_log_gap,
    UNFINISHED_REBUILD_API_KEY: read_unfinished_rebuild,
    TIER_MARKER_API_KEY: read_tier_marker,
    TOPIC_DELETION_API_KEY: read_topic_deletion,
    TOPIC_MISSING_API_KEY: read_topic_missing,
}
_SAY_NOTHING = frozenset(RecordType(api_key, 0) for api_key in (LOG_START_OFFSET_API_KEY, LOCAL_LOG_START_API_KEY))
"""Record types of drafts of the first release. Their offsets have no leader epoch, so they cannot be applied to any
log."""
