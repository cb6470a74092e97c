"""Encodes and decodes `.snapshot`, Kafka's producer snapshot: the state of every producer at an offset.

See docs/semantics.md 7.

    version int16 = 1 | CRC-32C uint32 of all following bytes | number of entries int32 | entries of 46 bytes

An entry is (producer id int64, epoch int16, last sequence int32, last offset int64, offset delta int32,
timestamp int64, coordinator epoch int32, first offset of the open transaction int64 or -1).
"""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct
from typing import NamedTuple

from protocol.records.record_batch import crc32c
from tiers.errors import CorruptSegmentError

NO_SEQUENCE = -1
NO_OFFSET = -1

_VERSION = 1
_HEADER = Struct(">hI")
_COUNT = Struct(">i")
_ENTRY = Struct(">qhiqiqiq")
_ENTRIES_FROM = _HEADER.size + _COUNT.size


class ProducerStateEntry(NamedTuple):
    """The state of one producer.

    `last_sequence` and `last_offset` belong to the last batch of the current epoch; they are -1 before its first batch.
    `offset_delta` is that batch's last offset minus its first. `timestamp_ms` is the timestamp of the last batch or
    marker."""

    producer_id: int
    epoch: int
    last_sequence: int
    last_offset: int
    offset_delta: int
    timestamp_ms: int
    coordinator_epoch: int
    current_txn_first_offset: int


def encode_producer_snapshot(entries: Iterable[ProducerStateEntry]) -> bytes:
    packed = [_ENTRY.pack(*entry) for entry in entries]
    content = b"".join((_COUNT.pack(len(packed)), *packed))
    return _HEADER.pack(_VERSION, crc32c(content, 0, len(content))) + content


def decode_producer_snapshot(data: bytes | memoryview) -> tuple[ProducerStateEntry, ...]:
    """Returns the entries in the order of the file.

    Raises `CorruptSegmentError`, also when a producer appears twice.
    """
    view = memoryview(data)
    if len(view) < _ENTRIES_FROM:
        raise CorruptSegmentError(f"producer snapshot: {len(view)} bytes are shorter than its header")
    version, crc = _HEADER.unpack_from(view)
    if version != _VERSION:
        raise CorruptSegmentError(f"producer snapshot: version {version} is not supported")
    if crc32c(view, _HEADER.size, len(view)) != crc:
        raise CorruptSegmentError("producer snapshot: CRC mismatch")
    count = _COUNT.unpack_from(view, _HEADER.size)[0]
    if count < 0 or len(view) != _ENTRIES_FROM + count * _ENTRY.size:
        raise CorruptSegmentError(f"producer snapshot: {count} entries do not match {len(view)} bytes")
    entries = tuple(ProducerStateEntry(*fields) for fields in _ENTRY.iter_unpack(view[_ENTRIES_FROM:]))
    if len({entry.producer_id for entry in entries}) != count:
        raise CorruptSegmentError("producer snapshot: a producer appears twice")
    return entries
