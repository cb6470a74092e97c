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
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from protocol.records.record_batch import NO_PRODUCER_ID, RecordBatch
from tiers.segment.control_record import EndTransactionMarker
from tiers.segment.indexes.producer_snapshot import NO_OFFSET, NO_SEQUENCE, ProducerStateEntry

PRODUCER_ID_EXPIRATION_MS = 86_400_000

_MAX_SEQUENCE = 2**31 - 1
_NO_COORDINATOR_EPOCH = -1


@dataclass(slots=True)
class _Producer:
    epoch: int
    last_sequence: int = NO_SEQUENCE
    last_offset: int = NO_OFFSET
    offset_delta: int = 0
    timestamp_ms: int = -1
    coordinator_epoch: int = _NO_COORDINATOR_EPOCH
    current_txn_first_offset: int = NO_OFFSET

    def enter(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch = epoch
            self.last_sequence, self.last_offset, self.offset_delta = NO_SEQUENCE, NO_OFFSET, 0


class ProducerState:
    def __init__(self, carried: Iterable[ProducerStateEntry] = ()) -> None:
        self._producers = {entry.producer_id: _Producer(*entry[1:]) for entry in carried}

    def on_data_batch(self, batch: RecordBatch) -> None:
        """Processes a batch. The caller must pass every batch that is not a control batch, in the log's order."""
        if batch.producer_id == NO_PRODUCER_ID:
            return
        producer = self._entered(batch)
        producer.last_sequence = _last_sequence(batch)
        producer.last_offset = batch.last_offset
        producer.offset_delta = batch.last_offset - batch.base_offset
        producer.timestamp_ms = batch.max_timestamp
        if batch.is_transactional and producer.current_txn_first_offset == NO_OFFSET:
            producer.current_txn_first_offset = batch.base_offset

    def on_marker(self, batch: RecordBatch, marker: EndTransactionMarker) -> None:
        producer = self._entered(batch)
        producer.coordinator_epoch = marker.coordinator_epoch
        producer.current_txn_first_offset = NO_OFFSET
        producer.timestamp_ms = batch.max_timestamp

    def _entered(self, batch: RecordBatch) -> _Producer:
        producer = self._producers.get(batch.producer_id)
        if producer is None:
            producer = self._producers[batch.producer_id] = _Producer(batch.producer_epoch)
        producer.enter(batch.producer_epoch)
        return producer

    def entries(self, log_time_ms: int) -> tuple[ProducerStateEntry, ...]:
        """Returns the producers that are not idle at `log_time_ms`, in the order of Kafka's file."""
        idle_before_ms = log_time_ms - PRODUCER_ID_EXPIRATION_MS
        kept = [
            ProducerStateEntry(
                producer_id,
                one.epoch,
                one.last_sequence,
                one.last_offset,
                one.offset_delta,
                one.timestamp_ms,
                one.coordinator_epoch,
                one.current_txn_first_offset,
            )
            for producer_id, one in self._producers.items()
            if one.timestamp_ms > idle_before_ms or one.current_txn_first_offset != NO_OFFSET
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
