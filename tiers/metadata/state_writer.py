"""The one writer of the materialised state: opens it, or decides that it must be built anew, and replays into it.

The records of one read and the offset to go on from are one LMDB transaction. The file is thrown away, and read again
from the topic, when it is torn, when its identity or schema version is another one, or when it was last read to the end
so long ago that tombstones may have been compacted away unseen. How far the topic was read is kept even then: a log
that is shorter has lost records. Whether a state may go for another topic's, its caller asks before (`saved_identity`).
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO
from uuid import uuid4

import lmdb

from tiers.errors import RemoteLogMetadataError
from tiers.metadata.state import MAX_READERS, RemoteLogMetadataState
from tiers.metadata.state_layout import (
    DATABASES,
    FINAL,
    FRESHNESS_FILE,
    I32,
    I64,
    LOCK_FILE,
    STATE_FILE,
    StateIdentity,
)
from tiers.metadata.state_replay import PartitionRead, Replay
from tiers.model.ids import RemoteLogSegmentId

log = logging.getLogger(__name__)

_CLOCK_STEP_MS = 60_000
DEFAULT_MAP_SIZE_BYTES = 16 << 30
"""Address space, not memory and not disk: the file grows with what it holds."""


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
                saved = writer.identity()
                writer.start_over(reason, is_same_topic=saved is not None and saved.topic_id == identity.topic_id)
            with writer._env.begin(write=True) as txn:
                txn.put(b"identity", identity.encode(), db=writer._db.meta)
        except lmdb.Error as error:
            lock.close()
            raise RemoteLogMetadataError(f"the state in {folder} cannot be written: {error}") from error
        except BaseException:
            lock.close()
            raise
        return writer

    @classmethod
    def _open_files(cls, folder: Path, lock: IO[bytes], map_size_bytes: int) -> RemoteLogMetadataStateWriter:
        # Freshness means nothing to the next process: it is never synced, and never kept. It goes first: nobody who
        # shares the state may take what is left of it, when it must be built anew, for all there is.
        freshness = _open_env(folder / FRESHNESS_FILE, 1 << 20, sync=False)
        with freshness.begin(write=True) as txn:
            txn.drop(freshness.open_db(None, txn), delete=False)
        path = folder / STATE_FILE
        env: lmdb.Environment | None = None
        try:
            env = _open_env(path, map_size_bytes, sync=True)
            _check_whole(env, path)
            return cls(env, freshness, lock)
        except (lmdb.DiskError, lmdb.MapFullError, lmdb.MemoryError):
            # The file is whole; what it lacks is room.
            if env is not None:
                env.close()
            raise
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
        if max_age_ms is None:
            return None
        age_ms = None if read_at is None else wall_clock_ms() - I64.unpack(read_at)[0]
        # What was read in the future was read on a clock that was set back since: nobody knows when.
        if age_ms is None or not -_CLOCK_STEP_MS <= age_ms <= max_age_ms:
            return "it is older than the topic keeps tombstones for certain"
        return None

    def _clear(self, is_same_topic: bool) -> None:
        """All but whose this is, how far that was read, and the name that others know this folder's keeper by."""
        reached: dict[bytes, int] = {}
        with self._env.begin(write=True) as txn:
            for offsets in (self._db.consumed, self._db.reached) if is_same_topic else ():
                for number, raw in txn.cursor(db=offsets):
                    reached[bytes(number)] = max(int(I64.unpack(raw)[0]), reached.get(bytes(number), 0))
            kept = {name: txn.get(name, db=self._db.meta) for name in (b"identity", b"writer")}
            for database in DATABASES:
                txn.drop(getattr(self._db, database), delete=False)
            for name, value in kept.items():
                if value is not None:
                    txn.put(name, value, db=self._db.meta)
            for number, offset in reached.items():
                txn.put(number, I64.pack(offset), db=self._db.reached)

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

    def mark_final(self, is_final: bool) -> None:
        """Whether the topic is gone; forgotten when the state is opened again."""
        with self._freshness.begin(write=True) as txn:
            if is_final:
                txn.put(FINAL, b"")
            else:
                txn.delete(FINAL)

    def mark_read_to_end(self, wall_clock_ms: int) -> None:
        """All metadata partitions were read to their ends at that time."""
        for env in (self._env, self._freshness):
            env.reader_check()  # a worker that died while it read would keep pages from being used again, for ever
        with self._env.begin(write=True) as txn:
            txn.put(b"read_to_end_at_ms", I64.pack(wall_clock_ms), db=self._db.meta)

    def start_over(self, reason: str, *, is_same_topic: bool = True) -> None:
        """Forgets everything that was read; first that it was fresh: who shares the state would believe the void."""
        log.warning("the saved remote log metadata is read again from the topic", extra={"reason": reason})
        with self._freshness.begin(write=True) as txn:
            txn.drop(self._freshness.open_db(None, txn), delete=False)
        self._clear(is_same_topic)

    def apply(self, reads: Iterable[PartitionRead]) -> list[RemoteLogSegmentId]:
        """Replays `reads` in one transaction; returns the segments that they made readable."""
        finished: list[RemoteLogSegmentId] = []
        with self._env.begin(write=True) as txn:
            replay = Replay(self, self._db, txn, finished)
            for read in reads:
                for event in read.events:
                    replay.apply(event)
                txn.put(I32.pack(read.metadata_partition), I64.pack(read.next_offset), db=self._db.consumed)
        return finished


def saved_identity(folder: Path) -> StateIdentity | None:
    """Whose state is saved here; None when no segment would be forgotten with it, or nothing can be read."""
    path = folder / STATE_FILE
    if not path.exists():
        return None
    try:
        env = lmdb.open(str(path), subdir=False, readonly=True, create=False, max_dbs=16, max_readers=MAX_READERS)
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
    """Before anybody shares the state: monotonic times of an earlier boot, or of long ago, must mean nothing.

    `RemoteLogMetadataError` when another process keeps the state."""
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder):
        _remove(folder / FRESHNESS_FILE)


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
