"""Replays metadata records into the materialised state (docs/semantics.md 11.2; docs/design.md, "Metadata").

Replay accepts every forward jump of states, since compaction removes the records between. It drops a move backward, an
update of a segment that was never added, and a record that it has seen before. The topic has LogAppendTime, so the
time of a record is that of its append.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import lmdb

from protocol.primitives import Buffer
from tiers.metadata.records.serde import (
    PARTITION_DELETE_API_KEY,
    SEGMENT_METADATA_API_KEY,
    SEGMENT_METADATA_UPDATE_API_KEY,
    MetadataRecord,
    OwnRecord,
    RecordKey,
    check_known,
    decode_key,
    decode_value,
    encode_value,
    key_of,
)
from tiers.metadata.state.cover import StateCover
from tiers.metadata.state.layout import (
    END_AND_ORDER,
    KEPT_BY,
    OF_THE_LOG,
    Databases,
    decode_partition,
    delete_prefix,
    encode_partition,
    entries,
    partition_key,
    start_key,
)
from tiers.model.copy_plan import NOT_MEASURED_BYTES, CopyPlan
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.segment_metadata import (
    CutUpdate,
    RemoteLogSegmentMetadata,
    RemoteLogSegmentMetadataUpdate,
    RemoteLogSegmentState,
    RemotePartitionDeleteMetadata,
    RemotePartitionDeleteState,
    TopicMissingUpdate,
)
from tiers.model.stored_segment import StoredSegment, encode_stored_segment, with_cuts

_FIRST_COUNTS: Final = (CopyPlan, TopicMissingUpdate)
"""Of several records with one key, the first one counts. Of all other types, the last one does."""


class MetadataEvent(NamedTuple):
    """One record of a metadata partition. If `record` is None, the subject of `key` is gone."""

    offset: int
    timestamp_ms: int
    key: RecordKey
    record: MetadataRecord | None

    @classmethod
    def of(cls, offset: int, timestamp_ms: int, key: bytes, value: Buffer | None) -> MetadataEvent | None:
        """Decodes a record; None: this release may ignore it. Raises `RemoteLogMetadataError`.

        The key of a record with a value does not matter: Kafka writes none."""
        if value is None:
            ended = decode_key(key)
            check_known(ended)
            return cls(offset, timestamp_ms, ended, None)
        record = decode_value(value)
        return None if record is None else cls(offset, timestamp_ms, key_of(record), record)


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

    def __init__(self, databases: Databases, txn: lmdb.Transaction, finished: list[RemoteLogSegmentId]) -> None:
        self._db = databases
        self._txn = txn
        self._finished = finished
        self._cover = StateCover(databases, txn)

    def apply(self, event: MetadataEvent) -> None:
        match event.record:
            case None:
                self._end(event.key)
            case RemoteLogSegmentMetadata() as metadata:
                self._add(metadata, event.timestamp_ms, event.offset)
            case RemoteLogSegmentMetadataUpdate() as update:
                self._update(update, event.timestamp_ms)
            case RemotePartitionDeleteMetadata() as deletion:
                self._delete_partition(deletion.topic_id_partition, deletion.state)
            case record:
                self._put(record, event)

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
            known = self._segment(key, uuid)
            if known is None or known.state != RemoteLogSegmentState.COPY_SEGMENT_STARTED:
                return
            # A plan announced the segment before its size was known, or an owner repeated its record. Compaction keeps
            # the later record, so the replay keeps it too.
            self._txn.delete(start_key(key, known.start_offset, uuid), db=self._db.starts)
            self._txn.put(key + uuid, stored, db=self._db.segments)
        self._txn.put(key + uuid, b"", db=self._db.apart)
        self._know(key, partition.topic, end - start)
        self._txn.put(start_key(key, start, uuid), END_AND_ORDER.pack(end, ~offset), db=self._db.starts)

    def _know(self, key: bytes, topic: str, span: int = 0) -> None:
        raw = self._txn.get(key, db=self._db.partitions)
        known_span, known_topic = (-1, "") if raw is None else decode_partition(raw)
        if known_span < span or topic not in ("", known_topic):
            entry = encode_partition(max(span, known_span), topic or known_topic)
            self._txn.put(key, entry, db=self._db.partitions)

    def _update(self, update: RemoteLogSegmentMetadataUpdate, timestamp_ms: int) -> None:
        key = partition_key(update.segment_id.topic_id_partition)
        uuid = update.segment_id.id.bytes
        known = self._segment(key, uuid)
        if known is None or update.state < known.state:  # compaction may have removed the states between them
            return
        stored = known.updated(update, timestamp_ms)
        if update.state is RemoteLogSegmentState.DELETE_SEGMENT_FINISHED:
            # It is kept, so that its objects are deleted once more after a while.
            self._txn.put(key + uuid, stored, db=self._db.deleted_segments)
            self._remove(key, known)
            return
        start, end = known.start_offset, known.end_offset
        is_readable = update.state is RemoteLogSegmentState.COPY_SEGMENT_FINISHED
        self._txn.put(key + uuid, stored, db=self._db.segments)
        entry = start_key(key, start, uuid)
        order = END_AND_ORDER.unpack(self._txn.get(entry, bytes(END_AND_ORDER.size), db=self._db.starts))[1]
        began_at = max(order, ~order)
        self._txn.put(entry, END_AND_ORDER.pack(end, began_at if is_readable else ~began_at), db=self._db.starts)
        if is_readable:
            self._cover.again(key, start, end, uuid)
            self._finished.append(update.segment_id)
        elif known.state == RemoteLogSegmentState.COPY_SEGMENT_FINISHED:
            self._cover.again(key, start, end)

    def _put(self, record: OwnRecord, event: MetadataEvent) -> None:
        key, database = partition_key(record.topic_id_partition), self._db.records[event.key.api_key]
        value = encode_value(replace(record, event_timestamp_ms=event.timestamp_ms))
        overwrites = not isinstance(record, _FIRST_COUNTS)
        if not self._txn.put(key + event.key.name, value, overwrite=overwrites, db=database):
            return
        if isinstance(record, CutUpdate):
            self._cover.all_above(key, record.offset - 1)
        elif isinstance(record, CopyPlan):
            for announced in record.announced():
                self._add(announced, event.timestamp_ms, event.offset)
        elif event.key.api_key in KEPT_BY:
            self._know(key, record.topic_id_partition.topic)

    def _segment(self, key: bytes, uuid: bytes) -> StoredSegment | None:
        raw = self._txn.get(key + uuid, db=self._db.segments)
        return None if raw is None else with_cuts(key, uuid, bytes(raw))

    def _remove(self, key: bytes, known: StoredSegment) -> None:
        self._txn.delete(key + known.id, db=self._db.segments)
        self._txn.delete(start_key(key, known.start_offset, known.id), db=self._db.starts)
        if known.state == RemoteLogSegmentState.COPY_SEGMENT_FINISHED:
            self._cover.again(key, known.start_offset, known.end_offset)
        self._txn.delete(key + known.id, db=self._db.apart)
        self._forget_if_empty(key)

    def _forget_if_empty(self, key: bytes) -> None:
        kept = self._db.starts, *(self._db.records[api_key] for api_key in KEPT_BY)
        if any(True for database in kept for _ in entries(self._txn, database, key)):
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
            db = self._db
            for database in (
                *(db.segments, db.starts, db.cover, db.cover_sizes, db.apart, db.partitions),
                *(db.records[api_key] for api_key in OF_THE_LOG),
            ):
                delete_prefix(self._txn, database, key)
        else:
            self._know(key, partition.topic)

    def _end_plan(self, key: bytes, plan: CopyPlan) -> None:
        for segment_id in plan.segment_ids():
            known = self._segment(key, segment_id.id.bytes)
            if known is None or known.state != RemoteLogSegmentState.COPY_SEGMENT_STARTED:
                continue
            # A segment that was announced again, with its size, has records of its own that decide its state.
            # Compaction may put the end of the plan after them.
            if known.segment_size_bytes == NOT_MEASURED_BYTES:
                self._remove(key, known)

    def _end(self, ended: RecordKey) -> None:
        key, name = partition_key(ended.topic_id_partition), ended.name
        if ended.api_key in (SEGMENT_METADATA_API_KEY, SEGMENT_METADATA_UPDATE_API_KEY):
            known = self._segment(key, name)
            if known is not None:
                self._remove(key, known)
            self._txn.delete(key + name, db=self._db.deleted_segments)
        elif ended.api_key == PARTITION_DELETE_API_KEY:
            self._delete_partition(ended.topic_id_partition, RemotePartitionDeleteState.DELETE_PARTITION_FINISHED)
        elif ended.api_key in self._db.records:
            raw = self._txn.pop(key + name, db=self._db.records[ended.api_key])
            record = None if raw is None else decode_value(raw)
            if isinstance(record, CutUpdate):
                self._cover.all_above(key, record.offset - 1)
            elif isinstance(record, CopyPlan):
                self._end_plan(key, record)
            if record is not None and ended.api_key in KEPT_BY:
                self._forget_if_empty(key)
