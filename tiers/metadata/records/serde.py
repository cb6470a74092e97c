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

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from protocol.errors import ProtocolError
from protocol.primitives import (
    INT8,
    INT32,
    INT64,
    Buffer,
    read_int32,
    read_uuid,
    read_uvarint,
    write_uvarint,
)
from tiers.errors import RemoteLogMetadataError
from tiers.metadata.records.codecs import (
    BYTE,
    FLAG,
    ID,
    LONG,
    NULLABLE_BYTES,
    NUMBER,
    PARTITION,
    SEGMENT_FIELDS,
    SEGMENT_ID,
    SEGMENT_TAGS,
    STATE,
    TEXT,
    Codec,
    array,
    converted,
    fields,
    segment_of,
    structure,
)
from tiers.model.copy_plan import CopyPlan
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.log_start import LogGap, LogStart, LogStartReason, OffsetAndEpoch
from tiers.model.quick_values import quick
from tiers.model.segment_metadata import (
    CutUpdate,
    LocalLogStartUpdate,
    LogGapUpdate,
    LogStartOffsetUpdate,
    RemoteLogSegmentMetadata,
    RemoteLogSegmentMetadataUpdate,
    RemotePartitionDeleteMetadata,
    RemotePartitionDeleteState,
    TierMarkerUpdate,
    TopicDeletionUpdate,
    TopicMissingUpdate,
    TopicTierConfigUpdate,
    UnfinishedRebuildUpdate,
)

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

OwnRecord = (
    LogStartOffsetUpdate
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
"""The record types of Tidegate's own. Of the records with one key, the state keeps one (`replay`)."""
MetadataRecord = RemoteLogSegmentMetadata | RemoteLogSegmentMetadataUpdate | RemotePartitionDeleteMetadata | OwnRecord

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


class _Message(NamedTuple):
    """How a record type is written. `version` is the only one that this release writes and reads."""

    api_key: int
    version: int
    codec: Codec
    name: Callable[[Any], bytes]
    """Returns the name in the record's key."""


def _segment_name(record: RemoteLogSegmentMetadata | RemoteLogSegmentMetadataUpdate) -> bytes:
    return record.segment_id.id.bytes


def _log_start_name(start: LogStart) -> bytes:
    if not start.deletes:
        return b""
    position = INT32.pack(start.leader_epoch) + INT64.pack(start.offset)
    return position + INT8.pack(start.reason) + INT32.pack(start.last_epoch)


def _no_name(record: MetadataRecord) -> bytes:
    return b""


def _offset(value: int) -> int:
    if value < 0:
        raise RemoteLogMetadataError(f"a record has the negative offset {value}")
    return value


def _gap(first_offset: int, next_offset: int) -> LogGap:
    if not 0 <= first_offset < next_offset:
        raise RemoteLogMetadataError(f"a gap holds no offsets: {first_offset} to {next_offset}")
    return LogGap(first_offset, next_offset)


class _Setting(NamedTuple):
    key: str
    value: str


_OFFSET = converted(LONG, _offset)
_SETTINGS = converted(
    array(structure(_Setting, key=TEXT, value=TEXT)),
    dict,
    lambda config: [_Setting(*setting) for setting in config.items()],
)


def _own(make: Callable[..., Any], **codecs: Codec) -> Codec:
    """Returns the codec of a record type of Tidegate's own. All of them begin with the same three fields."""
    return structure(make, topic_id_partition=PARTITION, writer=TEXT, event_timestamp_ms=LONG, **codecs)


_MESSAGES: dict[type, _Message] = {
    RemoteLogSegmentMetadata: _Message(
        SEGMENT_METADATA_API_KEY,
        0,
        structure(segment_of, SEGMENT_TAGS, segment_id=SEGMENT_ID, **SEGMENT_FIELDS),
        _segment_name,
    ),
    RemoteLogSegmentMetadataUpdate: _Message(
        SEGMENT_METADATA_UPDATE_API_KEY,
        0,
        structure(
            quick(RemoteLogSegmentMetadataUpdate),
            segment_id=SEGMENT_ID,
            broker_id=NUMBER,
            event_timestamp_ms=LONG,
            custom_metadata=NULLABLE_BYTES,
            state=STATE,
        ),
        _segment_name,
    ),
    RemotePartitionDeleteMetadata: _Message(
        PARTITION_DELETE_API_KEY,
        0,
        structure(
            RemotePartitionDeleteMetadata,
            topic_id_partition=PARTITION,
            broker_id=NUMBER,
            event_timestamp_ms=LONG,
            state=converted(BYTE, RemotePartitionDeleteState),
        ),
        _no_name,
    ),
    # The key names the whole log start, so no record replaces another log start, in whatever order records come. A log
    # start that was only seen deletes nothing: of these the last record counts.
    LogStartOffsetUpdate: _Message(
        LOG_START_OFFSET_API_KEY,
        2,
        _own(
            LogStartOffsetUpdate,
            log_start=fields(
                LogStart,
                offset=_OFFSET,
                leader_epoch=NUMBER,
                reason=converted(BYTE, LogStartReason),
                last_epoch=NUMBER,
            ),
        ),
        lambda record: _log_start_name(record.log_start),
    ),
    TopicTierConfigUpdate: _Message(
        TOPIC_TIER_CONFIG_API_KEY, 0, _own(TopicTierConfigUpdate, config=_SETTINGS), _no_name
    ),
    CutUpdate: _Message(
        CUT_API_KEY,
        1,
        _own(CutUpdate, offset=_OFFSET, leader_epoch=NUMBER, is_proved=FLAG),
        lambda record: INT32.pack(record.leader_epoch) + INT64.pack(record.offset),
    ),
    # Only owners write this record, one after the other, so the last record counts.
    LocalLogStartUpdate: _Message(
        LOCAL_LOG_START_API_KEY,
        1,
        _own(LocalLogStartUpdate, local_log_start=fields(OffsetAndEpoch, offset=_OFFSET, leader_epoch=NUMBER)),
        _no_name,
    ),
    CopyPlan: _Message(
        COPY_PLAN_API_KEY,
        1,
        _own(CopyPlan, plan_id=ID, attempts=NUMBER, leader_epoch=NUMBER, copy_epoch=NUMBER, bounds=array(LONG)),
        lambda record: record.plan_id.bytes,
    ),
    LogGapUpdate: _Message(
        LOG_GAP_API_KEY,
        0,
        _own(LogGapUpdate, gap=fields(_gap, first_offset=LONG, next_offset=LONG), leader_epoch=NUMBER),
        lambda record: INT64.pack(record.gap.first_offset),
    ),
    UnfinishedRebuildUpdate: _Message(UNFINISHED_REBUILD_API_KEY, 0, _own(UnfinishedRebuildUpdate), _no_name),
    TierMarkerUpdate: _Message(
        TIER_MARKER_API_KEY,
        0,
        _own(TierMarkerUpdate, location=TEXT, marker_id=ID, is_confirmed=FLAG),
        lambda record: record.location.encode(),
    ),
    TopicDeletionUpdate: _Message(TOPIC_DELETION_API_KEY, 0, _own(TopicDeletionUpdate, is_confirmed=FLAG), _no_name),
    TopicMissingUpdate: _Message(TOPIC_MISSING_API_KEY, 0, _own(TopicMissingUpdate), _no_name),
}
_READ = {message.api_key: message for message in _MESSAGES.values()}


def key_of(record: MetadataRecord) -> RecordKey:
    message = _MESSAGES[type(record)]
    return RecordKey(message.api_key, record.topic_id_partition, message.name(record))


def segment_keys(segment_id: RemoteLogSegmentId) -> tuple[RecordKey, RecordKey]:
    """Returns both keys of a segment, in the order of writing. DELETE_SEGMENT_FINISHED is followed by tombstones."""
    partition, name = segment_id.topic_id_partition, segment_id.id.bytes
    return (
        RecordKey(SEGMENT_METADATA_API_KEY, partition, name),
        RecordKey(SEGMENT_METADATA_UPDATE_API_KEY, partition, name),
    )


def log_start_key(partition: TopicIdPartition, start: LogStart) -> RecordKey:
    return RecordKey(LOG_START_OFFSET_API_KEY, partition, _log_start_name(start))


def nothing_key(partition: TopicIdPartition) -> RecordKey:
    """Returns a key whose tombstone has no meaning: no log start is ever recorded under this name.

    A process writes the tombstone to learn the time of the append, or to make another process read."""
    return RecordKey(LOG_START_OFFSET_API_KEY, partition, b"clock")


def log_gap_key(partition: TopicIdPartition, first_offset: int) -> RecordKey:
    return RecordKey(LOG_GAP_API_KEY, partition, INT64.pack(first_offset))


def key_and_value(record: MetadataRecord) -> KeyAndValue:
    return encode_key(key_of(record)), encode_value(record)


def tombstone(key: RecordKey) -> KeyAndValue:
    return encode_key(key), None


def api_key_of(kind: type) -> int:
    return _MESSAGES[kind].api_key


def known_record_types() -> frozenset[RecordType]:
    """Returns the record types that this release reads."""
    return frozenset(RecordType(message.api_key, message.version) for message in _READ.values())


def read_record_type(value: Buffer) -> RecordType:
    """Returns the record type of a value that `encode_value` wrote."""
    _, pos = read_uvarint(value, 0)
    api_key, pos = read_uvarint(value, pos)
    return RecordType(api_key, read_uvarint(value, pos)[0])


def check_known(key: RecordKey) -> None:
    """Checks the key of a tombstone. Raises `UnknownRecordError` if this release does not know it."""
    if key.api_key not in _READ:
        _refuse_unless_ignorable(f"a tombstone of api key {key.api_key}", key.api_key)


def is_ignorable(api_key: int) -> bool:
    """Returns whether a reader that does not know the record type may ignore the record."""
    return api_key >= _FIRST_IGNORABLE_API_KEY


def _refuse_unless_ignorable(what: str, api_key: int) -> None:
    if not is_ignorable(api_key):
        raise UnknownRecordError(what, is_surely_ours=api_key >= _FIRST_OWN_API_KEY)


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
    message = _MESSAGES[type(record)]
    frame = write_uvarint(_FRAME_VERSION) + write_uvarint(message.api_key) + write_uvarint(message.version)
    return frame + message.codec.write(record)


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
        message = _READ.get(api_key)
        if message is None or version != message.version:
            _refuse_unless_ignorable(f"a metadata record of api key {api_key}, version {version}", api_key)
            return None
        record: MetadataRecord
        record, pos = message.codec.read(buf, pos)
    except (ProtocolError, ValueError) as error:
        raise RemoteLogMetadataError(f"a metadata record of {len(buf)} bytes cannot be read: {error}") from error
    if pos != len(buf):
        raise RemoteLogMetadataError(f"a metadata record has {len(buf) - pos} unknown bytes at its end")
    return record


_TYPES = array(fields(RecordType, api_key=NUMBER, version=NUMBER), compact=False)


def check_writable(records: Sequence[KeyAndValue], known: frozenset[RecordType]) -> None:
    """Checks that every member of the group understands `records`, which are keys and values.

    `known` has the record types (an api key and the version of its message) that every member declares in its
    subscription. Otherwise a member would continue without a record, and decide with less knowledge than the others. A
    process that is no member, or that joins later, may find such a record: then that metadata partition is not fresh in
    the process until the process is upgraded (`committed_records`).

    The rule applies to the records that owners write in the generation of their assignment. A record that is written
    without ownership (`TopicLog`) must have a type that is read by every release that declares record types.

    A member that knows any version of an api key understands its tombstones. Raises `RemoteLogMetadataError` for a
    record whose type is not in `known` and that no reader may ignore."""
    api_keys = {record_type.api_key for record_type in known}
    for key, value in records:
        api_key = decode_key(key).api_key
        is_known = api_key in api_keys if value is None else read_record_type(value) in known
        if not is_known and not is_ignorable(api_key):
            raise RemoteLogMetadataError(
                f"a member of the group does not know these records of api key {api_key} yet: upgrade all proxies and"
                " jobs"
            )


def encode_record_types(record_types: Iterable[RecordType]) -> bytes:
    return _TYPES.write(sorted(record_types))


def decode_record_types(buf: Buffer, pos: int) -> tuple[frozenset[RecordType], int]:
    """Reads record types at `pos`. Returns them and the position after them. Raises `ProtocolError`."""
    record_types, pos = _TYPES.read(buf, pos)
    return frozenset(record_types), pos
