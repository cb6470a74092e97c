"""`.snapshot`, Kafka's producer snapshot: what every producer last wrote up to an offset (semantics 7).

    version int16 = 1 | CRC-32C of what follows uint32 | number of entries int32 | entries of 46 bytes

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
    """Sequence and offset are those of the last batch of the current epoch, -1 before there is one; `offset_delta` is
    its last offset minus its first. `timestamp_ms` is also a marker's."""

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
    """In the order of the file. Raises `CorruptSegmentError`, also for a producer that appears twice."""
    view = memoryview(data)
    if len(view) < _ENTRIES_FROM:
        raise CorruptSegmentError(f"producer snapshot of {len(view)} bytes")
    version, crc = _HEADER.unpack_from(view)
    if version != _VERSION:
        raise CorruptSegmentError(f"producer snapshot of version {version}")
    if crc32c(view, _HEADER.size, len(view)) != crc:
        raise CorruptSegmentError("producer snapshot: CRC mismatch")
    count = _COUNT.unpack_from(view, _HEADER.size)[0]
    if count < 0 or len(view) != _ENTRIES_FROM + count * _ENTRY.size:
        raise CorruptSegmentError(f"producer snapshot: {count} entries in {len(view)} bytes")
    entries = tuple(ProducerStateEntry(*fields) for fields in _ENTRY.iter_unpack(view[_ENTRIES_FROM:]))
    if len({entry.producer_id for entry in entries}) != count:
        raise CorruptSegmentError("producer snapshot: a producer appears twice")
    return entries
