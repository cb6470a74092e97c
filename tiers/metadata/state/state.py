"""Reads the materialised state: synchronously, in a few microseconds, from any process that shares the folder by mmap.

A handle must be opened after a fork. Read transactions are short: no code here yields within one. Long lists are read
in pieces, each in a transaction of its own, so that no reader keeps the writer from reusing pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar
from uuid import UUID

import lmdb

from tiers.errors import RemoteLogMetadataNotReadyError
from tiers.metadata.records.serde import OwnRecord, RecordKey
from tiers.metadata.state.layout import (
    COVER_SIZE,
    FINAL,
    FRESHNESS_FILE,
    I32,
    I64,
    OF_THE_LOG,
    PARTITION_KEY_BYTES,
    READING,
    STATE_FILE,
    U64,
    Databases,
    StateIdentity,
    decode_partition,
    decode_position,
    entries,
    open_env,
    partition_key,
    partition_of,
    recorded,
)
from tiers.metadata.state.segment_cursors import answered, answering, apart, cuts_of, listed
from tiers.model.copy_plan import CopyPlan
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.log_start import LogGap, LogStart, OffsetAndEpoch
from tiers.model.segment_metadata import (
    Cut,
    LocalLogStartUpdate,
    LogGapUpdate,
    LogStartOffsetUpdate,
    RemoteLogSegmentMetadata,
    RemotePartitionDeleteState,
    TierMarkerUpdate,
    TopicDeletionUpdate,
    TopicMissingUpdate,
    TopicTierConfigUpdate,
    UnfinishedRebuildUpdate,
    leader_epoch_at,
)
from tiers.model.stored_segment import CoverSize, StoredSegment, decode_answer, with_cuts

_BEHIND_ALL = 1 << 64
_R = TypeVar("_R", bound=OwnRecord)


class StateFiles(NamedTuple):
    """The open files of a state."""

    env: lmdb.Environment
    freshness: lmdb.Environment
    db: Databases

    @classmethod
    def open(cls, env: lmdb.Environment, freshness: lmdb.Environment) -> StateFiles:
        return cls(env, freshness, Databases.open(env))

    @classmethod
    def open_shared(cls, folder: Path) -> StateFiles:
        """Opens the files in another process than the writer's.

        Raises `RemoteLogMetadataNotReadyError` while there is no state to read."""
        opened: list[lmdb.Environment] = []
        try:
            opened.extend(open_env(folder / name) for name in (STATE_FILE, FRESHNESS_FILE))
            return cls.open(*opened)
        except lmdb.Error as error:
            for env in opened:
                env.close()
            raise RemoteLogMetadataNotReadyError(f"the state in {folder} cannot be read yet: {error}") from error


class RemoteLogMetadataState:
    """Reads the state. Every method raises `RemoteLogMetadataNotReadyError` while no state is open.

    * `start_offset` and `end_offset` are inclusive. Only COPY_SEGMENT_FINISHED segments answer offset look-ups.
    * A CUT voids, from its offset on, the segments that were copied in an earlier leader epoch, wherever their records
      stand. A void offset is answered by another segment or by none. `valid_end_offset` says how far a segment may be
      read.
    * Every process has the metadata of every partition."""

    def __init__(self, files: StateFiles | None = None) -> None:
        self._files = files

    @property
    def _opened(self) -> StateFiles:
        if self._files is None:
            raise RemoteLogMetadataNotReadyError("the saved state of the remote log metadata is not open yet")
        return self._files

    @property
    def _env(self) -> lmdb.Environment:
        return self._opened.env

    @property
    def _freshness(self) -> lmdb.Environment:
        return self._opened.freshness

    @property
    def _db(self) -> Databases:
        return self._opened.db

    def close(self) -> None:
        """Closes the files. It may be called twice."""
        files, self._files = self._files, None
        if files is not None:
            files.env.close()
            files.freshness.close()

    def identity(self) -> StateIdentity | None:
        with self._env.begin() as txn:
            raw = txn.get(b"identity", db=self._db.meta)
        return None if raw is None else StateIdentity.decode(raw)

    def writer(self) -> str | None:
        """Returns the writer name of the process that keeps this folder; None: it has not chosen one yet.

        Records name their writer, for example those of log starts."""
        with self._env.begin() as txn:
            raw = txn.get(b"writer", db=self._db.meta)
        return None if raw is None else str(raw, "utf-8")

    def _recorded(self, kind: type[_R], prefix: bytes = b"") -> list[_R]:
        with self._env.begin() as txn:
            return recorded(txn, self._db, kind, prefix)

    def next_offset(self, metadata_partition: int) -> int:
        """Returns the next offset to read; 0 before the first read."""
        return self.consumed(metadata_partition).offset

    def consumed(self, metadata_partition: int) -> OffsetAndEpoch:
        """Returns the next offset to read and the leader epoch of the last batch before it; -1 before any batch."""
        with self._env.begin() as txn:
            raw = txn.get(I32.pack(metadata_partition), db=self._db.consumed)
        return OffsetAndEpoch(0, -1) if raw is None else decode_position(raw)

    def reached(self, metadata_partition: int) -> OffsetAndEpoch:
        """Returns the highest value of `consumed` for this topic. It outlives a rebuild of the state from the topic."""
        with self._env.begin() as txn:
            raw = txn.get(I32.pack(metadata_partition), db=self._db.reached)
        consumed = self.consumed(metadata_partition)
        return consumed if raw is None else max(consumed, decode_position(raw))

    def diverged(self) -> dict[int, str]:
        """Returns the metadata partitions whose logs diverged from the log that was read.

        Each has a text for an operator."""
        with self._env.begin() as txn:
            return {I32.unpack(number)[0]: str(reason, "utf-8") for number, reason in txn.cursor(db=self._db.diverged)}

    def unfinished_rebuilds(self) -> frozenset[int]:
        """Returns the metadata partitions that `rebuild` has not written to their end."""
        return frozenset(each.topic_id_partition.partition for each in self._recorded(UnfinishedRebuildUpdate))

    def read_at_ms(self) -> dict[int, int]:
        """Returns when (wall clock) each metadata partition was last read to its end, or its read began at its start.

        It leaves out the partitions for which no such time was saved."""
        with self._env.begin() as txn:
            return {I32.unpack(number)[0]: I64.unpack(at)[0] for number, at in txn.cursor(db=self._db.read_at)}

    def fresh_at_ms(self, metadata_partition: int) -> int | None:
        """Returns when (monotonic) the reads last reached the high watermark; None: not since the writer opened."""
        with self._freshness.begin() as txn:
            raw = txn.get(I32.pack(metadata_partition))
        return None if raw is None else int(I64.unpack(raw)[0])

    def reading(self) -> int:
        """Returns the number of the current reading of the metadata topic.

        It changes when the writer opens the state, and when it clears records to read them again."""
        with self._freshness.begin() as txn:
            raw = txn.get(READING)
        return 0 if raw is None else int(I64.unpack(raw)[0])

    def is_final(self) -> bool:
        """Returns whether the metadata topic is gone, so that the known metadata is the last and nothing gets fresh.

        The last records may be missing. So a caller may rely only on what the metadata contains, not on what it
        lacks."""
        with self._freshness.begin() as txn:
            return txn.get(FINAL) is not None

    def remote_log_segment_metadata(self, partition: TopicIdPartition, offset: int) -> RemoteLogSegmentMetadata | None:
        """Returns the readable segment that holds `offset`; None without one."""
        segment = self.next_segment(partition, offset)
        return None if segment is None or segment.start_offset > offset else segment

    def next_segment(self, partition: TopicIdPartition, offset: int) -> RemoteLogSegmentMetadata | None:
        """Returns the readable segment that holds `offset`, else the first one above it, else None."""
        key = partition_key(partition)
        with self._env.begin() as txn:
            run = self._run_from(txn.cursor(self._db.cover), key, offset)
        return None if run is None else decode_answer(key, run[8:])

    def _run_from(self, cursor: lmdb.Cursor, key: bytes, offset: int) -> bytes | None:
        """Returns the first run that ends at or above `offset`, and moves the cursor to it.

        It holds `offset` if any readable segment does."""
        found = cursor.set_range(key + U64.pack(max(offset, 0))) and cursor.key()[:PARTITION_KEY_BYTES] == key
        return bytes(cursor.value()) if found else None

    def cuts(self, partition: TopicIdPartition) -> list[Cut]:
        """Returns the CUTs, by leader epoch and offset."""
        with self._env.begin() as txn:
            return cuts_of(txn, self._db, partition_key(partition))

    def copy_plans(self, partition: TopicIdPartition) -> list[CopyPlan]:
        """Returns the copy plans that have not ended."""
        return self._recorded(CopyPlan, partition_key(partition))

    def deleted_segments(
        self, partition: TopicIdPartition | None = None, until_ms: int | None = None
    ) -> list[RemoteLogSegmentMetadata]:
        """Returns the segments that are DELETE_SEGMENT_FINISHED and not forgotten yet, of one partition or of all.

        `event_timestamp_ms` is the time (by the brokers' clock) of that record, at most `until_ms` if it is given."""
        prefix = b"" if partition is None else partition_key(partition)
        with self._env.begin() as txn:
            kept = [
                with_cuts(key[:PARTITION_KEY_BYTES], key[PARTITION_KEY_BYTES:], raw)
                for key, raw in entries(txn, self._db.deleted_segments, prefix)
            ]
        return [each.metadata for each in kept if until_ms is None or each.event_timestamp_ms <= until_ms]

    def remote_log_segment_metadata_by_id(self, segment_id: RemoteLogSegmentId) -> RemoteLogSegmentMetadata | None:
        """Returns the segment in any state; None when it is unknown or DELETE_SEGMENT_FINISHED."""
        key, uuid = partition_key(segment_id.topic_id_partition), segment_id.id.bytes
        with self._env.begin() as txn:
            raw = txn.get(key + uuid, db=self._db.segments)
            return None if raw is None else with_cuts(key, uuid, bytes(raw), cuts_of(txn, self._db, key)).metadata

    def list_remote_log_segments(
        self, partition: TopicIdPartition, min_offset: int = 0
    ) -> Iterator[RemoteLogSegmentMetadata]:
        """Yields segments in the states 0, 1 and 2 with `end_offset` >= `min_offset`, by ascending start offset."""
        return (each.metadata for each in self.stored_segments(partition, min_offset))

    def stored_segments(self, partition: TopicIdPartition, min_offset: int = 0) -> Iterator[StoredSegment]:
        """Yields the same segments as `list_remote_log_segments`, for callers that need few fields of many segments."""
        return listed(self._env, self._db, partition_key(partition), min_offset)

    def answering_segments(self, partition: TopicIdPartition, offset: int = 0) -> Iterator[StoredSegment]:
        """Yields `next_segment` of `offset`, then of the offset after its valid end, and so on to the remote end.

        The iterator may or may not show changes that happen meanwhile. A caller that needs two segments of the same
        state must not await anything between them."""
        return answering(self._env, self._db, partition_key(partition), offset)

    def answered_offsets(self, partition: TopicIdPartition, offset: int = 0) -> Iterator[tuple[int, int]]:
        """Yields the runs of offsets that readable segments have, each as its first and its next offset, in order.

        The first run has `offset`, or lies above it. It takes a quarter of the time of `answering_segments`. The
        iterator may or may not show changes that happen meanwhile."""
        return answered(self._env, self._db, partition_key(partition), offset)

    def segments_apart(self, partition: TopicIdPartition) -> list[StoredSegment]:
        """Returns the segments in the states 0, 1 and 2 that are not whole, by ascending start offset.

        A readable segment is *whole* if it answers alone for all of its offsets. So these are the attempts, the begun
        deletions, and what CUTs and later copies have replaced, wholly or in part."""
        return apart(self._env, self._db, partition_key(partition))

    def cover_size(self, partition: TopicIdPartition) -> CoverSize:
        """Returns the sums over the readable segments, without a look at each of them."""
        with self._env.begin() as txn:
            raw = txn.get(partition_key(partition), db=self._db.cover_sizes)
        return CoverSize(0, 0, 0) if raw is None else CoverSize(*COVER_SIZE.unpack(raw))

    def earliest_offset(self, partition: TopicIdPartition) -> int | None:
        """Returns the start offset of the first readable segment; None when there is none."""
        with self._env.begin() as txn:
            return self._earliest_offset(txn, partition_key(partition))

    def _earliest_offset(self, txn: lmdb.Transaction, key: bytes) -> int | None:
        run = self._run_from(txn.cursor(self._db.cover), key, 0)
        return None if run is None else int(U64.unpack_from(run)[0])

    def remote_end_offset(self, partition: TopicIdPartition) -> int | None:
        """Returns the inclusive end of the last readable segment (Ry); None when there is none."""
        last = self.last_below(partition, _BEHIND_ALL)
        return None if last is None else last.offset

    def log_start_offset(self, partition: TopicIdPartition) -> int | None:
        """Returns the highest offset of `log_starts`, or `earliest_offset` without any."""
        key = partition_key(partition)
        with self._env.begin() as txn:
            starts = self._standing_log_starts(txn, partition)
            return starts[0].offset if starts else self._earliest_offset(txn, key)

    def log_starts(self, partition: TopicIdPartition) -> list[LogStart]:
        """Returns every recorded log start whose reason deletes records, the highest first.

        The list leaves out a log start of another history than the segments: the last readable record below it cannot
        be of its history (`LogStart.may_follow`)."""
        with self._env.begin() as txn:
            return self._standing_log_starts(txn, partition)

    def _standing_log_starts(self, txn: lmdb.Transaction, partition: TopicIdPartition) -> list[LogStart]:
        key = partition_key(partition)
        standing = [
            start
            for start in self._recorded_log_starts(txn, key)
            if start.deletes and ((last := self._last_below(txn, key, start.offset)) is None or start.may_follow(*last))
        ]
        return sorted(standing, key=lambda start: (start.position, start.reason, start.last_epoch), reverse=True)

    def last_below(self, partition: TopicIdPartition, offset: int) -> OffsetAndEpoch | None:
        """Returns the last readable record below `offset`, with its leader epoch; None without one."""
        with self._env.begin() as txn:
            return self._last_below(txn, partition_key(partition), offset)

    def _last_below(self, txn: lmdb.Transaction, key: bytes, offset: int) -> OffsetAndEpoch | None:
        cursor, end = txn.cursor(self._db.cover), offset - 1
        run = self._run_from(cursor, key, end)
        if run is None or U64.unpack_from(run)[0] > end:
            # The cursor is behind the last run below `end`.
            if not (cursor.prev() if cursor.key() else cursor.last()) or cursor.key()[:PARTITION_KEY_BYTES] != key:
                return None
            run, end = bytes(cursor.value()), U64.unpack_from(cursor.key(), PARTITION_KEY_BYTES)[0]
        segment = decode_answer(key, run[8:])
        return OffsetAndEpoch(end, leader_epoch_at(segment.segment_leader_epochs, end))

    def recorded_log_starts(self, partition: TopicIdPartition) -> list[LogStart]:
        """Returns every recorded log start: also those that an owner only saw, and those of other histories."""
        with self._env.begin() as txn:
            return self._recorded_log_starts(txn, partition_key(partition))

    def _recorded_log_starts(self, txn: lmdb.Transaction, key: bytes) -> list[LogStart]:
        return [each.log_start for each in recorded(txn, self._db, LogStartOffsetUpdate, key)]

    def local_log_start(self, partition: TopicIdPartition) -> OffsetAndEpoch | None:
        """Returns the end of the last trim that began; None before the first. The local log may start below it."""
        trims = self._recorded(LocalLogStartUpdate, partition_key(partition))
        return trims[0].local_log_start if trims else None

    def gaps(self, partition: TopicIdPartition) -> list[LogGap]:
        """Returns the recorded gaps, by ascending offset. They do not overlap."""
        return [each.gap for each in self._recorded(LogGapUpdate, partition_key(partition))]

    def gap_at(self, partition: TopicIdPartition, offset: int) -> LogGap | None:
        """Returns the recorded gap that holds `offset`; None without one."""
        return next((gap for gap in self.gaps(partition) if gap.holds(offset)), None)

    def tier_marker(self, location: str) -> TierMarkerUpdate | None:
        """Returns the recorded marker of a location of the store; None without one.

        It is as fresh as the metadata of `TIER_PARTITION`."""
        return next((each for each in self._recorded(TierMarkerUpdate) if each.location == location), None)

    def topic_deletions(self) -> dict[UUID, TopicDeletionUpdate]:
        """Returns the last recorded deletion of each topic that has one, with the time (ms) of the brokers' clock."""
        return {each.topic_id_partition.topic_id: each for each in self._recorded(TopicDeletionUpdate)}

    def missing_topics(self) -> dict[UUID, int]:
        """Returns the topics recorded as missing, each with the time (ms, by the brokers' clock) of its record."""
        missing = self._recorded(TopicMissingUpdate)
        return {each.topic_id_partition.topic_id: each.event_timestamp_ms for each in missing}

    def log_record_keys(self, partition: TopicIdPartition) -> list[RecordKey]:
        """Returns the keys of the records about the partition's log: log starts, trim, gaps, CUTs and copy plans."""
        key = partition_key(partition)
        with self._env.begin() as txn:
            return [
                RecordKey(api_key, partition, entry[PARTITION_KEY_BYTES:])
                for api_key in OF_THE_LOG
                for entry, _ in entries(txn, self._db.records[api_key], key)
            ]

    def remote_partition_delete_state(self, partition: TopicIdPartition) -> RemotePartitionDeleteState | None:
        """Returns the state of the deletion of the whole partition; None when no deletion was requested."""
        with self._env.begin() as txn:
            raw = txn.get(partition_key(partition), db=self._db.deletions)
        return None if raw is None else RemotePartitionDeleteState(raw[0])

    def topic_tier_config(self, topic_id: UUID) -> Mapping[str, str]:
        """Returns the tier settings that were set for the topic through a proxy, by Kafka's names, or an empty mapping.

        They are as fresh as the metadata of the topic's partition 0."""
        found = self._recorded(TopicTierConfigUpdate, partition_key(TopicIdPartition(topic_id, 0)))
        return found[0].config if found else {}

    def topics_with_tier_config(self) -> list[TopicIdPartition]:
        """Returns partition 0 of every topic with tier settings of its own."""
        return [each.topic_id_partition for each in self._recorded(TopicTierConfigUpdate)]

    def seen_at_ms(self, segment_id: RemoteLogSegmentId) -> int | None:
        """Returns when (monotonic clock, ms) this process saw the segment become COPY_SEGMENT_FINISHED; None: not yet.

        A segment in the saved state counts as seen when the state was opened. Only the process that keeps the state
        knows it."""
        return None

    def is_known(self, partition: TopicIdPartition) -> bool:
        """Returns whether any metadata of this partition is known."""
        with self._env.begin() as txn:
            return txn.get(partition_key(partition), db=self._db.partitions) is not None

    def is_tiered(self, topic_id: UUID) -> bool:
        """Returns whether any metadata of this topic is known."""
        with self._env.begin() as txn:
            return any(True for _ in entries(txn, self._db.partitions, topic_id.bytes))

    def partitions(self) -> list[TopicIdPartition]:
        """Returns every user partition with metadata."""
        with self._env.begin() as txn:
            return [partition_of(key, decode_partition(value)[1]) for key, value in txn.cursor(db=self._db.partitions)]
