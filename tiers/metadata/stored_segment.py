"""A segment as the materialised state keeps it: fixed fields first, so that a look-up costs microseconds.

The partition and the uuid are the key of the entry, and not repeated. Layout, big-endian: `_FIXED`, the leader epochs
as (i32, i64) each, the custom metadata, the topic's name to the end. It is nobody's but the state's: another layout
is another `SCHEMA_VERSION`.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from uuid import UUID

from tiers.errors import RemoteLogMetadataError
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.segment_metadata import LeaderEpochEntry, RemoteLogSegmentMetadata
from tiers.model.segment_state import RemoteLogSegmentState

_FIXED = struct.Struct(">qqiqqiB?Ii")
_EPOCH = struct.Struct(">iq")
_NO_CUSTOM_METADATA = -1
_STATES = tuple(RemoteLogSegmentState)


def encode_stored_segment(metadata: RemoteLogSegmentMetadata) -> bytes:
    """Whatever `serde` can read fits. What a clamp cuts off is not stored: the state works it out."""
    custom = metadata.custom_metadata
    epochs = metadata.segment_leader_epochs
    fixed = _FIXED.pack(
        metadata.start_offset,
        metadata.end_offset,
        metadata.broker_id,
        metadata.max_timestamp_ms,
        metadata.event_timestamp_ms,
        metadata.segment_size_bytes,
        metadata.state,
        metadata.txn_index_empty,
        len(epochs),
        _NO_CUSTOM_METADATA if custom is None else len(custom),
    )
    parts = [fixed, *(_EPOCH.pack(entry.epoch, entry.start_offset) for entry in epochs), custom or b""]
    return b"".join((*parts, metadata.topic_id_partition.topic.encode()))


@lru_cache(maxsize=4096)
def decode_stored_segment(key: bytes, raw: bytes) -> RemoteLogSegmentMetadata:
    """`key` is partition and uuid. Cached by its bytes: readers of old data ask for the same few segments again."""
    try:
        start, end, broker_id, max_timestamp, event_timestamp, size, state, no_txn, epoch_count, custom_length = (
            _FIXED.unpack_from(raw)
        )
        epochs_end = _FIXED.size + epoch_count * _EPOCH.size
        custom_end = epochs_end + max(custom_length, 0)
        if custom_end > len(raw):
            raise RemoteLogMetadataError("the saved state holds a torn segment")
        return RemoteLogSegmentMetadata(
            RemoteLogSegmentId(_partition(key[:20], raw[custom_end:]), UUID(bytes=key[20:])),
            start,
            end,
            broker_id,
            max_timestamp,
            event_timestamp,
            tuple(LeaderEpochEntry(*entry) for entry in _EPOCH.iter_unpack(raw[_FIXED.size : epochs_end])),
            size,
            _STATES[state],
            None if custom_length == _NO_CUSTOM_METADATA else raw[epochs_end:custom_end],
            no_txn,
        )
    except (struct.error, IndexError, ValueError) as error:
        raise RemoteLogMetadataError(f"the saved state holds an unreadable segment: {error}") from error


@lru_cache(maxsize=1024)
def _partition(key: bytes, topic: bytes) -> TopicIdPartition:
    return TopicIdPartition(UUID(bytes=key[:16]), int.from_bytes(key[16:], "big", signed=True), topic.decode())
