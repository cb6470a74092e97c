"""`SegmentBuilder` makes a log segment and all its indexes from batches (docs/semantics.md 6.5, 7, 10, 13).

* It writes the batches to the spool file byte for byte. Positions count from the start of that file. The indexes come
  from an `IndexBuilder`, which a check of a stored log uses without a file.
* If `append` or `finish` raises an error, it has changed nothing, and may be called again.
* Offsets ascend without overlap. The log may lack offsets, for example if its topic was compacted once. The segment
  covers them, and the builder counts them so that the copier can raise an alarm.
* The caller decides when a segment is full. It reads `size_bytes` between appends.
* The methods of a `SegmentBuilder` block on the disk, so they must not run on an event loop.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

from protocol.errors import CorruptBatchError
from protocol.primitives import Buffer
from protocol.records.record_batch import CODEC_NONE, NO_LEADER_EPOCH, RecordBatch, crc32c, iterate_batches
from tiers.errors import LogDivergedError, RemoteLogError
from tiers.model.log_source import AbortedTransaction
from tiers.model.segment_metadata import LeaderEpochEntry, RemoteLogSegmentMetadata
from tiers.segment.indexes.indexes_object import SegmentIndexes, encode_indexes_object
from tiers.segment.indexes.segment_index import (
    INDEX_INTERVAL_BYTES,
    MAX_RELATIVE,
    Chunk,
    decode_remote_log_index,
    encode_offset_index,
    encode_remote_log_index,
    encode_time_index,
)
from tiers.segment.leader_epochs import EpochHole, UnknownEpochStartError, clipped, epochs_begun
from tiers.segment.producer_state import (
    NO_OFFSET,
    ProducerState,
    ProducerStateEntry,
    decode_producer_snapshot,
    encode_producer_snapshot,
)
from tiers.segment.transactions import (
    MARKER_NOT_COPIED,
    EndTransactionMarker,
    TransactionTracker,
    encode_transaction_index,
    end_transaction_marker,
)
from tiers.storage.remote_storage_manager import LogSegmentData

CHUNK_BYTES = 1 << 20


class SegmentOverflowError(RemoteLogError):
    """The batches exceed the int32 positions or relative offsets of this segment.

    The first `fits_bytes` of the records, whole batches below `next_offset`, fit. Then finish the segment, and start
    another one."""

    def __init__(self, message: str, fits_bytes: int, next_offset: int) -> None:
        super().__init__(message)
        self.fits_bytes = fits_bytes
        self.next_offset = next_offset


@dataclass(frozen=True, slots=True)
class Carried:
    """What a segment takes over from the one directly before it, whose indexes list the aborted transactions `listed`.

    The copier has seen every batch from `history_from` on; None stands for the start of the segment."""

    leader_epochs: tuple[LeaderEpochEntry, ...] = ()
    producers: tuple[ProducerStateEntry, ...] = ()
    listed: tuple[AbortedTransaction, ...] = ()
    """Those whose markers lie beyond that segment."""
    history_from: int | None = None

    @staticmethod
    def behind(indexes: SegmentIndexes) -> Carried:
        """Returns what the segment with these indexes leaves to the next one. Raises `CorruptSegmentError`."""
        listed = (
            AbortedTransaction(one.producer_id, one.first_offset)
            for one in indexes.aborted_transactions
            if one.last_offset == MARKER_NOT_COPIED
        )
        producers = decode_producer_snapshot(indexes.producer_snapshot)
        return Carried(indexes.leader_epochs, producers, tuple(listed), indexes.history_from)


@dataclass(frozen=True, slots=True)
class BuiltSegment:
    """A finished segment. `end_offset` is inclusive.

    `missing_offsets` counts the offsets in the segment's range that the log did not hold.
    """

    log_segment: Path
    start_offset: int
    end_offset: int
    size_bytes: int
    max_timestamp_ms: int
    missing_offsets: int
    indexes: SegmentIndexes

    @property
    def leader_epochs(self) -> tuple[LeaderEpochEntry, ...]:
        """The leader epochs since the log began."""
        return self.indexes.leader_epochs

    @property
    def segment_leader_epochs(self) -> tuple[LeaderEpochEntry, ...]:
        return clipped(self.indexes.leader_epochs, self.start_offset)

    @property
    def txn_index_empty(self) -> bool:
        return not self.indexes.aborted_transactions

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        return decode_remote_log_index(self.indexes.remote_log_index)

    def with_facts(self, facts: bytes) -> BuiltSegment:
        """Returns the segment with the facts of its partition, as of the announcement of its copy."""
        return replace(self, indexes=replace(self.indexes, facts=facts))

    def log_segment_data(self, metadata: RemoteLogSegmentMetadata) -> LogSegmentData:
        """Returns the data that a storage manager copies. The `.indexes` object includes `metadata`."""
        return LogSegmentData(self.log_segment, encode_indexes_object(metadata, self.indexes))


NOTHING_CARRIED: Final = Carried()


class CheckedBatch(NamedTuple):
    """A batch that fits behind those before it. `begun` are the leader epochs that begin in the hole before it."""

    batch: RecordBatch
    first_offset: int
    marker: EndTransactionMarker | None
    begun: Sequence[LeaderEpochEntry]


class IndexBuilder:
    """Makes the indexes of a segment from its batches, chunk by chunk."""

    def __init__(
        self,
        base_offset: int,
        carried: Carried = NOTHING_CARRIED,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """`base_offset` is the end offset of the previous segment plus one. Only the segment's first batch may begin
        below it."""
        self.base_offset = base_offset
        self.next_offset = base_offset
        self.missing_offsets = 0
        self._leader_epochs = list(carried.leader_epochs)
        ongoing = {
            one.producer_id: one.current_txn_first_offset
            for one in carried.producers
            if one.current_txn_first_offset != NO_OFFSET
        }
        history_from = base_offset if carried.history_from is None else carried.history_from
        self._transactions = TransactionTracker(base_offset, ongoing, carried.listed, history_from)
        self._producers = ProducerState(carried.producers)
        self.size_bytes = 0
        self.max_timestamp_ms = -1
        self._first_end_offset: int | None = None
        """The last offset of the first batch; None before the first batch."""
        self._offset_index: list[tuple[int, int]] = []
        self._bytes_since_last_entry = 0
        self._time_index: list[tuple[int, int]] = []
        self._max_timestamp_offset = base_offset
        self._chunk_bytes = chunk_bytes
        self._chunks: list[Chunk] = []
        self._chunk: _OpenChunk | None = None

    @property
    def end_offset(self) -> int:
        """The inclusive end offset; `base_offset - 1` before the first batch."""
        return self.next_offset - 1

    @property
    def leader_epoch(self) -> int | None:
        """The leader epoch of the last batch, also if an earlier segment holds it; None before the first batch ever."""
        return self._leader_epochs[-1].epoch if self._leader_epochs else None

    def checked(
        self, records: Buffer, batches: Sequence[RecordBatch], named: Sequence[LeaderEpochEntry] | None
    ) -> list[CheckedBatch]:
        """Returns the `batches` of `records` for `take`. Changes nothing. `named` and the errors are as in `append`."""
        found: list[CheckedBatch] = []
        next_offset = self.next_offset
        known = NO_LEADER_EPOCH if self.leader_epoch is None else self.leader_epoch
        first_end_offset, size_bytes = self._first_end_offset, self.size_bytes
        for batch in batches:
            first_offset = batch.base_offset if batch.magic == 2 else first_offset_of(batch, next_offset)
            if (batch.last_offset if first_end_offset is None else first_offset) < next_offset:
                raise CorruptBatchError(
                    f"a batch of offsets {batch.base_offset} to {batch.last_offset} overlaps the log at {next_offset}"
                )
            if NO_LEADER_EPOCH < batch.leader_epoch < known:
                raise LogDivergedError(f"leader epoch {batch.leader_epoch} at offset {batch.base_offset} after {known}")
            if first_end_offset is None:
                first_end_offset = batch.last_offset
            end = size_bytes + batch.end
            if end > MAX_RELATIVE or batch.last_offset - first_end_offset > MAX_RELATIVE:
                raise SegmentOverflowError(
                    f"the segment cannot hold {end} bytes with offsets {self.base_offset} to {batch.last_offset}",
                    batch.start,
                    next_offset,
                )
            begun: Sequence[LeaderEpochEntry] = ()
            if batch.leader_epoch > known or known == NO_LEADER_EPOCH:
                # Batches of magic 0 and 1 have no epoch: they continue the last one, or 0.
                hole = EpochHole(known, next_offset, max(batch.leader_epoch, 0), first_offset)
                may_begin_in_hole = first_offset > next_offset and hole.leader_epoch > max(known, 0)
                if named is not None and may_begin_in_hole and hole.leader_epoch not in {one.epoch for one in named}:
                    raise UnknownEpochStartError(hole)
                begun, known = epochs_begun(hole, named or ()), hole.leader_epoch
            marker = end_transaction_marker(records, batch) if batch.is_control else None
            found.append(CheckedBatch(batch, first_offset, marker, begun))
            next_offset = batch.last_offset + 1
        return found

    def take(
        self, records: Buffer, batches: Sequence[CheckedBatch], aborted_transactions: Iterable[AbortedTransaction]
    ) -> None:
        """Adds the batches of `records`, in the log's order, and the leader's report about them."""
        self._transactions.on_report(aborted_transactions)
        run_start = 0
        if batches and self._first_end_offset is None:
            self._first_end_offset = batches[0].batch.last_offset
        for batch, first_offset, marker, begun in batches:
            if first_offset > self.next_offset:
                self.missing_offsets += first_offset - self.next_offset
            self._leader_epochs += begun
            if marker is not None:
                self._transactions.on_marker(marker)
                self._producers.on_marker(batch, marker)
            elif not batch.is_control:
                self._transactions.on_data_batch(batch)
                self._producers.on_data_batch(batch)
            if batch.max_timestamp > self.max_timestamp_ms:
                self.max_timestamp_ms, self._max_timestamp_offset = batch.max_timestamp, batch.last_offset
            if self._bytes_since_last_entry > INDEX_INTERVAL_BYTES:
                self._offset_index.append((batch.last_offset, self.size_bytes))
                self._offer_time_entry()
                self._bytes_since_last_entry = 0
            size_bytes = batch.end - batch.start
            self._bytes_since_last_entry += size_bytes
            chunk = self._chunk
            if chunk is not None and chunk.size_bytes + size_bytes > self._chunk_bytes:
                chunk.crc = crc32c(records, run_start, batch.start, chunk.crc)
                self.end_chunk()
                chunk = None
            if chunk is None:
                run_start = batch.start
                first_timestamp_ms = batch.max_timestamp if batch.is_log_append_time else batch.base_timestamp
                chunk = self._chunk = _OpenChunk(self.size_bytes, first_offset, first_timestamp_ms)
            chunk.size_bytes += size_bytes
            if batch.max_timestamp > chunk.max_timestamp_ms:
                chunk.max_timestamp_ms = batch.max_timestamp
            self.size_bytes += size_bytes
            self.next_offset = batch.last_offset + 1
        if self._chunk is not None:
            self._chunk.crc = crc32c(records, run_start, len(records), self._chunk.crc)

    def end_chunk(self, stored: Chunk | None = None) -> None:
        """Ends the chunk of the last batch. There must be one. `stored` is the chunk of a stored log."""
        one = self._chunk
        assert one is not None
        position, size_bytes = one.position, one.size_bytes
        if stored is not None:
            position, size_bytes = stored.stored_position, stored.stored_bytes
        bounds = one.first_offset, self.end_offset, one.first_timestamp_ms, one.max_timestamp_ms
        self._chunks.append(Chunk(*bounds, position, size_bytes, one.size_bytes, one.crc))
        self._chunk = None

    def _offer_time_entry(self) -> None:
        last = self._time_index[-1][0] if self._time_index else -1
        if self.max_timestamp_ms > last:
            self._time_index.append((self.max_timestamp_ms, self._max_timestamp_offset))

    def indexes(self) -> SegmentIndexes:
        """Returns the indexes of all chunks that have ended. The caller must add no batch afterwards."""
        self._offer_time_entry()
        producers = self._producers.entries(self.max_timestamp_ms, self._transactions.ongoing)
        base_offset = self.base_offset
        if self._first_end_offset is not None and self.end_offset - base_offset > MAX_RELATIVE:
            base_offset = self._first_end_offset
        return SegmentIndexes(
            offset_index=encode_offset_index(base_offset, self._offset_index),
            time_index=encode_time_index(base_offset, self._time_index),
            aborted_transactions=self._transactions.ranges(self.end_offset),
            transaction_index=encode_transaction_index(self._transactions.transaction_index()),
            leader_epochs=tuple(self._leader_epochs),
            remote_log_index=encode_remote_log_index(self._chunks),
            producer_snapshot=encode_producer_snapshot(producers),
            history_from=self._transactions.history_from,
        )


class SegmentBuilder(IndexBuilder):
    def __init__(
        self,
        path: Path,
        base_offset: int,
        carried: Carried = NOTHING_CARRIED,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Creates the file `path`, which must not exist."""
        super().__init__(base_offset, carried, chunk_bytes)
        self._path = path
        self._file = path.open("xb", buffering=0)

    def append(
        self,
        records: bytes,
        aborted_transactions: Sequence[AbortedTransaction],
        named: Sequence[LeaderEpochEntry] | None = None,
    ) -> None:
        """Appends the result of one `LogSource.read`: whole, CRC-checked batches and their aborted transactions.

        `named` has the starts of leader epochs that begin in holes, ascending. None: the caller cannot know them, and
        every epoch begins at its first record.

        Raises `CorruptBatchError` for a truncated or overlapping batch, `LogDivergedError` for a leader epoch that
        decreases, `SegmentOverflowError` when the segment cannot hold the batches, and `UnknownEpochStartError` when
        an epoch may begin in a hole and is not in `named`.
        """
        batches = list(iterate_batches(records))
        if (batches[-1].end if batches else 0) != len(records):
            raise CorruptBatchError(f"{len(records)} bytes of records end in a truncated batch")
        if not batches:
            return
        checked = self.checked(records, batches, named)
        self._write(records)
        self.take(records, checked, aborted_transactions)

    def _write(self, records: bytes) -> None:
        """Writes behind the records of the segment, over what an append that failed left there."""
        rest, position = memoryview(records), self.size_bytes
        while rest:
            written = os.pwrite(self._file.fileno(), rest, position)
            rest, position = rest[written:], position + written

    def finish(self) -> BuiltSegment:
        """Makes the log file durable, closes it and returns the segment. Raises `ValueError` when it is empty."""
        if self._chunk is None:
            raise ValueError("cannot finish an empty segment")
        os.ftruncate(self._file.fileno(), self.size_bytes)
        os.fsync(self._file.fileno())
        self._file.close()
        self.end_chunk()
        return BuiltSegment(
            log_segment=self._path,
            start_offset=self.base_offset,
            end_offset=self.end_offset,
            size_bytes=self.size_bytes,
            max_timestamp_ms=self.max_timestamp_ms,
            missing_offsets=self.missing_offsets,
            indexes=self.indexes(),
        )

    def discard(self) -> None:
        """Closes and removes the spool file. Safe to call twice, and after `finish`."""
        self._file.close()
        self._path.unlink(missing_ok=True)


def first_offset_of(batch: RecordBatch, next_offset: int) -> int:
    """Returns the batch's first offset.

    A compressed wrapper of magic 0 or 1 names only its last offset. It is assumed to begin at `next_offset`.
    """
    return batch.base_offset if batch.magic == 2 or batch.codec == CODEC_NONE else next_offset


@dataclass(slots=True)
class _OpenChunk:
    position: int
    first_offset: int
    first_timestamp_ms: int
    max_timestamp_ms: int = -1
    size_bytes: int = 0
    crc: int = 0
