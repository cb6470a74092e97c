"""An example of a third-party metadata manager: SQLite, for a single proxy on one machine.

After `pip install` of this package, these settings at the top of the file select it:

    remote.log.metadata.manager.class.name = "sqlite"
    remote.log.metadata.path = "/var/lib/tidegate/metadata.sqlite"

The cluster then needs no metadata topic. In exchange, the file is the only copy of the metadata: back it up with
`sqlite3 FILE ".backup COPY"`. The proxy must be the only one of its Kafka cluster. Commands and
jobs that read the metadata topic refuse to run.

Guarantees, and how this module keeps them:

* One proxy at a time: the proxy holds an exclusive flock on `FILE.lock` while it runs. The kernel releases the lock
  when the process ends, also after SIGKILL. A second proxy ends with an error that names the holder. The folder must be
  on a local disk, because flock on a network file system may not exclude other machines.
* Fencing: each opening writes a new epoch, and each append checks in its transaction that this epoch is still the last.
  So even if somebody removes the lock file, an earlier proxy can append nothing after a later one has opened the file.
* Durability: the journal is a write-ahead log with synchronous=FULL. A commit returns after an fsync.
* Order: offsets come from AUTOINCREMENT, so SQLite never uses one twice.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from uuid import UUID, uuid4

from tiers.errors import OwnershipLostError, RemoteLogMetadataError
from tiers.metadata.record_log import LoggedRecord, RecordLogIdentity
from tiers.metadata.records.serde import KeyAndValue
from tiers.storage.settings import read_settings

_SCHEMA = """
CREATE TABLE identity (log_id BLOB NOT NULL, cluster_id TEXT NOT NULL);
CREATE TABLE epochs (epoch INTEGER PRIMARY KEY, first_offset INTEGER NOT NULL);
CREATE TABLE records (
    offset INTEGER PRIMARY KEY AUTOINCREMENT, timestamp_ms INTEGER NOT NULL, key BLOB NOT NULL UNIQUE, value BLOB
);
CREATE INDEX tombstones ON records (timestamp_ms) WHERE value IS NULL;
"""


class _EmptyFileError(Exception):
    """The process that created the file ended before it wrote anything."""


class SqliteRecordLog:
    """Implements `MetadataRecordLog` over one file. The entry point names this class."""

    def __init__(self, path: Path, clock_s: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock_s = clock_s
        self._lock: IO[bytes] | None = None
        self._connection: sqlite3.Connection | None = None
        self._files: dict[Path, tuple[int, int]] = {}
        self._epoch = -1

    @classmethod
    def create(cls, settings: Mapping[str, str]) -> SqliteRecordLog:
        return cls(Path(read_settings("sqlite", settings, {"path": None}, kind="metadata manager")["path"]))

    @property
    def place(self) -> str:
        return f"the SQLite file {self._path}"

    @property
    def _lock_path(self) -> Path:
        return self._path.with_name(f"{self._path.name}.lock")

    def open(self, cluster_id: str, *, may_create: bool) -> RecordLogIdentity | None:
        if not self._path.exists() and not may_create:
            return None
        try:
            self._take_lock()
            is_new = not self._path.exists()
            # Any thread may use the connection: `SingleWriterLog` uses one thread at a time.
            self._connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = FULL")
            with self._transaction() as connection:
                is_empty = not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'identity'").fetchone()
                if is_empty and may_create:
                    self._create(connection, cluster_id)
                elif is_empty:
                    raise _EmptyFileError
                log_id, known_cluster_id = connection.execute("SELECT log_id, cluster_id FROM identity").fetchone()
                self._begin_epoch(connection)
            if is_new:
                _sync_folder(self._path.parent)
            self._files = {path: _file_id(path) for path in (self._path, self._lock_path)}
        except _EmptyFileError:
            self.close()
            return None
        except (OSError, sqlite3.Error) as error:
            self.close()
            raise RemoteLogMetadataError(f"{self.place} cannot be opened: {error}") from error
        except BaseException:
            self.close()
            raise
        return RecordLogIdentity(UUID(bytes=log_id), known_cluster_id)

    def _take_lock(self) -> None:
        self._lock = self._lock_path.open("a+b")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.seek(0)
            holder = self._lock.read().decode(errors="replace").strip() or "unknown"
            raise RemoteLogMetadataError(
                f"{self.place} is held by another proxy (process {holder}): this metadata manager is for a single"
                " proxy. Stop the other proxy first"
            ) from error
        self._lock.truncate(0)
        self._lock.write(str(os.getpid()).encode())
        self._lock.flush()

    def _create(self, connection: sqlite3.Connection, cluster_id: str) -> None:
        for statement in _SCHEMA.strip().split(";\n"):
            connection.execute(statement)
        connection.execute("INSERT INTO identity VALUES (?, ?)", (uuid4().bytes, cluster_id))

    def _begin_epoch(self, connection: sqlite3.Connection) -> None:
        """Begins an epoch that no copy of this file has used, since it is not before the present second."""
        (last,) = connection.execute("SELECT COALESCE(MAX(epoch), 0) FROM epochs").fetchone()
        self._epoch = max(last + 1, int(self._clock_s()))
        # Epochs without a record say nothing.
        next_offset = _next_offset(connection)
        connection.execute("DELETE FROM epochs WHERE first_offset >= ?", (next_offset,))
        connection.execute("INSERT INTO epochs VALUES (?, ?)", (self._epoch, next_offset))

    def is_held(self) -> bool:
        """Returns whether the lock and the file in the folder are still those that were opened."""
        try:
            return self._connection is not None and all(_file_id(path) == known for path, known in self._files.items())
        except OSError:
            return False

    def append(self, records: Sequence[KeyAndValue], timestamp_ms: int) -> None:
        with self._errors(), self._transaction() as connection:
            (last,) = connection.execute("SELECT MAX(epoch) FROM epochs").fetchone()
            if last != self._epoch or not self.is_held():
                raise OwnershipLostError(f"another proxy has opened {self.place}: stop one of them")
            for key, value in records:
                # REPLACE removes the earlier record with this key: nothing needs it after this one.
                connection.execute(
                    "INSERT OR REPLACE INTO records (timestamp_ms, key, value) VALUES (?, ?, ?)",
                    (timestamp_ms, key, value),
                )

    def read(self, offset: int, max_records: int) -> list[LoggedRecord]:
        with self._errors() as connection:
            rows = connection.execute(
                "SELECT offset, timestamp_ms, key, value FROM records WHERE offset >= ? ORDER BY offset LIMIT ?",
                (offset, max_records),
            )
            return [LoggedRecord(*row) for row in rows]

    def next_offset(self) -> int:
        with self._errors() as connection:
            return _next_offset(connection)

    def epoch_before(self, next_offset: int) -> int:
        with self._errors() as connection:
            (epoch,) = connection.execute(
                "SELECT COALESCE(MAX(epoch), -1) FROM epochs WHERE first_offset < ?", (next_offset,)
            ).fetchone()
        return int(epoch)

    def drop_tombstones(self, before_ms: int) -> None:
        with self._errors(), self._transaction() as connection:
            connection.execute("DELETE FROM records WHERE value IS NULL AND timestamp_ms < ?", (before_ms,))

    def close(self) -> None:
        connection, self._connection = self._connection, None
        lock, self._lock = self._lock, None
        try:
            if connection is not None:
                connection.close()
        finally:
            # The lock goes last, so that the next proxy finds a closed file.
            if lock is not None:
                lock.close()

    @contextmanager
    def _errors(self) -> Iterator[sqlite3.Connection]:
        if self._connection is None:
            raise RemoteLogMetadataError(f"{self.place} is not open")
        try:
            yield self._connection
        except sqlite3.Error as error:
            raise RemoteLogMetadataError(f"{self.place}: {error}") from error

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Begins a transaction that no other connection can write beside, and commits it unless there is an error."""
        assert self._connection is not None
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield self._connection
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise


def _next_offset(connection: sqlite3.Connection) -> int:
    row = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'records'").fetchone()
    return 1 if row is None else int(row[0]) + 1


def _file_id(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
