"""`RebuiltIndexes` rebuilds a segment's indexes from its log, chunk by chunk, and compares the stored ones with them.

* The stored offset index, time index and remote log index must equal the rebuilt ones byte for byte. The rebuild takes
  the borders of the chunks from the stored index, and makes everything else about the chunks from the log.
* The leader epochs come from the batches. Before its first batch of magic 2 and in a hole, a log names no epoch; there
  the rebuild trusts the epochs in the metadata.
* The log shows where an aborted transaction ends, and where it begins if that is in the segment. Only the neighbouring
  segments know of a transaction that began earlier and wrote nothing here, or that ends later. The comparison therefore
  neither requires nor rejects such a transaction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from protocol.records.record_batch import RecordBatch
from tiers.model.segment_metadata import LeaderEpochEntry, RemoteLogSegmentMetadata
from tiers.segment.control_record import end_transaction_marker
from tiers.segment.indexes.indexes_object import IndexesObject
from tiers.segment.indexes.kafka_indexes import KafkaIndexBuilder
from tiers.segment.indexes.remote_log_index import encode_remote_log_index
from tiers.segment.indexes.segment_index import Chunk
from tiers.segment.leader_epochs import EpochHole, clipped, epochs_begun
from tiers.segment.segment_builder import first_offset_of
from tiers.segment.transactions import MARKER_NOT_COPIED

_TRANSACTIONAL_OR_CONTROL = 0x30
_CONTROL = 0x20


class RebuiltIndexes:
    """The rebuilt indexes of one segment.

    `missing_offsets` counts the offsets that the log lacks, which is no error. `records` is the number of records by
    the batch headers; a compressed wrapper of magic 0 or 1 counts as one record."""

    def __init__(self, segment: RemoteLogSegmentMetadata) -> None:
        self.batches = 0
        self.records = 0
        self.missing_offsets = 0
        self._segment = segment
        self._next_offset = segment.start_offset
        self._builder = KafkaIndexBuilder(segment.start_offset)
        self._chunks: list[Chunk] = []
        self._epochs: list[LeaderEpochEntry] = []
        self._begun: set[int] = set()
        self._ended: set[tuple[int, int]] = set()
        self._markers: set[tuple[int, int]] = set()

    def add_chunk(
        self, stored: Chunk, crc32c: int, log_bytes: memoryview, batches: Sequence[RecordBatch]
    ) -> str | None:
        """Adds a chunk. The caller must add the chunks in their order; `batches` must cover all of `log_bytes`.

        Returns an error message when the chunk overlaps the chunk before it, else None. Raises `CorruptBatchError` for
        a malformed control batch."""
        first = batches[0]
        first_offset = first_offset_of(first, self._next_offset)
        # As in the builder, only the first batch of a segment may begin below the segment's start offset.
        lowest = first.last_offset if not self._chunks else first_offset
        trouble = None
        if lowest < self._next_offset:
            trouble = f"offset {lowest} after {self._next_offset - 1}, the end of the chunk before"
        max_timestamp_ms = -1
        epoch = self._epochs[-1].epoch if self._epochs else -1
        next_offset = self._next_offset
        for batch in batches:
            begin = batch.base_offset if batch.magic == 2 else first_offset_of(batch, next_offset)
            if begin > next_offset:
                self.missing_offsets += begin - next_offset
            if batch.leader_epoch > epoch or not self._epochs:
                epoch = self._learn_epoch(EpochHole(epoch, next_offset, batch.leader_epoch, begin))
            attributes = batch.attributes
            if attributes & _TRANSACTIONAL_OR_CONTROL:
                self._track(log_bytes, batch)
            if batch.magic < 2:
                self.records += 1
            elif not attributes & _CONTROL:
                self.records += batch.records_count
            if batch.max_timestamp > max_timestamp_ms:
                max_timestamp_ms = batch.max_timestamp
            next_offset = batch.last_offset + 1
        self._builder.extend(batches)
        self._next_offset = next_offset
        self.batches += len(batches)
        self._chunks.append(
            Chunk(
                first_offset,
                batches[-1].last_offset,
                first.max_timestamp if first.is_log_append_time else first.base_timestamp,
                max_timestamp_ms,
                stored.stored_position,
                stored.stored_bytes,
                len(log_bytes),
                crc32c,
            )
        )
        return trouble

    def skip_chunk(self, stored: Chunk) -> None:
        """Skips a chunk that cannot be read, or for which `add_chunk` returned an error or raised."""
        self._next_offset = max(self._next_offset, stored.last_offset + 1)

    def differences(self, stored: IndexesObject) -> Iterator[str]:
        """Yields a message per difference between the stored and the rebuilt indexes. Call it after the last chunk."""
        indexes = stored.indexes
        offset_index, time_index = self._builder.finish()
        if offset_index != indexes.offset_index:
            yield "the offset index does not match the log"
        if time_index != indexes.time_index:
            yield "the time index does not match the log"
        if encode_remote_log_index(self._chunks) != indexes.remote_log_index:
            yield "the remote log index does not match the log"
        if self._builder.max_timestamp_ms != self._segment.max_timestamp_ms:
            yield "the segment's latest timestamp does not match the log"
        start = self._segment.start_offset
        epochs = clipped(self._epochs, start)
        if epochs != self._segment.segment_leader_epochs or epochs != clipped(indexes.leader_epochs, start):
            yield "the leader epochs do not match the log"
        known = {(one.producer_id, one.last_offset) for one in indexes.aborted_transactions}
        known = {one for one in known if one[1] != MARKER_NOT_COPIED}
        if not self._ended <= known <= self._markers:
            yield "the aborted transactions do not match the log"

    def _learn_epoch(self, hole: EpochHole) -> int:
        named = self._segment.segment_leader_epochs
        if hole.leader_epoch < 0:  # the segment begins with a batch of magic 0 or 1
            hole = replace(hole, leader_epoch=named[0].epoch)
        self._epochs += epochs_begun(hole, named)
        return hole.leader_epoch

    def _track(self, log_bytes: memoryview, batch: RecordBatch) -> None:
        if not batch.is_control:
            if batch.is_transactional:
                self._begun.add(batch.producer_id)
            return
        marker = end_transaction_marker(log_bytes, batch)
        if marker is None:
            return
        if marker.aborts:
            self._markers.add((marker.producer_id, marker.offset))
            if marker.producer_id in self._begun:
                self._ended.add((marker.producer_id, marker.offset))
        self._begun.discard(marker.producer_id)
