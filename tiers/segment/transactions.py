"""The aborted transactions of a segment, and the two formats that keep them (docs/semantics.md 4.1, 7).

* Tidegate's own format has every aborted transaction that *overlaps* the segment, as `(producer id, first offset, last
  offset)`. So a read needs no later segment. `last_offset` is `MARKER_NOT_COPIED` if the ABORT marker lies beyond the
  segment.
* Kafka's `.txnindex` has the aborted transactions whose *marker* is in the segment. Kafka's own tools need it to read
  the segments; no reader of Tidegate depends on it.

The producer id and the first offset identify a transaction. The producer epoch does not, because it may change within
a transaction (KIP-890). A transaction ends with a marker, the one record of a control batch. Its key is version int16,
type int16, and its value is version int16, coordinator epoch int32.

`TransactionTracker` finds the transactions by the batches and the leader's reports:

* With the data, the leader reports the `(producer id, first offset)` of aborted transactions. The ABORT marker in the
  data shows where a transaction ends.
* A producer has one transaction at a time, so a marker at M ends exactly one: the newest that began before M. Older
  transactions of that producer ended before this segment. If they stayed open, they would hide committed records.
* Reports may include later transactions: one whose first offset is above M stays open.
* An aborted transaction that is open at the segment's end overlaps the segment without a known end. The leader reports
  it again with the data of the next segment.
* If a marker contradicts the reports, the tracker trusts the marker, because it is part of the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from struct import Struct
from struct import error as StructError
from typing import NamedTuple

from protocol.errors import CorruptBatchError
from protocol.primitives import INT16, INT32, Buffer
from protocol.records.record_batch import CODEC_NONE, RecordBatch
from protocol.records.record_reader import read_records
from tiers.errors import CorruptSegmentError
from tiers.model.log_source import AbortedTransaction
from tiers.segment.indexes.segment_index import AbortedTransactionRange

MARKER_NOT_COPIED = 2**63 - 1

_ABORT, _COMMIT = 0, 1
_KAFKA_ENTRY = Struct(">hqqqq")
_KAFKA_VERSION = 0


class EndTransactionMarker(NamedTuple):
    producer_id: int
    offset: int
    aborts: bool
    coordinator_epoch: int


def end_transaction_marker(buf: Buffer, batch: RecordBatch) -> EndTransactionMarker | None:
    """Returns the marker in a control batch; None when compaction emptied the batch or the record is no such marker.

    Raises `CorruptBatchError` for a malformed record and for a compressed batch: control batches are never compressed.
    """
    if batch.records_count <= 0:
        return None
    if batch.codec != CODEC_NONE:
        raise CorruptBatchError(f"the control batch at offset {batch.base_offset} is compressed")
    record = next(read_records(buf, batch))
    try:
        kind = INT16.unpack_from(record.key or b"", 2)[0]
        if kind not in (_ABORT, _COMMIT):
            return None
        coordinator_epoch: int = INT32.unpack_from(record.value or b"", 2)[0]
    except StructError as error:
        raise CorruptBatchError(f"the control batch at offset {batch.base_offset} has a truncated record") from error
    return EndTransactionMarker(batch.producer_id, batch.base_offset, kind == _ABORT, coordinator_epoch)


class AbortedTxn(NamedTuple):
    """A `.txnindex` entry. `last_stable_offset` is the LSO right after the append of the marker at `last_offset`."""

    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int


def encode_transaction_index(entries: Iterable[AbortedTxn]) -> bytes:
    return b"".join([_KAFKA_ENTRY.pack(_KAFKA_VERSION, *entry) for entry in entries])


def decode_transaction_index(data: bytes | memoryview) -> list[AbortedTxn]:
    """Decodes `.txnindex`.

    Raises `CorruptSegmentError` for a partial entry, another version, and markers that do not ascend.
    """
    if len(data) % _KAFKA_ENTRY.size:
        raise CorruptSegmentError(f"transaction index: {len(data)} bytes are not a multiple of {_KAFKA_ENTRY.size}")
    entries: list[AbortedTxn] = []
    for version, *fields in _KAFKA_ENTRY.iter_unpack(data):
        if version != _KAFKA_VERSION:
            raise CorruptSegmentError(f"transaction index: version {version} of an entry is not supported")
        entry = AbortedTxn(*fields)
        if entries and entry.last_offset <= entries[-1].last_offset:
            raise CorruptSegmentError(f"transaction index: {entry} follows {entries[-1]}")
        entries.append(entry)
    return entries


class TransactionTracker:
    """Finds the aborted transactions of a segment that begins at `base_offset`.

    `ongoing` are the first offsets of the transactions that are open at its start, by producer. `listed` are those of
    them that the segment before lists as aborted: the leader reports them again. The copier has seen every batch from
    `history_from` on. If that is above 0, unknown older transactions may be open. Kafka's transaction index then claims
    no last stable offset above the segment's start."""

    def __init__(
        self,
        base_offset: int,
        ongoing: Mapping[int, int],
        listed: Iterable[AbortedTransaction],
        history_from: int,
    ) -> None:
        self._base_offset = base_offset
        self.history_from = history_from
        self._aborted: dict[int, set[int]] = {}
        self.ongoing = dict(ongoing)
        self._listed = frozenset(listed)
        self._last_marker: dict[int, int] = {}
        self._index: list[AbortedTxn] = []

    def on_report(self, aborted: Iterable[AbortedTransaction]) -> None:
        """Processes a report. Call it before the methods for the batches of the same answer. Reports may repeat."""
        for one in aborted:
            if one.first_offset > self._last_marker.get(one.producer_id, -1) and not self._ended_before(one):
                self._aborted.setdefault(one.producer_id, set()).add(one.first_offset)

    def _ended_before(self, one: AbortedTransaction) -> bool:
        """Returns whether a reported transaction is known to have ended before this segment.

        If one answer's batches go into two segments, both get the same report, which may name transactions that ended
        in the earlier one. Of the transactions whose begin the copier has seen, only the ongoing ones are open, and
        those that the earlier segment lists: compaction may have removed their first records."""
        seen = self.history_from <= one.first_offset < self._base_offset
        return seen and self.ongoing.get(one.producer_id) != one.first_offset and one not in self._listed

    def on_data_batch(self, batch: RecordBatch) -> None:
        """Processes a batch. The caller must pass every batch that is not a control batch, in the log's order."""
        if batch.is_transactional:
            self.ongoing.setdefault(batch.producer_id, batch.base_offset)

    def on_marker(self, marker: EndTransactionMarker) -> None:
        producer_id, offset = marker.producer_id, marker.offset
        reported = self._aborted.pop(producer_id, set())
        begun = {first for first in reported if first < offset}
        if later := reported - begun:
            self._aborted[producer_id] = later
        seen = self.ongoing.pop(producer_id, None)
        self._last_marker[producer_id] = offset
        if not marker.aborts:
            return
        first_offset = max(begun, default=seen)
        if first_offset is not None:  # None means a transaction without data, so readers have nothing to filter
            self._index.append(AbortedTxn(producer_id, first_offset, offset, self._last_stable_offset(offset)))

    def _last_stable_offset(self, marker_offset: int) -> int:
        reported = (first for firsts in self._aborted.values() for first in firsts if first < marker_offset)
        oldest = min((*self.ongoing.values(), *reported), default=marker_offset + 1)
        return oldest if self.history_from == 0 else min(oldest, self._base_offset)

    def ranges(self, end_offset: int) -> tuple[AbortedTransactionRange, ...]:
        """Returns every aborted transaction that overlaps the segment up to `end_offset`, by ascending first offset."""
        ended = (AbortedTransactionRange(*entry[:3]) for entry in self._index)
        still_open = (
            AbortedTransactionRange(producer_id, first_offset, MARKER_NOT_COPIED)
            for producer_id, firsts in self._aborted.items()
            for first_offset in firsts
            if first_offset <= end_offset
        )
        return tuple(sorted((*ended, *still_open), key=lambda one: (one.first_offset, one.producer_id)))

    def transaction_index(self) -> list[AbortedTxn]:
        """Returns the entries of Kafka's `.txnindex`, by ascending offset of the marker."""
        return self._index
