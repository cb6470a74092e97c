"""`SegmentBuilder` makes a log segment and all its indexes from batches (docs/semantics.md 6.5, 7, 10, 13).

* It writes the batches to the spool file byte for byte. Positions count from the start of that file.
* If `append` or `finish` raises an error, it has changed nothing, and may be called again.
* Offsets ascend without overlap. The log may lack offsets, for example if its topic was compacted once. The segment
  covers them, and the builder counts them so that the copier can raise an alarm.
* The caller decides when a segment is full. It reads `size_bytes` between appends.
* The methods block on the disk, so they must not run on an event loop.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from protocol.errors import CorruptBatchError
from protocol.records.record_batch import CODEC_NONE, NO_LEADER_EPOCH, RecordBatch, crc32c, iterate_batches
from tiers.errors import LogDivergedError, RemoteLogError
from tiers.model.log_source import AbortedTransaction
from tiers.model.segment_metadata import LeaderEpochEntry, RemoteLogSegmentMetadata
from tiers.segment.control_record import EndTransactionMarker, end_transaction_marker
from tiers.segment.indexes.indexes_object import SegmentIndexes, encode_indexes_object
from tiers.segment.indexes.kafka_indexes import MAX_RELATIVE, KafkaIndexBuilder
from tiers.segment.indexes.remote_log_index import encode_remote_log_index
from tiers.segment.indexes.segment_index import Chunk
from tiers.segment.leader_epochs import EpochHole, check_named, clipped, epochs_begun
from tiers.segment.producer_state import ProducerState, ProducerStateEntry, encode_producer_snapshot
from tiers.segment.transactions import OpenTransactions, TransactionTracker, encode_transaction_index
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
class BuiltSegment:
    """A finished segment. `end_offset` is inclusive.

    `leader_epochs` is cumulative; `segment_leader_epochs` is clipped to the segment. The builder of the next segment
    takes over `leader_epochs`, `open_transactions` and `producers`. `missing_offsets` counts the offsets in the
    segment's range that the log did not hold.
    """

    log_segment: Path
    start_offset: int
    end_offset: int
    size_bytes: int
    max_timestamp_ms: int
    segment_leader_epochs: tuple[LeaderEpochEntry, ...]
    leader_epochs: tuple[LeaderEpochEntry, ...]
    txn_index_empty: bool
    open_transactions: OpenTransactions
    producers: tuple[ProducerStateEntry, ...]
    missing_offsets: int
    chunks: tuple[Chunk, ...]
    indexes: SegmentIndexes

    def with_facts(self, facts: bytes) -> BuiltSegment:
        """Returns the segment with the facts of its partition, as of the announcement of its copy."""
        return replace(self, indexes=replace(self.indexes, facts=facts))

    def log_segment_data(self, metadata: RemoteLogSegmentMetadata) -> LogSegmentData:
        """Returns the data that a storage manager copies. The `.indexes` object includes `metadata`."""
        return LogSegmentData(self.log_segment, encode_indexes_object(metadata, self.indexes))


class SegmentBuilder:
    def __init__(
        self,
        path: Path,
        base_offset: int,
        leader_epochs: tuple[LeaderEpochEntry, ...] = (),
        open_transactions: OpenTransactions | None = None,
        producers: tuple[ProducerStateEntry, ...] = (),
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Creates the file `path`, which must not exist.

        `leader_epochs`, `open_transactions` and `producers` come from the previous `BuiltSegment`. `base_offset` is the
        end offset of the previous segment plus one. Only the segment's first batch may begin below it.
        """
        self.base_offset = base_offset
        self.next_offset = base_offset
        self.missing_offsets = 0
        self._path = path
        self._file = path.open("xb", buffering=0)
        self._leader_epochs = list(leader_epochs)
        self._transactions = TransactionTracker(base_offset, open_transactions)
        self._producers = ProducerState(producers)
        self._indexes = KafkaIndexBuilder(base_offset)
        self._chunk_bytes = chunk_bytes
        self._chunks: list[Chunk] = []
        self._chunk: _OpenChunk | None = None

    @property
    def size_bytes(self) -> int:
        return self._indexes.size_bytes

    @property
    def max_timestamp_ms(self) -> int:
        return self._indexes.max_timestamp_ms

    @property
    def end_offset(self) -> int:
        """The inclusive end offset; `base_offset - 1` before the first `append`."""
        return self.next_offset - 1

    @property
    def leader_epoch(self) -> int | None:
        """The leader epoch of the last batch, also if an earlier segment holds it; None before the first batch ever."""
        return self._leader_epochs[-1].epoch if self._leader_epochs else None

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
        batches = self._checked(records, named)
        if not batches:
            return
        self._write(records)
        self._transactions.on_report(aborted_transactions)
        run_start = 0
        position = self.size_bytes
        for batch, marker in batches:
            first_offset = first_offset_of(batch, self.next_offset)
            if first_offset > self.next_offset:
                self.missing_offsets += first_offset - self.next_offset
            if not self._leader_epochs or batch.leader_epoch > self._leader_epochs[-1].epoch:
                self._learn_epoch(batch, first_offset, named or ())
            self._track(batch, marker)
            size_bytes = batch.end - batch.start
            chunk = self._chunk
            if chunk is not None and chunk.size_bytes + size_bytes > self._chunk_bytes:
                chunk.add_crc(records, run_start, batch.start)
                self._close_chunk(chunk)
                chunk = None
            if chunk is None:
                run_start = batch.start
                first_timestamp_ms = batch.max_timestamp if batch.is_log_append_time else batch.base_timestamp
                chunk = self._chunk = _OpenChunk(position, first_offset, first_timestamp_ms)
            chunk.size_bytes += size_bytes
            chunk.last_offset = batch.last_offset
            if batch.max_timestamp > chunk.max_timestamp_ms:
                chunk.max_timestamp_ms = batch.max_timestamp
            position += size_bytes
            self.next_offset = batch.last_offset + 1
        self._indexes.extend([batch for batch, _ in batches])
        if self._chunk is not None:
            self._chunk.add_crc(records, run_start, len(records))

    def finish(self) -> BuiltSegment:
        """Makes the log file durable, closes it and returns the segment. Raises `ValueError` when it is empty."""
        if self._chunk is None:
            raise ValueError("cannot finish an empty segment")
        os.ftruncate(self._file.fileno(), self.size_bytes)
        os.fsync(self._file.fileno())
        self._file.close()
        self._close_chunk(self._chunk)
        offset_index, time_index = self._indexes.finish()
        ranges = self._transactions.ranges(self.end_offset)
        producers = self._producers.entries(self.max_timestamp_ms)
        leader_epochs = tuple(self._leader_epochs)
        chunks = tuple(self._chunks)
        return BuiltSegment(
            log_segment=self._path,
            start_offset=self.base_offset,
            end_offset=self.end_offset,
            size_bytes=self.size_bytes,
            max_timestamp_ms=self.max_timestamp_ms,
            segment_leader_epochs=clipped(leader_epochs, self.base_offset),
            leader_epochs=leader_epochs,
            txn_index_empty=not ranges,
            open_transactions=self._transactions.open_transactions(),
            producers=producers,
            missing_offsets=self.missing_offsets,
            chunks=chunks,
            indexes=SegmentIndexes(
                offset_index=offset_index,
                time_index=time_index,
                aborted_transactions=ranges,
                transaction_index=encode_transaction_index(self._transactions.transaction_index()),
                leader_epochs=leader_epochs,
                remote_log_index=encode_remote_log_index(chunks),
                producer_snapshot=encode_producer_snapshot(producers),
                history_from=self._transactions.history_from,
            ),
        )

    def discard(self) -> None:
        """Closes and removes the spool file. Safe to call twice, and after `finish`."""
        self._file.close()
        self._path.unlink(missing_ok=True)

    def _write(self, records: bytes) -> None:
        """Writes behind the records of the segment, over what an append that failed left there."""
        rest, position = memoryview(records), self.size_bytes
        while rest:
            written = os.pwrite(self._file.fileno(), rest, position)
            rest, position = rest[written:], position + written

    def _checked(
        self, records: bytes, named: Sequence[LeaderEpochEntry] | None
    ) -> list[tuple[RecordBatch, EndTransactionMarker | None]]:
        batches = list(iterate_batches(records))
        if (batches[-1].end if batches else 0) != len(records):
            raise CorruptBatchError(f"{len(records)} bytes of records end in a truncated batch")
        next_offset = self.next_offset
        leader_epoch = NO_LEADER_EPOCH if self.leader_epoch is None else self.leader_epoch
        held_bytes = self.size_bytes
        at_start = held_bytes == 0
        first_end_offset = self._indexes.first_end_offset
        for batch in batches:
            first_offset = first_offset_of(batch, next_offset)
            lowest = batch.last_offset if at_start else first_offset
            if lowest < next_offset:
                raise CorruptBatchError(
                    f"a batch of offsets {batch.base_offset} to {batch.last_offset} overlaps the log at {next_offset}"
                )
            if NO_LEADER_EPOCH < batch.leader_epoch < leader_epoch:
                raise LogDivergedError(
                    f"leader epoch {batch.leader_epoch} at offset {batch.base_offset} after {leader_epoch}"
                )
            if first_end_offset is None:
                first_end_offset = batch.last_offset
            end = held_bytes + batch.end
            if end > MAX_RELATIVE or batch.last_offset - first_end_offset > MAX_RELATIVE:
                raise SegmentOverflowError(
                    f"the segment cannot hold {end} bytes with offsets {self.base_offset} to {batch.last_offset}",
                    batch.start,
                    next_offset,
                )
            if named is not None and first_offset > next_offset and batch.leader_epoch > max(leader_epoch, 0):
                check_named(EpochHole(leader_epoch, next_offset, batch.leader_epoch, first_offset), named)
            leader_epoch = max(leader_epoch, batch.leader_epoch)
            next_offset = batch.next_offset
            at_start = False
        return [(batch, end_transaction_marker(records, batch) if batch.is_control else None) for batch in batches]

    def _track(self, batch: RecordBatch, marker: EndTransactionMarker | None) -> None:
        if marker is not None:
            self._transactions.on_marker(marker)
            self._producers.on_marker(batch, marker)
        elif not batch.is_control:
            self._transactions.on_data_batch(batch)
            self._producers.on_data_batch(batch)

    def _learn_epoch(self, batch: RecordBatch, first_offset: int, named: Sequence[LeaderEpochEntry]) -> None:
        """Records an epoch that begins. Batches of magic 0 and 1 have none: they continue the last epoch, or 0."""
        known = NO_LEADER_EPOCH if self.leader_epoch is None else self.leader_epoch
        epoch = max(batch.leader_epoch, 0)
        self._leader_epochs += epochs_begun(EpochHole(known, self.next_offset, epoch, first_offset), named)

    def _close_chunk(self, chunk: _OpenChunk) -> None:
        self._chunks.append(chunk.closed())
        self._chunk = None


def first_offset_of(batch: RecordBatch, next_offset: int) -> int:
    """Returns the batch's first offset.

    A compressed wrapper of magic 0 or 1 names only its last offset. It is assumed to begin at `next_offset`.
    """
    return batch.base_offset if batch.magic == 2 or batch.codec == CODEC_NONE else next_offset


class _OpenChunk:
    __slots__ = (
        "crc",
        "first_offset",
        "first_timestamp_ms",
        "last_offset",
        "max_timestamp_ms",
        "position",
        "size_bytes",
    )

    def __init__(self, position: int, first_offset: int, first_timestamp_ms: int) -> None:
        self.position = position
        self.first_offset = first_offset
        self.first_timestamp_ms = first_timestamp_ms
        self.last_offset = first_offset
        self.max_timestamp_ms = -1
        self.size_bytes = 0
        self.crc = 0

    def add_crc(self, records: bytes, start: int, end: int) -> None:
        self.crc = crc32c(records, start, end, self.crc)

    def closed(self) -> Chunk:
        return Chunk(
            self.first_offset,
            self.last_offset,
            self.first_timestamp_ms,
            self.max_timestamp_ms,
            self.position,
            self.size_bytes,
            self.size_bytes,
            self.crc,
        )
