"""`RebuiltIndexes`: what a segment's indexes must be, made anew of its log while that is read back, chunk by chunk.

* Offset index, time index and remote log index are equal to the byte, or stale. Where chunks begin and end is the
  stored index's to say; all that it says of them is made anew.
* Leader epochs are those of the batches. One that the log does not name, before its first v2 batch, is believed.
* Of aborted transactions the log tells the end, and the begin if that is in the segment. One that began earlier and
  wrote nothing here, or ends later, only its neighbours know: it is neither missed nor doubted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from protocol.records.record_batch import RecordBatch
from tiers.model.segment_metadata import LeaderEpochEntry, RemoteLogSegmentMetadata
from tiers.segment.control_record import end_transaction_marker
from tiers.segment.indexes_object import IndexesObject
from tiers.segment.kafka_index_builder import KafkaIndexBuilder
from tiers.segment.remote_log_index import encode_remote_log_index
from tiers.segment.segment_builder import first_offset_of
from tiers.segment.segment_index import Chunk
from tiers.segment.transaction_index import MARKER_NOT_COPIED

_TRANSACTIONAL_OR_CONTROL = 0x30
_CONTROL = 0x20


class RebuiltIndexes:
    """`missing_offsets`: how many the log does not have, which is no fault. `records`: what headers tell, of legacy
    compressed sets nothing."""

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
        """Every chunk in its order; `batches` are all of its bytes. What is wrong with where it begins, if anything.

        Raises `CorruptBatchError` for a control batch that cannot be read."""
        first = batches[0]
        first_offset = first_offset_of(first, self._next_offset)
        # Only the first batch of a segment may begin below it, as in the builder.
        lowest = first.last_offset if not self._chunks else first_offset
        trouble = None
        if lowest < self._next_offset:
            trouble = f"offset {lowest} after {self._next_offset - 1}, which the chunk before ends with"
        max_timestamp_ms = -1
        epoch = self._epochs[-1].epoch if self._epochs else -1
        next_offset = self._next_offset
        for batch in batches:
            begin = batch.base_offset if batch.magic == 2 else first_offset_of(batch, next_offset)
            if begin > next_offset:
                self.missing_offsets += begin - next_offset
            if batch.leader_epoch > epoch or not self._epochs:
                epoch = self._learn_epoch(batch.leader_epoch, begin)
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
        """One that cannot be read, or was added with trouble."""
        self._next_offset = max(self._next_offset, stored.last_offset + 1)

    def differences(self, stored: IndexesObject) -> Iterator[str]:
        """After the last chunk."""
        indexes = stored.indexes
        offset_index, time_index = self._builder.finish()
        if offset_index != indexes.offset_index:
            yield "the offset index is not what the log gives"
        if time_index != indexes.time_index:
            yield "the time index is not what the log gives"
        if encode_remote_log_index(self._chunks) != indexes.remote_log_index:
            yield "the remote log index is not what the log gives"
        if self._builder.max_timestamp_ms != self._segment.max_timestamp_ms:
            yield "the segment's latest timestamp is not the log's"
        epochs = tuple(self._epochs)
        if epochs != self._segment.segment_leader_epochs or epochs != self._clipped(indexes.leader_epochs):
            yield "the leader epochs are not those of the log"
        known = {(one.producer_id, one.last_offset) for one in indexes.aborted_transactions}
        known = {one for one in known if one[1] != MARKER_NOT_COPIED}
        if not self._ended <= known <= self._markers:
            yield "the aborted transactions are not those of the log"

    def _learn_epoch(self, epoch: int, first_offset: int) -> int:
        if not self._epochs:
            if epoch < 0:
                epoch = self._segment.segment_leader_epochs[0].epoch
            first_offset = self._segment.start_offset
        self._epochs.append(LeaderEpochEntry(epoch, first_offset))
        return epoch

    def _clipped(self, epochs: Sequence[LeaderEpochEntry]) -> tuple[LeaderEpochEntry, ...]:
        start = self._segment.start_offset
        before = [LeaderEpochEntry(one.epoch, start) for one in epochs if one.start_offset <= start]
        return (*before[-1:], *(one for one in epochs if one.start_offset > start))

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
