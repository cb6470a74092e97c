"""Replays metadata records into the materialised state (docs/semantics.md 11.2; docs/design.md, "Metadata").

Replay accepts every forward jump of states, since compaction removes the records between. It drops a move backward, an
update of a segment that was never added, and a record that it has seen before. The topic has LogAppendTime, so the
time of a record is that of its append.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import lmdb

from tiers.metadata.records.serde import (
    COPY_PLAN_API_KEY,
    CUT_API_KEY,
    LOCAL_LOG_START_API_KEY,
    LOG_GAP_API_KEY,
    LOG_START_OFFSET_API_KEY,
    PARTITION_DELETE_API_KEY,
    SEGMENT_METADATA_API_KEY,
    SEGMENT_METADATA_UPDATE_API_KEY,
    TIER_MARKER_API_KEY,
    TOPIC_DELETION_API_KEY,
    TOPIC_MISSING_API_KEY,
    TOPIC_TIER_CONFIG_API_KEY,
    UNFINISHED_REBUILD_API_KEY,
    MetadataRecord,
    RecordKey,
    encode_value,
    log_start_key,
)
from tiers.metadata.state.cover import StateCover
from tiers.metadata.state.layout import (
    CUT,
    END_AND_ORDER,
    I32,
    I64,
    OFFSET_AND_EPOCH,
    U64,
    Databases,
    decode_copy_plan,
    decode_partition,
    delete_prefix,
    encode_log_start,
    encode_partition,
    entries,
    partition_key,
    start_key,
)
from tiers.metadata.state.state import RemoteLogMetadataState, SegmentRun
from tiers.model.copy_plan import NOT_MEASURED_BYTES, CopyPlan
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.segment_metadata import (
    CutUpdate,
    LocalLogStartUpdate,
    LogGapUpdate,
    LogStartOffsetUpdate,
    RemoteLogSegmentMetadata,
    RemoteLogSegmentMetadataUpdate,
    RemotePartitionDeleteMetadata,
    TierMarkerUpdate,
    TopicDeletionUpdate,
    TopicMissingUpdate,
    TopicTierConfigUpdate,
    UnfinishedRebuildUpdate,
)
from tiers.model.segment_state import RemoteLogSegmentState, RemotePartitionDeleteState, is_forward
from tiers.model.stored_segment import (
    StoredFields,
    encode_stored_segment,
    stored_fields,
    update_stored_segment,
)


class MetadataEvent(NamedTuple):
    """One record of a metadata partition. If `record` is None, the subject of `key` is gone."""

    offset: int
    timestamp_ms: int
    key: RecordKey
    record: MetadataRecord | None


class UnknownRecord(NamedTuple):
    """A record that this release does not know and may not ignore."""

    offset: int
    what: str


@dataclass(frozen=True, slots=True)
class PartitionRead:
    """The result of one read of a metadata partition. The next read starts at `next_offset`."""

    metadata_partition: int
    events: Sequence[MetadataEvent]
    next_offset: int
    leader_epoch: int = -1
    """The leader epoch of the last batch before `next_offset`; -1: the read brought no batch."""
    foreign_records: int = 0
    """The number of records that were skipped because Tidegate did not write them."""
    unknown: UnknownRecord | None = None
    """The record that ended the read."""


class Replay:
    """Replays records within one write transaction. It adds the segments that become readable to `finished`.

    A new state replays millions of records at once. So the replay changes segments in their stored form, without
    decoding them."""

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
        self._cover = StateCover(state, databases, txn)
        self._known: dict[bytes, tuple[int, str]] = {}
        """The entries of `partitions` that this transaction has read or written."""

    def apply(self, event: MetadataEvent) -> None:
        match event.record:
            case RemoteLogSegmentMetadata() as metadata:
                self._add(metadata, event.timestamp_ms, event.offset)
            case RemoteLogSegmentMetadataUpdate() as update:
                self._update(update, event.timestamp_ms)
            case RemotePartitionDeleteMetadata() as deletion:
                self._delete_partition(deletion.topic_id_partition, deletion.state)
            case LogStartOffsetUpdate() as update:
                self._put_log_start(update)
            case TopicTierConfigUpdate() as update:
                key = partition_key(update.topic_id_partition)
                self._txn.put(key, encode_value(update), db=self._db.tier_configs)
            case CutUpdate() as cut:
                self._put_cut(cut, event.timestamp_ms)
            case LocalLogStartUpdate() as update:
                self._raise_local_log_start(update)
            case CopyPlan() as plan:
                self._begin_plan(plan, event.timestamp_ms, event.offset)
            case LogGapUpdate() as update:
                self._put_gap(update)
            case UnfinishedRebuildUpdate() as update:
                self._txn.put(partition_key(update.topic_id_partition), b"", db=self._db.unfinished_rebuilds)
            case TierMarkerUpdate() as update:
                key = partition_key(update.topic_id_partition) + update.location.encode()
                self._txn.put(key, encode_value(update), db=self._db.tier_markers)
            case TopicDeletionUpdate() as update:
                value = encode_value(replace(update, event_timestamp_ms=event.timestamp_ms))
                self._txn.put(partition_key(update.topic_id_partition), value, db=self._db.topic_deletions)
            case TopicMissingUpdate() as update:
                since = I64.pack(event.timestamp_ms)
                key = partition_key(update.topic_id_partition)
                self._txn.put(key, since, overwrite=False, db=self._db.missing_topics)
            case None:
                self._bury(event.key)

    def _add(self, metadata: RemoteLogSegmentMetadata, timestamp_ms: int, offset: int) -> None:
        if metadata.state is not RemoteLogSegmentState.COPY_SEGMENT_STARTED:
            return
        partition = metadata.segment_id.topic_id_partition
        key = partition_key(partition)
        uuid = metadata.segment_id.id.bytes
        stored = encode_stored_segment(metadata, timestamp_ms)
        start, end = metadata.start_offset, metadata.end_offset
        # A job may announce an attempt again that it deleted, since its objects came late.
        self._txn.delete(key + uuid, db=self._db.deleted_segments)
        if not self._txn.put(key + uuid, stored, overwrite=False, db=self._db.segments):
            known = stored_fields(self._state.stored(self._txn, key, uuid))
            if known.state != RemoteLogSegmentState.COPY_SEGMENT_STARTED:
                return
            # A plan announced the segment before its size was known, or an owner repeated its record. Compaction keeps
            # the later record, so the replay keeps it too.
            self._txn.put(key + uuid, stored, db=self._db.segments)
            self._txn.delete(start_key(key, known.start_offset, uuid), db=self._db.starts)
        self._txn.put(key + uuid, b"", db=self._db.apart)
        self._know(key, partition.topic, end - start)
        self._txn.put(start_key(key, start, uuid), END_AND_ORDER.pack(end, ~offset), db=self._db.starts)

    def _know(self, key: bytes, topic: str, span: int = 0) -> None:
        known = self._known.get(key)
        if known is None:
            raw = self._txn.get(key, db=self._db.partitions)
            known = (-1, "") if raw is None else decode_partition(raw)
        known_span, known_topic = known
        if known_span < 0 or span > known_span or (topic and topic != known_topic):
            known = (max(span, known_span), topic or known_topic)
            self._txn.put(key, encode_partition(*known), db=self._db.partitions)
        self._known[key] = known

    def _update(self, update: RemoteLogSegmentMetadataUpdate, timestamp_ms: int) -> None:
        key = partition_key(update.segment_id.topic_id_partition)
        uuid = update.segment_id.id.bytes
        raw = self._txn.get(key + uuid, db=self._db.segments)
        if raw is None:
            return
        raw = bytes(raw)
        known = stored_fields(raw)
        if not is_forward(RemoteLogSegmentState(known.state), update.state):
            return
        if update.state is RemoteLogSegmentState.DELETE_SEGMENT_FINISHED:
            # It is kept, so that its objects are deleted once more after a while.
            kept = update_stored_segment(raw, known, update, timestamp_ms)
            self._txn.put(key + uuid, kept, db=self._db.deleted_segments)
            self._remove(key, uuid, known)
            return
        start, end = known.start_offset, known.end_offset
        is_readable = update.state is RemoteLogSegmentState.COPY_SEGMENT_FINISHED
        stored = update_stored_segment(raw, known, update, timestamp_ms)
        self._txn.put(key + uuid, stored, db=self._db.segments)
        entry = start_key(key, start, uuid)
        order = END_AND_ORDER.unpack(self._txn.get(entry, bytes(END_AND_ORDER.size), db=self._db.starts))[1]
        began_at = order if order >= 0 else ~order
        order = began_at if is_readable else ~began_at
        self._txn.put(entry, END_AND_ORDER.pack(end, order), db=self._db.starts)
        if is_readable:
            self._cover.finished(key, SegmentRun(order, start, end, uuid), stored)
            self._finished.append(update.segment_id)
        elif known.state == RemoteLogSegmentState.COPY_SEGMENT_FINISHED:
            self._cover.again(key, start, end)

    def _put_cut(self, cut: CutUpdate, timestamp_ms: int) -> None:
        key = partition_key(cut.topic_id_partition)
        name, value = I32.pack(cut.leader_epoch) + I64.pack(cut.offset), CUT.pack(timestamp_ms, cut.is_proved)
        self._txn.put(key + name, value, db=self._db.cuts)
        self._cover.all_above(key, cut.offset - 1)

    def _remove(self, key: bytes, uuid: bytes, known: StoredFields) -> None:
        self._txn.delete(key + uuid, db=self._db.segments)
        self._txn.delete(start_key(key, known.start_offset, uuid), db=self._db.starts)
        if known.state == RemoteLogSegmentState.COPY_SEGMENT_FINISHED:
            self._cover.again(key, known.start_offset, known.end_offset)
        self._txn.delete(key + uuid, db=self._db.apart)
        self._forget_if_empty(key)

    def _forget_if_empty(self, key: bytes) -> None:
        kept = self._db.starts, self._db.log_starts, self._db.local_log_starts, self._db.copy_plans, self._db.gaps
        if any(True for database in kept for _ in entries(self._txn, database, key)):
            return
        if self._deletion(key) in (None, RemotePartitionDeleteState.DELETE_PARTITION_FINISHED):
            self._txn.delete(key, db=self._db.partitions)
            self._known.pop(key, None)

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
                self._db.cover_sizes,
                self._db.apart,
                self._db.log_starts,
                self._db.cuts,
                self._db.local_log_starts,
                self._db.copy_plans,
                self._db.gaps,
                self._db.partitions,
            ):
                delete_prefix(self._txn, database, key)
            self._known.pop(key, None)
        else:
            self._know(key, partition.topic)

    def _put_log_start(self, update: LogStartOffsetUpdate) -> None:
        """Keeps every log start until its own tombstone, as compaction does."""
        key, start = partition_key(update.topic_id_partition), update.log_start
        self._know(key, update.topic_id_partition.topic)
        name = log_start_key(update.topic_id_partition, start).name
        self._txn.put(key + name, encode_log_start(start), db=self._db.log_starts)

    def _raise_local_log_start(self, update: LocalLogStartUpdate) -> None:
        key, start = partition_key(update.topic_id_partition), update.local_log_start
        self._know(key, update.topic_id_partition.topic)
        self._txn.put(key, OFFSET_AND_EPOCH.pack(*start), db=self._db.local_log_starts)

    def _put_gap(self, update: LogGapUpdate) -> None:
        key = partition_key(update.topic_id_partition)
        self._know(key, update.topic_id_partition.topic)
        self._txn.put(key + U64.pack(update.gap.first_offset), I64.pack(update.gap.next_offset), db=self._db.gaps)

    def _begin_plan(self, plan: CopyPlan, timestamp_ms: int, offset: int) -> None:
        key = partition_key(plan.topic_id_partition)
        if self._txn.put(key + plan.plan_id.bytes, encode_value(plan), overwrite=False, db=self._db.copy_plans):
            for announced in plan.announced():
                self._add(announced, timestamp_ms, offset)

    def _end_plan(self, key: bytes, plan_id: bytes) -> None:
        raw = self._txn.get(key + plan_id, db=self._db.copy_plans)
        if raw is None:
            return
        self._txn.delete(key + plan_id, db=self._db.copy_plans)
        for segment_id in decode_copy_plan(bytes(raw)).segment_ids():
            uuid = segment_id.id.bytes
            stored = self._txn.get(key + uuid, db=self._db.segments)
            if stored is None:
                continue
            known = stored_fields(bytes(stored))
            # A segment that was announced again, with its size, has records of its own that decide its state.
            # Compaction may put the end of the plan after them.
            is_started = known.state == RemoteLogSegmentState.COPY_SEGMENT_STARTED
            if is_started and known.segment_size_bytes == NOT_MEASURED_BYTES:
                self._remove(key, uuid, known)
        self._forget_if_empty(key)

    def _bury(self, named: RecordKey) -> None:
        key = partition_key(named.topic_id_partition)
        if named.api_key in (SEGMENT_METADATA_API_KEY, SEGMENT_METADATA_UPDATE_API_KEY):
            raw = self._txn.get(key + named.name, db=self._db.segments)
            if raw is not None:
                self._remove(key, named.name, stored_fields(bytes(raw)))
            self._txn.delete(key + named.name, db=self._db.deleted_segments)
        elif named.api_key == PARTITION_DELETE_API_KEY:
            self._delete_partition(named.topic_id_partition, RemotePartitionDeleteState.DELETE_PARTITION_FINISHED)
        elif named.api_key == CUT_API_KEY:
            if self._txn.delete(key + named.name, db=self._db.cuts):
                self._cover.all_above(key, I64.unpack_from(named.name, I32.size)[0] - 1)
        elif named.api_key == COPY_PLAN_API_KEY:
            self._end_plan(key, named.name)
        elif named.api_key == TOPIC_TIER_CONFIG_API_KEY:
            self._txn.delete(key, db=self._db.tier_configs)
        elif named.api_key == LOCAL_LOG_START_API_KEY:
            if self._txn.delete(key, db=self._db.local_log_starts):
                self._forget_if_empty(key)
        elif named.api_key == LOG_GAP_API_KEY:
            if self._txn.delete(key + named.name, db=self._db.gaps):
                self._forget_if_empty(key)
        elif named.api_key == UNFINISHED_REBUILD_API_KEY:
            self._txn.delete(key, db=self._db.unfinished_rebuilds)
        elif named.api_key == TIER_MARKER_API_KEY:
            self._txn.delete(key + named.name, db=self._db.tier_markers)
        elif named.api_key == TOPIC_DELETION_API_KEY:
            self._txn.delete(key, db=self._db.topic_deletions)
        elif named.api_key == TOPIC_MISSING_API_KEY:
            self._txn.delete(key, db=self._db.missing_topics)
        elif named.api_key == LOG_START_OFFSET_API_KEY and self._txn.delete(key + named.name, db=self._db.log_starts):
            self._forget_if_empty(key)
