"""`ProducerState` makes the producer snapshot at a segment's end by the rules of Kafka's ProducerStateManager.

* A batch or a marker of another epoch resets the producer's sequences. Under KIP-890 a marker already has the next
  epoch.
* The entries are in the iteration order of Java's HashMap, so the file equals the broker's byte for byte. A broker that
  has expired many producers iterates a larger table in another order, but has the same entries.
* A broker expires a producer that is idle for `producer.id.expiration.ms` (one day) by its own clock, with a delay of
  up to ten minutes. `ProducerState` uses the log as its clock, so that equal logs give equal snapshots: the snapshot
  omits a producer whose last timestamp lies a day or more below the highest timestamp of the segment. Neither the
  broker nor `ProducerState` expires a producer with an open transaction.
* The snapshot is complete only if the copier read the log from its start, or took over the snapshot of the segment
  before this one.

`.snapshot` is Kafka's file of it, the state of every producer at an offset (docs/semantics.md 7):

    version int16 = 1 | CRC-32C uint32 of all following bytes | number of entries int32 | entries of 46 bytes

An entry is (producer id int64, epoch int16, last sequence int32, last offset int64, offset delta int32,
timestamp int64, coordinator epoch int32, first offset of the open transaction int64 or -1).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from struct import Struct
from typing import NamedTuple

from protocol.records.record_batch import NO_PRODUCER_ID, RecordBatch, crc32c
from tiers.errors import CorruptSegmentError
from tiers.segment.transactions import EndTransactionMarker

NO_SEQUENCE = -1
NO_OFFSET = -1

_VERSION = 1
_HEADER = Struct(">hI")
_COUNT = Struct(">i")
_ENTRY = Struct(">qhiqiqiq")
_ENTRIES_FROM = _HEADER.size + _COUNT.size
PRODUCER_ID_EXPIRATION_MS = 86_400_000

_MAX_SEQUENCE = 2**31 - 1
_NO_COORDINATOR_EPOCH = -1


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


class ProducerState:
    """The producers of a log. `TransactionTracker` knows their open transactions."""

    def __init__(self, carried: Iterable[ProducerStateEntry] = ()) -> None:
        self._producers = {entry.producer_id: entry for entry in carried}

    def on_data_batch(self, batch: RecordBatch) -> None:
        """Processes a batch. The caller must pass every batch that is not a control batch, in the log's order."""
        if batch.producer_id == NO_PRODUCER_ID:
            return
        self._producers[batch.producer_id] = self._known(batch)._replace(
            last_sequence=_last_sequence(batch),
            last_offset=batch.last_offset,
            offset_delta=batch.last_offset - batch.base_offset,
            timestamp_ms=batch.max_timestamp,
        )

    def on_marker(self, batch: RecordBatch, marker: EndTransactionMarker) -> None:
        self._producers[batch.producer_id] = self._known(batch)._replace(
            timestamp_ms=batch.max_timestamp, coordinator_epoch=marker.coordinator_epoch
        )

    def _known(self, batch: RecordBatch) -> ProducerStateEntry:
        """Returns the producer's entry in the epoch of the batch."""
        new = ProducerStateEntry(
            batch.producer_id, batch.producer_epoch, NO_SEQUENCE, NO_OFFSET, 0, -1, _NO_COORDINATOR_EPOCH, NO_OFFSET
        )
        known = self._producers.get(batch.producer_id, new)
        return known if known.epoch == batch.producer_epoch else ProducerStateEntry(*new[:5], *known[5:])

    def entries(self, log_time_ms: int, ongoing: Mapping[int, int]) -> tuple[ProducerStateEntry, ...]:
        """Returns the producers that are not idle at `log_time_ms`, in the order of Kafka's file.

        `ongoing` are the first offsets of the open transactions, by producer."""
        idle_before_ms = log_time_ms - PRODUCER_ID_EXPIRATION_MS
        kept = [
            one._replace(current_txn_first_offset=ongoing.get(one.producer_id, NO_OFFSET))
            for one in self._producers.values()
            if one.timestamp_ms > idle_before_ms or one.producer_id in ongoing
        ]
        capacity = 16
        while len(kept) * 4 > capacity * 3:
            capacity *= 2
        return tuple(sorted(kept, key=lambda entry: _java_hash(entry.producer_id) & capacity - 1))


def _java_hash(producer_id: int) -> int:
    """Returns `Long.hashCode` after the bit spreading of Java's HashMap."""
    code = (producer_id ^ producer_id >> 32) & 0xFFFFFFFF
    return code ^ code >> 16


def _last_sequence(batch: RecordBatch) -> int:
    """Returns the sequence of the batch's last record. Sequences wrap around to 0 after the largest int32."""
    if batch.base_sequence == NO_SEQUENCE:
        return NO_SEQUENCE
    last = batch.base_sequence + batch.last_offset - batch.base_offset
    return last if last <= _MAX_SEQUENCE else last - _MAX_SEQUENCE - 1


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
