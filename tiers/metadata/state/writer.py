"""The only writer of the materialised state: it opens the state or builds it again, and replays records into it.

The records of one read and the next offset to read are one LMDB transaction. The writer clears the state, to read the
topic again from its start, in three cases: the file is torn; its identity or schema version differs; or a release wrote
it that reads other record types, and so may have ignored some. Its caller clears what it has of one metadata partition
that was last read to its end so long ago that compaction may have removed tombstones that the state never saw. Even
then the writer keeps how far the topic was read: a log that is shorter or has another history has lost records. Before
a state is replaced by that of another topic, the caller asks `saved_identity`.
"""

from __future__ import annotations

import fcntl
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO
from uuid import uuid4

import lmdb

from tiers.broker.client import monotonic_ms
from tiers.durable_folders import sync_folder
from tiers.errors import RemoteLogMetadataError
from tiers.metadata.records.serde import encode_record_types, known_record_types
from tiers.metadata.state.layout import (
    FINAL,
    FRESHNESS_FILE,
    I32,
    I64,
    LOCK_FILE,
    OFFSET_AND_EPOCH,
    READING,
    STATE_FILE,
    StateIdentity,
    decode_position,
    delete_prefix,
    open_env,
    partition_key,
)
from tiers.metadata.state.replay import PartitionRead, Replay
from tiers.metadata.state.state import RemoteLogMetadataState, StateFiles
from tiers.model.ids import RemoteLogSegmentId
from tiers.model.segment_metadata import RemoteLogSegmentState

logger = logging.getLogger(__name__)

_CLOCK_STEP_MS = 60_000
TOO_OLD = "they were not read to their ends for so long that the topic may have removed tombstones since"
DEFAULT_MAP_SIZE_BYTES = 16 << 30
"""The size of the address space, not of memory or disk: the file grows with its contents."""
_SEEN_KEPT = 100_000


class RemoteLogMetadataStateWriter(RemoteLogMetadataState):
    def __init__(self, files: StateFiles, lock: IO[bytes], clock_ms: Callable[[], int]) -> None:
        super().__init__(files)
        self._lock = lock
        self._clock_ms = clock_ms
        self._reading = super().reading()
        self._seen_at_ms: dict[RemoteLogSegmentId, int] = {}
        """When this process saw segments become COPY_SEGMENT_FINISHED."""
        self._opened_at_ms = clock_ms()
        """When the state was opened, or a forgotten segment was seen, if that is later.

        Every finished segment without an entry counts as seen then."""

    @classmethod
    def open(
        cls,
        folder: Path,
        identity: StateIdentity,
        *,
        clock_ms: Callable[[], int] = monotonic_ms,
        is_kept: bool = False,
        map_size_bytes: int = DEFAULT_MAP_SIZE_BYTES,
    ) -> RemoteLogMetadataStateWriter:
        """Opens the state, and clears it when it must be read again.

        There is one writer per folder. `is_kept`: the records of this identity cannot be read again, so they are kept.
        Raises `RemoteLogMetadataError` when another process writes the state, or when it cannot be written."""
        folder.mkdir(parents=True, exist_ok=True)
        lock = _lock(folder)
        try:
            writer = cls(_open_files(folder, map_size_bytes), lock, clock_ms)
            with writer._env.begin() as txn:
                saved = txn.get(b"identity", db=writer._db.meta)
            reason = writer._reason_to_start_over(saved, identity, is_kept)
            if reason is not None:
                writer.start_over(reason, is_same_topic=saved is not None and identity.is_topic_of(saved))
            with writer._env.begin(write=True) as txn:
                txn.put(b"identity", identity.encode(), db=writer._db.meta)
                if not txn.stat(writer._db.consumed)["entries"]:
                    txn.put(b"record_types", encode_record_types(known_record_types()), db=writer._db.meta)
        except lmdb.Error as error:
            lock.close()
            raise RemoteLogMetadataError(f"the state in {folder} cannot be written: {error}") from error
        except BaseException:
            lock.close()
            raise
        return writer

    def _reason_to_start_over(self, saved: bytes | None, identity: StateIdentity, is_kept: bool) -> str | None:
        with self._env.begin() as txn:
            record_types = txn.get(b"record_types", db=self._db.meta)
            kept = self._db.consumed, self._db.reached, self._db.diverged
            is_empty = not any(txn.stat(database)["entries"] for database in kept)
        if is_empty:
            return None
        known = None if saved is None else StateIdentity.decode(saved)
        if known is None:
            return "another schema version wrote it"
        if known != identity:
            return "it is of another cluster, metadata topic or partition count"
        # A state whose records cannot be read again is kept unchanged.
        if is_kept or self.diverged() or record_types == encode_record_types(known_record_types()):
            return None
        return "a release that reads other record types kept it"

    def close(self) -> None:
        super().close()
        self._lock.close()

    def writer_name(self, host: str) -> str:
        """Returns the folder's writer name. It survives restarts, but not another host: a folder may be copied."""
        with self._env.begin(write=True) as txn:
            raw = txn.get(b"writer", db=self._db.meta)
            name = "" if raw is None else str(raw, "utf-8")
            if not name.startswith(f"{host}/"):
                name = f"{host}/{uuid4().hex}"
                txn.put(b"writer", name.encode(), db=self._db.meta)
        return name

    def reading(self) -> int:
        return self._reading

    def mark_fresh(self, fresh_at_ms: dict[int, int]) -> None:
        """Records the monotonic times, by metadata partition, at which the reads reached the high watermark."""
        with self._freshness.begin(write=True) as txn:
            for metadata_partition, at_ms in fresh_at_ms.items():
                txn.put(I32.pack(metadata_partition), I64.pack(at_ms))

    def mark_final(self, is_final: bool) -> None:
        """Records whether the topic is gone. The next opening of the state forgets it."""
        with self._freshness.begin(write=True) as txn:
            if is_final:
                txn.put(FINAL, b"")
            else:
                txn.delete(FINAL)

    def mark_read_to_end(self, read_at_ms: Mapping[int, int]) -> None:
        """Records the times (wall clock), by metadata partition, as of which they were read to their ends."""
        for env in (self._env, self._freshness):
            env.reader_check()  # a worker that died within a read would keep pages from being reused forever
        with self._env.begin(write=True) as txn:
            for number, at_ms in read_at_ms.items():
                txn.put(I32.pack(number), I64.pack(at_ms), db=self._db.read_at)

    def mark_diverged(self, metadata_partition: int, reason: str) -> None:
        """Keeps the divergence of a metadata partition for as long as this state exists."""
        with self._env.begin(write=True) as txn:
            txn.put(I32.pack(metadata_partition), reason.encode(), db=self._db.diverged)

    def start_over(self, reason: str, *, is_same_topic: bool = True) -> None:
        """Forgets all records that were read, and before them their freshness.

        Otherwise a process that shares the state might take the empty state for fresh. When `is_same_topic`, the state
        keeps the reached positions and the divergences."""
        logger.warning(
            "the saved remote log metadata is cleared and read again from the topic", extra={"reason": reason}
        )
        with self._freshness.begin(write=True) as txn:
            txn.drop(self._freshness.open_db(None, txn), delete=False)
            self._reading = _begin_reading(txn)
        with self._env.begin(write=True) as txn:
            if is_same_topic:
                for number, _ in list(txn.cursor(db=self._db.consumed)):
                    self._keep_reached(txn, number)
            else:
                txn.drop(self._db.reached, delete=False)
                txn.drop(self._db.diverged, delete=False)
            for database in (*self._db.of_partitions, self._db.consumed, self._db.read_at):
                txn.drop(database, delete=False)

    def _keep_reached(self, txn: lmdb.Transaction, number: bytes) -> None:
        read = [txn.get(number, db=database) for database in (self._db.consumed, self._db.reached)]
        reached = max((decode_position(raw) for raw in read if raw is not None), default=None)
        if reached is not None:
            txn.put(number, OFFSET_AND_EPOCH.pack(*reached), db=self._db.reached)

    def start_over_partitions(self, numbers: Collection[int], reason: str, now_ms: int) -> None:
        """Forgets the records that were read from these metadata partitions, and before them their freshness.

        `now_ms` (wall clock) is before the first read of the partitions from their start. The state keeps the reached
        positions, and everything of the other metadata partitions."""
        logger.warning(
            "the saved remote log metadata of some metadata partitions is cleared and read again from the topic",
            extra={"reason": reason, "metadata_partitions": sorted(numbers)},
        )
        with self._freshness.begin(write=True) as txn:
            for number in numbers:
                txn.delete(I32.pack(number))
            self._reading = _begin_reading(txn)
        cleared = frozenset(I32.pack(number) for number in numbers)
        with self._env.begin(write=True) as txn:
            for key in cleared:
                self._keep_reached(txn, key)
                txn.delete(key, db=self._db.consumed)
                txn.put(key, I64.pack(now_ms), db=self._db.read_at)
            keys = [bytes(key) for key, home in txn.cursor(db=self._db.homes) if bytes(home) in cleared]
            for database in self._db.of_partitions:
                for key in keys:
                    delete_prefix(txn, database, key)

    def apply(self, reads: Iterable[PartitionRead]) -> list[RemoteLogSegmentId]:
        """Replays `reads` in one transaction. Returns the segments that became readable.

        They count as seen before the commit. Otherwise a caller between the two steps would find a finished segment
        that was not seen just now, and would take it for one that was seen long ago."""
        finished: list[RemoteLogSegmentId] = []
        with self._env.begin(write=True) as txn:
            replay = Replay(self._db, txn, finished)
            for read in reads:
                number = I32.pack(read.metadata_partition)
                for event in read.events:
                    replay.apply(event)
                for key in {partition_key(event.key.topic_id_partition) for event in read.events}:
                    txn.put(key, number, db=self._db.homes)
                raw, leader_epoch = txn.get(number, db=self._db.consumed), read.leader_epoch
                if raw is not None and leader_epoch < 0:
                    leader_epoch = OFFSET_AND_EPOCH.unpack(raw)[1]
                txn.put(number, OFFSET_AND_EPOCH.pack(read.next_offset, leader_epoch), db=self._db.consumed)
            self._see(finished)
        return finished

    def _see(self, finished: Sequence[RemoteLogSegmentId]) -> None:
        now_ms = self._clock_ms()
        for segment_id in finished:
            self._seen_at_ms.setdefault(segment_id, now_ms)
        # A process that reads a whole topic forgets segments within a second, also one that has just become readable.
        while len(self._seen_at_ms) > _SEEN_KEPT:
            forgotten_ms = self._seen_at_ms.pop(next(iter(self._seen_at_ms)))
            self._opened_at_ms = max(self._opened_at_ms, forgotten_ms)

    def seen_at_ms(self, segment_id: RemoteLogSegmentId) -> int | None:
        metadata = self.remote_log_segment_metadata_by_id(segment_id)
        if metadata is None or metadata.state < RemoteLogSegmentState.COPY_SEGMENT_FINISHED:
            return None
        return self._seen_at_ms.get(segment_id, self._opened_at_ms)


def age_since(at_ms: int | None, now_ms: int) -> int | None:
    """Returns the time (wall clock) that has passed since `at_ms`; None: it is unknown.

    A time in the future means that the clock was set back since."""
    return None if at_ms is None or now_ms < at_ms - _CLOCK_STEP_MS else now_ms - at_ms


def is_too_old(age_ms: int | None, max_age_ms: int) -> bool:
    """Returns whether tombstones may be gone that were written since the last read to the end, `age_ms` ago.

    `max_age_ms` is half of the topic's `delete.retention.ms`."""
    return age_ms is None or age_ms > max_age_ms


def saved_identity(folder: Path) -> StateIdentity | None:
    """Returns the identity of the state that is saved in `folder`.

    None: the state has no segment that could be forgotten, or it cannot be read."""
    path = folder / STATE_FILE
    if not path.exists():
        return None
    try:
        env = open_env(path)
    except lmdb.Error:
        return None
    try:
        _check_whole(env, path)
        meta, starts = (env.open_db(name, create=False) for name in (b"meta", b"starts"))
        with env.begin() as txn:
            raw = txn.get(b"identity", db=meta)
            return None if raw is None or not txn.stat(starts)["entries"] else StateIdentity.decode(raw)
    except lmdb.Error:
        return None
    finally:
        env.close()


def forget_freshness(folder: Path) -> None:
    """Removes the freshness, before any process shares the state.

    The monotonic times of an earlier boot, or old ones, must have no meaning. Raises `RemoteLogMetadataError` when
    another process keeps the state."""
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder):
        _remove(folder / FRESHNESS_FILE)


def _begin_reading(txn: lmdb.Transaction) -> int:
    reading = time.monotonic_ns()
    txn.put(READING, I64.pack(reading))
    return reading


def _open_files(folder: Path, map_size_bytes: int) -> StateFiles:
    # Freshness has no meaning for the next process, so it is never synced and never kept. It is dropped first.
    # Otherwise, while the state is built again, a process that shares it might take an incomplete state for fresh.
    freshness = open_env(folder / FRESHNESS_FILE, 1 << 20, is_synced=False)
    with freshness.begin(write=True) as txn:
        txn.drop(freshness.open_db(None, txn), delete=False)
        _begin_reading(txn)
    path = folder / STATE_FILE
    env: lmdb.Environment | None = None
    try:
        env = open_env(path, map_size_bytes)
        _check_whole(env, path)
        return StateFiles.open(env, freshness)
    except (lmdb.DiskError, lmdb.MapFullError, lmdb.MemoryError):
        # The file is whole, but the disk, the map or the memory is full.
        if env is not None:
            env.close()
        raise
    except lmdb.Error as error:
        logger.warning("the saved remote log metadata is torn", extra={"error": str(error)})
        if env is not None:
            env.close()
        _remove(path)
        return StateFiles.open(open_env(path, map_size_bytes), freshness)


def _check_whole(env: lmdb.Environment, path: Path) -> None:
    """Checks the size of the file. LMDB trusts its meta page, and a missing page would crash a reader with SIGBUS."""
    needed_bytes = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    size_bytes = path.stat().st_size
    if size_bytes < needed_bytes:
        raise lmdb.CorruptedError(f"the file has {size_bytes} of {needed_bytes} bytes")


def _lock(folder: Path) -> IO[bytes]:
    lock = (folder / LOCK_FILE).open("ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise RemoteLogMetadataError(f"another process writes the state in {folder}: stop it first") from error
    return lock


def is_written(folder: Path) -> bool:
    """Returns whether a process writes the state in the folder now."""
    try:
        with (folder / LOCK_FILE).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _remove(path: Path) -> None:
    for name in (path, Path(f"{path}-lock")):
        name.unlink(missing_ok=True)
    sync_folder(path.parent)
