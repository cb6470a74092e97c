"""The one writer of the materialised state: replays what was read from the metadata topic.

Replay (semantics 11.2, DESIGN "RLMM") takes every forward jump, for compaction removes what lay between; it drops a
move backward, an update of a segment that was never added, and what it has seen already. The records of one read and
the offset to go on from are one LMDB transaction. What a record's time is, is decided by the topic: LogAppendTime.

The file is thrown away, and read again from the topic, when it is torn, when its identity or schema version is another
one, or when it was last read to the end so long ago that tombstones may have been compacted away unseen.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO
from uuid import uuid4

import lmdb

from tiers.errors import RemoteLogMetadataError
from tiers.metadata.serde import (
    LOG_START_OFFSET_API_KEY,
    PARTITION_DELETE_API_KEY,
    SEGMENT_METADATA_API_KEY,
    SEGMENT_METADATA_UPDATE_API_KEY,
    MetadataRecord,
    RecordKey,
    encode_value,
)
from tiers.metadata.state import MAX_READERS, RemoteLogMetadataState, leader_epoch_ends
from tiers.metadata.state_layout import (
    DATABASES,
    END_AND_ORDER,
    FRESHNESS_FILE,
    I32,
    I64,
    LOCK_FILE,
    NOT_READABLE,
    PARTITION_KEY_BYTES,
    STATE_FILE,
    U64,
    StateIdentity,
    decode_partition,
    decode_segment,
    encode_partition,
    partition_key,
    start_key,
)
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.segment_metadata import (
    LogStartOffsetUpdate,
    RemoteLogSegmentMetadata,
    RemoteLogSegmentMetadataUpdate,
    RemotePartitionDeleteMetadata,
)
from tiers.model.segment_state import RemoteLogSegmentState, RemotePartitionDeleteState, is_forward

log = logging.getLogger(__name__)

DEFAULT_MAP_SIZE_BYTES = 16 << 30
"""Address space, not memory and not disk: the file grows with what it holds."""


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


class RemoteLogMetadataStateWriter(RemoteLogMetadataState):
    def __init__(self, env: lmdb.Environment, freshness: lmdb.Environment, lock: IO[bytes]) -> None:
        super().__init__(env, freshness)
        self._lock = lock

    @classmethod
    def open(
        cls,
        folder: Path,
        identity: StateIdentity,
        *,
        wall_clock_ms: Callable[[], int],
        max_age_ms: int | None = None,
        map_size_bytes: int = DEFAULT_MAP_SIZE_BYTES,
    ) -> RemoteLogMetadataStateWriter:
        """One writer per folder, else an error. A state last read to the end `max_age_ms` ago is too old."""
        folder.mkdir(parents=True, exist_ok=True)
        lock = _lock(folder)
        try:
            writer = cls._open_files(folder, lock, map_size_bytes)
            reason = writer._reason_to_start_over(identity, wall_clock_ms, max_age_ms)
            if reason is not None:
                writer.start_over(reason)
        except BaseException:
            lock.close()
            raise
        with writer._env.begin(write=True) as txn:
            txn.put(b"identity", identity.encode(), db=writer._db.meta)
        with writer._freshness.begin(write=True) as txn:
            txn.drop(writer._freshness.open_db(None, txn), delete=False)
        return writer

    @classmethod
    def _open_files(cls, folder: Path, lock: IO[bytes], map_size_bytes: int) -> RemoteLogMetadataStateWriter:
        # Freshness means nothing to the next process: it is never synced, and never kept.
        freshness = _open_env(folder / FRESHNESS_FILE, 1 << 20, sync=False)
        path = folder / STATE_FILE
        env: lmdb.Environment | None = None
        try:
            env = _open_env(path, map_size_bytes, sync=True)
            _check_whole(env, path)
            return cls(env, freshness, lock)
        except lmdb.Error as error:
            log.warning("the saved remote log metadata is torn", extra={"error": str(error)})
            if env is not None:
                env.close()
            _remove(path)
            return cls(_open_env(path, map_size_bytes, sync=True), freshness, lock)

    def _reason_to_start_over(
        self, identity: StateIdentity, wall_clock_ms: Callable[[], int], max_age_ms: int | None
    ) -> str | None:
        with self._env.begin() as txn:
            raw = txn.get(b"identity", db=self._db.meta)
            read_at = txn.get(b"read_to_end_at_ms", db=self._db.meta)
            is_empty = txn.stat(self._db.consumed)["entries"] == 0
        if is_empty:
            return None
        if raw is None or StateIdentity.decode(raw) is None:
            return "another schema version wrote it"
        if StateIdentity.decode(raw) != identity:
            return "it is of another cluster, metadata topic or partition count"
        if max_age_ms is not None and (read_at is None or wall_clock_ms() - I64.unpack(read_at)[0] > max_age_ms):
            return "it is older than the topic keeps tombstones for certain"
        return None

    def _clear(self) -> None:
        with self._env.begin(write=True) as txn:
            identity = txn.get(b"identity", db=self._db.meta)
            for name in DATABASES:
                txn.drop(getattr(self._db, name), delete=False)
            if identity is not None:
                txn.put(b"identity", identity, db=self._db.meta)

    def close(self) -> None:
        super().close()
        self._lock.close()

    def writer_name(self, host: str) -> str:
        """A name that this folder keeps over restarts, but not on another host: a folder may be copied."""
        with self._env.begin(write=True) as txn:
            raw = txn.get(b"writer", db=self._db.meta)
            name = "" if raw is None else str(raw, "utf-8")
            if not name.startswith(f"{host}/"):
                name = f"{host}/{uuid4().hex}"
                txn.put(b"writer", name.encode(), db=self._db.meta)
        return name

    def mark_fresh(self, fresh_at_ms: dict[int, int]) -> None:
        """Monotonic times, per metadata partition, at which what was read reached the high watermark."""
        with self._freshness.begin(write=True) as txn:
            for metadata_partition, at_ms in fresh_at_ms.items():
                txn.put(I32.pack(metadata_partition), I64.pack(at_ms))

    def mark_read_to_end(self, wall_clock_ms: int) -> None:
        """All metadata partitions were read to their ends at that time."""
        with self._env.begin(write=True) as txn:
            txn.put(b"read_to_end_at_ms", I64.pack(wall_clock_ms), db=self._db.meta)

    def start_over(self, reason: str) -> None:
        """Forgets everything that was read."""
        log.warning("the saved remote log metadata is read again from the topic", extra={"reason": reason})
        self._clear()

    def apply(self, reads: Iterable[PartitionRead]) -> list[RemoteLogSegmentId]:
        """Replays `reads` in one transaction; returns the segments that they made readable."""
        finished: list[RemoteLogSegmentId] = []
        with self._env.begin(write=True) as txn:
            replay = _Replay(self, txn, finished)
            for read in reads:
                for event in read.events:
                    replay.apply(event)
                txn.put(I32.pack(read.metadata_partition), I64.pack(read.next_offset), db=self._db.consumed)
        return finished


class _Replay:
    """One write transaction."""

    def __init__(
        self, state: RemoteLogMetadataStateWriter, txn: lmdb.Transaction, finished: list[RemoteLogSegmentId]
    ) -> None:
        self._state = state
        self._db = state._db
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
        self._txn.put(key + uuid, encode_value(metadata), db=self._db.segments)
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
        known = decode_segment(bytes(raw))
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
        for epoch, end_offset in leader_epoch_ends(metadata):
            epoch_key = key + I32.pack(epoch)
            raw = self._txn.get(epoch_key, db=self._db.epochs)
            if raw is None or I64.unpack(raw)[0] < end_offset:
                self._txn.put(epoch_key, I64.pack(end_offset), db=self._db.epochs)

    def _remove(self, key: bytes, metadata: RemoteLogSegmentMetadata) -> None:
        uuid = metadata.segment_id.id.bytes
        self._txn.delete(key + uuid, db=self._db.segments)
        self._txn.delete(start_key(key, metadata.start_offset, uuid), db=self._db.starts)
        if metadata.state is RemoteLogSegmentState.COPY_SEGMENT_FINISHED:
            self._cover_again(key, metadata.start_offset, metadata.end_offset)
        self._forget_if_empty(key)

    def _forget_if_empty(self, key: bytes) -> None:
        for database in (self._db.starts, self._db.log_starts):
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

    def _bury(self, named: RecordKey) -> None:
        key = partition_key(named.topic_id_partition)
        if named.api_key in (SEGMENT_METADATA_API_KEY, SEGMENT_METADATA_UPDATE_API_KEY):
            raw = self._txn.get(key + named.name, db=self._db.segments)
            if raw is not None:
                self._remove(key, decode_segment(bytes(raw)))
        elif named.api_key == PARTITION_DELETE_API_KEY:
            self._delete_partition(named.topic_id_partition, RemotePartitionDeleteState.DELETE_PARTITION_FINISHED)
        elif named.api_key == LOG_START_OFFSET_API_KEY and self._txn.delete(key + named.name, db=self._db.log_starts):
            self._forget_if_empty(key)

    def _cover_again(self, key: bytes, first: int, last: int) -> None:
        """Decides anew which readable segment answers for the offsets in [first, last]."""
        self._cut(key, first, last)
        holes = [(first, last)]
        for run in sorted(self._state.overlapping(self._txn, key, first, last), reverse=True):
            if run.order == NOT_READABLE:
                break
            uncovered = []
            for hole_first, hole_last in holes:
                run_first, run_last = max(hole_first, run.start_offset), min(hole_last, run.end_offset)
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


def _open_env(path: Path, map_size_bytes: int, *, sync: bool) -> lmdb.Environment:
    return lmdb.open(
        str(path),
        subdir=False,
        map_size=map_size_bytes,
        max_dbs=16,
        max_readers=MAX_READERS,
        sync=sync,
        metasync=sync,
        mode=0o600,
    )


def _check_whole(env: lmdb.Environment, path: Path) -> None:
    """LMDB believes its meta page; a page that the file lost would be a bus error in whoever reads it."""
    needed_bytes = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    size_bytes = path.stat().st_size
    if size_bytes < needed_bytes:
        raise lmdb.CorruptedError(f"{size_bytes} bytes of {needed_bytes}")


def _lock(folder: Path) -> IO[bytes]:
    lock = (folder / LOCK_FILE).open("ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise RemoteLogMetadataError(f"another process writes the state in {folder}") from error
    return lock


def _remove(path: Path) -> None:
    for name in (path, Path(f"{path}-lock")):
        name.unlink(missing_ok=True)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
