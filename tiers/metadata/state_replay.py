"""Replay of metadata records into the materialised state (semantics 11.2, DESIGN "RLMM").

It takes every forward jump, for compaction removes what lay between; it drops a move backward, an update of a segment
that was never added, and what it has seen already. What a record's time is, is decided by the topic: LogAppendTime.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import lmdb

from tiers.metadata.serde import (
    CLAMP_API_KEY,
    LOCAL_LOG_START_API_KEY,
    LOG_START_OFFSET_API_KEY,
    PARTITION_DELETE_API_KEY,
    QUARANTINE_DELETION_API_KEY,
    SEGMENT_METADATA_API_KEY,
    SEGMENT_METADATA_UPDATE_API_KEY,
    TOPIC_TIER_CONFIG_API_KEY,
    MetadataRecord,
    RecordKey,
    encode_value,
)
from tiers.metadata.state import RemoteLogMetadataState, leader_epoch_ends, valid_end_offset
from tiers.metadata.state_layout import (
    END_AND_ORDER,
    I32,
    I64,
    LOWEST_AND_HIGHEST,
    NOT_READABLE,
    PARTITION_KEY_BYTES,
    U64,
    Databases,
    decode_partition,
    encode_partition,
    partition_key,
    start_key,
)
from tiers.metadata.stored_segment import decode_stored_segment, encode_stored_segment
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.segment_metadata import (
    LocalLogStartUpdate,
    LogStartOffsetUpdate,
    QuarantineDeletionUpdate,
    RemoteLogClampUpdate,
    RemoteLogSegmentMetadata,
    RemoteLogSegmentMetadataUpdate,
    RemotePartitionDeleteMetadata,
    TopicTierConfigUpdate,
)
from tiers.model.segment_state import RemoteLogSegmentState, RemotePartitionDeleteState, is_forward

_LAST_OFFSET = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class MetadataEvent:
    """One record of a metadata partition. `record` None: what `key` names is gone."""

    offset: int
    timestamp_ms: int
    key: RecordKey
    record: MetadataRecord | None


@dataclass(frozen=True, slots=True)
class PartitionRead:
    """What one read of a metadata partition brought; the next one starts at `next_offset`."""

    metadata_partition: int
    events: Sequence[MetadataEvent]
    next_offset: int
    foreign_records: int = 0
    """Left out, for nobody here wrote them."""


class Replay:
    """One write transaction. What becomes readable is added to `finished`."""

    def __init__(
        self,
        state: RemoteLogMetadataState,
        databases: Databases,
        txn: lmdb.Transaction,
        finished: list[RemoteLogSegmentId],
    ) -> None:
        self._state = state
        self._db = databases
        self._txn = txn
        self._finished = finished

    def apply(self, event: MetadataEvent) -> None:
        match event.record:
            case RemoteLogSegmentMetadata() as metadata:
                self._add(replace(metadata, event_timestamp_ms=event.timestamp_ms))
            case RemoteLogSegmentMetadataUpdate() as update:
                self._update(replace(update, event_timestamp_ms=event.timestamp_ms), event.offset)
            case RemotePartitionDeleteMetadata() as deletion:
                self._delete_partition(deletion.topic_id_partition, deletion.state)
            case LogStartOffsetUpdate() as update:
                self._raise_log_start(update)
            case TopicTierConfigUpdate() as update:
                key = partition_key(update.topic_id_partition)
                self._txn.put(key, encode_value(update), db=self._db.tier_configs)
            case RemoteLogClampUpdate() as clamp:
                self._clamp(clamp, event.offset)
            case QuarantineDeletionUpdate() as deletion:
                self._ask_for_deletion(deletion.segment_id)
            case LocalLogStartUpdate() as update:
                self._raise_local_log_start(update)
            case None:
                self._bury(event.key)

    def _add(self, metadata: RemoteLogSegmentMetadata) -> None:
        if metadata.state is not RemoteLogSegmentState.COPY_SEGMENT_STARTED:
            return
        key = partition_key(metadata.topic_id_partition)
        uuid = metadata.segment_id.id.bytes
        if self._txn.get(key + uuid, db=self._db.segments) is not None:
            return
        span = metadata.end_offset - metadata.start_offset
        self._know(key, metadata.topic_id_partition.topic, span)
        self._put(key, metadata, NOT_READABLE)

    def _put(self, key: bytes, metadata: RemoteLogSegmentMetadata, order: int) -> None:
        uuid = metadata.segment_id.id.bytes
        self._txn.put(key + uuid, encode_stored_segment(metadata), db=self._db.segments)
        place = start_key(key, metadata.start_offset, uuid)
        self._txn.put(place, END_AND_ORDER.pack(metadata.end_offset, order), db=self._db.starts)

    def _know(self, key: bytes, topic: str, span: int = 0) -> None:
        raw = self._txn.get(key, db=self._db.partitions)
        known_span, known_topic = (-1, "") if raw is None else decode_partition(raw)
        if raw is None or span > known_span or (topic and topic != known_topic):
            self._txn.put(key, encode_partition(max(span, known_span), topic or known_topic), db=self._db.partitions)

    def _update(self, update: RemoteLogSegmentMetadataUpdate, offset: int) -> None:
        key = partition_key(update.segment_id.topic_id_partition)
        uuid = update.segment_id.id.bytes
        raw = self._txn.get(key + uuid, db=self._db.segments)
        if raw is None:
            return
        known = decode_stored_segment(key + uuid, raw)
        if not is_forward(known.state, update.state):
            return
        if update.state is RemoteLogSegmentState.DELETE_SEGMENT_FINISHED:
            self._remove(key, known)
            return
        moved = known.with_update(update)
        is_readable = moved.state is RemoteLogSegmentState.COPY_SEGMENT_FINISHED
        # A repeated record counts as the later one, which is the one that compaction keeps.
        self._put(key, moved, offset if is_readable else NOT_READABLE)
        if is_readable or known.state is RemoteLogSegmentState.COPY_SEGMENT_FINISHED:
            self._cover_again(key, known.start_offset, known.end_offset)
        if is_readable:
            self._raise_epochs(key, moved)
            self._finished.append(moved.segment_id)

    def _raise_epochs(self, key: bytes, metadata: RemoteLogSegmentMetadata) -> None:
        starts = (entry.start_offset for entry in metadata.segment_leader_epochs)
        for start_offset, (epoch, end_offset) in zip(starts, leader_epoch_ends(metadata), strict=True):
            epoch_key = key + I32.pack(epoch)
            raw = self._txn.get(epoch_key, db=self._db.epochs)
            lowest, highest = (start_offset, end_offset) if raw is None else LOWEST_AND_HIGHEST.unpack(raw)
            bounds = LOWEST_AND_HIGHEST.pack(min(lowest, start_offset), max(highest, end_offset))
            self._txn.put(epoch_key, bounds, db=self._db.epochs)

    def _clamp(self, clamp: RemoteLogClampUpdate, offset: int) -> None:
        key, valid_end = partition_key(clamp.topic_id_partition), clamp.valid_end_offset
        self._txn.put(key + U64.pack(valid_end), I64.pack(offset), db=self._db.clamps)
        self._cover_again(key, valid_end + 1, _LAST_OFFSET)
        cursor = self._txn.cursor(db=self._db.epochs)
        found = cursor.set_range(key)
        while found and cursor.key()[:PARTITION_KEY_BYTES] == key:
            lowest, highest = LOWEST_AND_HIGHEST.unpack(cursor.value())
            if lowest > valid_end:
                found = cursor.delete()
                continue
            if highest > valid_end:
                cursor.put(cursor.key(), LOWEST_AND_HIGHEST.pack(lowest, valid_end))
            found = cursor.next()

    def _ask_for_deletion(self, segment_id: RemoteLogSegmentId) -> None:
        key = partition_key(segment_id.topic_id_partition) + segment_id.id.bytes
        if self._txn.get(key, db=self._db.segments) is not None:
            self._txn.put(key, b"", db=self._db.quarantine_deletions)

    def _remove(self, key: bytes, metadata: RemoteLogSegmentMetadata) -> None:
        uuid = metadata.segment_id.id.bytes
        self._txn.delete(key + uuid, db=self._db.segments)
        self._txn.delete(key + uuid, db=self._db.quarantine_deletions)
        self._txn.delete(start_key(key, metadata.start_offset, uuid), db=self._db.starts)
        if metadata.state is RemoteLogSegmentState.COPY_SEGMENT_FINISHED:
            self._cover_again(key, metadata.start_offset, metadata.end_offset)
        self._forget_if_empty(key)

    def _forget_if_empty(self, key: bytes) -> None:
        for database in (self._db.starts, self._db.log_starts, self._db.local_log_starts):
            cursor = self._txn.cursor(db=database)
            if cursor.set_range(key) and cursor.key()[:PARTITION_KEY_BYTES] == key:
                return
        if self._deletion(key) in (None, RemotePartitionDeleteState.DELETE_PARTITION_FINISHED):
            self._txn.delete(key, db=self._db.partitions)

    def _deletion(self, key: bytes) -> RemotePartitionDeleteState | None:
        raw = self._txn.get(key, db=self._db.deletions)
        return None if raw is None else RemotePartitionDeleteState(raw[0])

    def _delete_partition(self, partition: TopicIdPartition, state: RemotePartitionDeleteState) -> None:
        key = partition_key(partition)
        known = self._deletion(key)
        if known is not None and state < known:
            return
        self._txn.put(key, bytes((state,)), db=self._db.deletions)
        if state is RemotePartitionDeleteState.DELETE_PARTITION_FINISHED:
            for database in (
                self._db.segments,
                self._db.starts,
                self._db.cover,
                self._db.epochs,
                self._db.log_starts,
                self._db.clamps,
                self._db.quarantine_deletions,
                self._db.local_log_starts,
                self._db.partitions,
            ):
                self._delete_prefix(database, key)
        else:
            self._know(key, partition.topic)

    def _delete_prefix(self, database: lmdb._Database, prefix: bytes) -> None:
        cursor = self._txn.cursor(db=database)
        found = cursor.set_range(prefix)
        while found and cursor.key()[: len(prefix)] == prefix:
            found = cursor.delete()

    def _raise_log_start(self, update: LogStartOffsetUpdate) -> None:
        key = partition_key(update.topic_id_partition)
        self._know(key, update.topic_id_partition.topic)
        writer_key = key + update.writer.encode()
        raw = self._txn.get(writer_key, db=self._db.log_starts)
        if raw is None or I64.unpack(raw)[0] < update.log_start_offset:
            self._txn.put(writer_key, I64.pack(update.log_start_offset), db=self._db.log_starts)

    def _raise_local_log_start(self, update: LocalLogStartUpdate) -> None:
        key = partition_key(update.topic_id_partition)
        self._know(key, update.topic_id_partition.topic)
        raw = self._txn.get(key, db=self._db.local_log_starts)
        if raw is None or I64.unpack(raw)[0] < update.local_log_start:
            self._txn.put(key, I64.pack(update.local_log_start), db=self._db.local_log_starts)

    def _bury(self, named: RecordKey) -> None:
        key = partition_key(named.topic_id_partition)
        if named.api_key in (SEGMENT_METADATA_API_KEY, SEGMENT_METADATA_UPDATE_API_KEY):
            raw = self._txn.get(key + named.name, db=self._db.segments)
            if raw is not None:
                self._remove(key, decode_stored_segment(key + named.name, raw))
        elif named.api_key == PARTITION_DELETE_API_KEY:
            self._delete_partition(named.topic_id_partition, RemotePartitionDeleteState.DELETE_PARTITION_FINISHED)
        elif named.api_key == CLAMP_API_KEY:
            if self._txn.delete(key + named.name, db=self._db.clamps):
                self._cover_again(key, U64.unpack(named.name)[0] + 1, _LAST_OFFSET)
        elif named.api_key == QUARANTINE_DELETION_API_KEY:
            self._txn.delete(key + named.name, db=self._db.quarantine_deletions)
        elif named.api_key == TOPIC_TIER_CONFIG_API_KEY:
            self._txn.delete(key, db=self._db.tier_configs)
        elif named.api_key == LOCAL_LOG_START_API_KEY:
            if self._txn.delete(key, db=self._db.local_log_starts):
                self._forget_if_empty(key)
        elif named.api_key == LOG_START_OFFSET_API_KEY and self._txn.delete(key + named.name, db=self._db.log_starts):
            self._forget_if_empty(key)

    def _cover_again(self, key: bytes, first: int, last: int) -> None:
        """Decides anew which readable segment answers for the offsets in [first, last]."""
        self._cut(key, first, last)
        holes = [(first, last)]
        clamps = self._state.clamps(self._txn, key)
        for run in sorted(self._state.overlapping(self._txn, key, first, last), reverse=True):
            if run.order == NOT_READABLE:
                break
            uncovered = []
            run_end = valid_end_offset(clamps, run.order, run.end_offset)
            for hole_first, hole_last in holes:
                run_first, run_last = max(hole_first, run.start_offset), min(hole_last, run_end)
                if run_first > run_last:
                    uncovered.append((hole_first, hole_last))
                    continue
                self._put_run(key, run_first, run_last, run.uuid)
                if hole_first < run_first:
                    uncovered.append((hole_first, run_first - 1))
                if run_last < hole_last:
                    uncovered.append((run_last + 1, hole_last))
            holes = uncovered

    def _put_run(self, key: bytes, first: int, last: int, uuid: bytes) -> None:
        self._txn.put(key + U64.pack(last), U64.pack(first) + uuid, db=self._db.cover)

    def _cut(self, key: bytes, first: int, last: int) -> None:
        """Takes [first, last] out of the cover; what sticks out of it on either side stays."""
        cut: list[tuple[int, int, bytes]] = []
        cursor = self._txn.cursor(db=self._db.cover)
        found = cursor.set_range(key + U64.pack(first))
        while found and cursor.key()[:PARTITION_KEY_BYTES] == key:
            run_last = U64.unpack_from(cursor.key(), PARTITION_KEY_BYTES)[0]
            run_first = U64.unpack_from(cursor.value())[0]
            if run_first > last:
                break
            cut.append((run_first, run_last, bytes(cursor.value()[8:])))
            found = cursor.delete()
        for run_first, run_last, uuid in cut:
            if run_first < first:
                self._put_run(key, run_first, first - 1, uuid)
            if run_last > last:
                self._put_run(key, last + 1, run_last, uuid)
