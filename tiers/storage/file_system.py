"""`FileSystemRemoteStorageManager`: a `RemoteStorageManager` on a `BlockingFileSystem`: a folder, HDFS or `pyarrow.fs`.

Its operations are methods of `_Objects`. `ThreadCalls` runs them in threads of this process. `ChildCalls`
(`child_calls.py`) lets a child process do that.

* An object appears whole or not at all. If a file becomes visible only when it is closed (object stores), the manager
  writes a new object in place. Otherwise the manager writes it to `.tmp/<segment uuid>.<random>` and then moves it. So
  a delete finds the files that a crash left without searching the partition's folder.
* An object that is replaced stays until the whole new one takes its place. Object stores too would show or delete a
  part of the new one after a failed write, and Azure empties an object when its writer opens. So the manager always
  writes a replacement to a temporary file, and then moves it.
* All calls of the library block, so they run in `BlockingCalls` with a deadline. Between pieces of 1 MiB, a copy notes
  its progress, and checks whether it was abandoned. In that case it removes what it has written.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from tiers.errors import (
    CredentialsRefusedError,
    RemoteResourceNotFoundError,
    RemoteStorageError,
    RetriableRemoteStorageError,
)
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.storage.activity import BlockingCalls, Call, CallsClosedError, note_progress
from tiers.storage.object_key import check_cluster_id, indexes_key, log_key
from tiers.storage.remote_storage_manager import (
    LogSegmentData,
    StoredObject,
    check_range,
)
from tiers.storage.settings import read_duration_ms, read_number

PIECE_BYTES = 1024 * 1024
TEMPORARY = ".tmp"
"""The folder of files that are not whole yet. Their names begin with the segment's uuid, or with `SMALL_OBJECT`."""
SMALL_OBJECT = "object"
_NOTED_EVERY = 100
_LANES = ("copy", "delete_attempt")
"""The operations that have threads of their own, so those that hang do not hold up the others."""
_Pieces = Callable[[], Iterator[bytes]]


class BlockingFileSystem(Protocol):
    """A file system whose calls block. Several threads call it concurrently.

    Paths are relative to the store's root. Missing parent folders are created. The methods raise the exceptions of
    their library; `error_of` maps them to storage errors.
    """

    name: str
    """The place of the store, for error messages."""
    shows_on_close: bool
    """Whether a new file becomes visible only when its writer closes it."""
    moves_once: bool
    """Whether one of several concurrent moves to one new name succeeds, and all others raise `FileExistsError`."""

    def connect(self) -> None:
        """Connects. The manager calls it once, before all other methods."""

    def size(self, path: str) -> int | None:
        """Returns the size of the file in bytes, which is then durable; None when there is no such file."""

    def write(self, path: str, size_bytes: int, pieces: Iterator[bytes]) -> None:
        """Writes a file durably and replaces an existing one. `pieces` have `size_bytes` bytes together.

        If `pieces` raises, a partial or whole file may remain."""

    def move(self, source: str, target: str, check: Callable[[], None], *, replace: bool) -> None:
        """Moves a file, which appears at `target` atomically. If `shows_on_close` is true, `replace` is true as well.

        Calls `check`, which may raise, right before the file appears. Raises `FileNotFoundError` when there is no
        `source`, and `FileExistsError` when `target` exists and `replace` is false.
        """

    def read(self, path: str, start: int, end: int | None) -> memoryview:
        """Returns the bytes `[start, end]`, clamped to the file; None reads to the end of the file."""

    def delete(self, path: str) -> None:
        """Deletes a file. A missing file is no error."""

    def walk(self, prefix: str) -> Iterator[StoredObject]:
        """Yields at least every file whose path begins with `prefix`, in any order, including temporary files."""

    def error_of(self, error: Exception) -> RemoteStorageError:
        """Returns the storage error for an exception of the library, which is not `FileNotFoundError`."""


DEFAULTS: Mapping[str, str | None] = {
    "cluster.id": None,
    "threads": "16",
    "timeout.ms": "30s",
}
"""The settings that all stores on a `BlockingFileSystem` have."""


class FileCalls(Protocol):
    """Runs the operations of `_Objects`."""

    cluster_id: str
    files: BlockingFileSystem
    """The file system, which another process may be connected to."""

    async def open(self) -> None:
        """Connects. Raises `RemoteStorageError`."""

    async def run(self, operation: str, *arguments: object) -> Any:
        """Runs the method of `_Objects` with these arguments.

        Raises `RemoteStorageError`, and `RuntimeError` if it is not open."""

    async def close(self) -> None: ...


class FileSystemRemoteStorageManager:
    """The common part of the stores whose library blocks. It is no entry point itself."""

    def __init__(self, calls: FileCalls) -> None:
        self.calls = calls

    async def open(self) -> None:
        await self.calls.open()

    async def copy_log_segment_data(self, metadata: RemoteLogSegmentMetadata, data: LogSegmentData) -> bytes | None:
        attempt = str(metadata.segment_id.id)
        await self.calls.run("copy", attempt, *self._paths(metadata), data.log_segment, data.indexes)
        return None

    async def fetch_log_segment(
        self, metadata: RemoteLogSegmentMetadata, start_position: int, end_position: int | None = None
    ) -> memoryview:
        check_range(start_position, end_position)
        return memoryview(await self.calls.run("read", self._paths(metadata)[0], start_position, end_position))

    async def fetch_indexes(self, metadata: RemoteLogSegmentMetadata) -> bytes:
        return await self.get_object(self._paths(metadata)[1])

    async def delete_log_segment_data(self, metadata: RemoteLogSegmentMetadata) -> bool:
        await self.calls.run("delete_attempt", str(metadata.segment_id.id), *self._paths(metadata))
        return True

    async def put_object(self, key: str, data: bytes) -> None:
        await self.calls.run("put", _checked(key), data)

    async def get_object(self, key: str) -> bytes:
        return bytes(await self.calls.run("read", _checked(key), 0, None))

    async def delete_object(self, key: str) -> None:
        await self.calls.run("delete", _checked(key))

    async def list_objects(self, prefix: str) -> AsyncIterator[StoredObject]:
        """Yields the objects in order. It holds the whole listing in memory, because the libraries promise no order."""
        for stored in await self.calls.run("listing", prefix):
            yield stored

    async def close(self) -> None:
        await self.calls.close()

    def _paths(self, metadata: RemoteLogSegmentMetadata) -> tuple[str, str]:
        return log_key(self.calls.cluster_id, metadata), indexes_key(self.calls.cluster_id, metadata)


class ThreadCalls:
    """Runs the operations in threads of this process. Copies, deletions and the others have threads of their own."""

    def __init__(self, files: BlockingFileSystem, values: Mapping[str, str]) -> None:
        """`values` has the settings of `DEFAULTS`. Raises `ValueError`."""
        self.files = files
        self.cluster_id = check_cluster_id(values["cluster.id"])
        self.timeout_s: float | None = read_duration_ms(values, "timeout.ms", 1) / 1000
        """None sets no deadlines, for a caller that enforces the same ones, and cancels."""
        self._threads = read_number(values, "threads", 1)
        self._objects = _Objects(files)
        self._pools: dict[str, BlockingCalls] = {}

    @property
    def abandoned(self) -> int:
        """The number of threads that hang in abandoned calls of the library."""
        return sum(pool.abandoned for pool in self._pools.values())

    async def open(self) -> None:
        if not self._pools:
            self._pools = {lane: BlockingCalls(self.files.name, self._threads) for lane in ("", *_LANES)}
        await self.run("connect")

    async def run(self, operation: str, *arguments: object) -> Any:
        if not self._pools:
            raise RuntimeError(f"{self.files.name} is not open")
        work = getattr(self._objects, operation)
        pool = self._pools[operation if operation in _LANES else ""]
        timeout_s = None if self.timeout_s is None else self.timeout_s * deadlines_of(operation)
        try:
            return await pool.run(lambda call: work(call, *arguments), timeout_s)
        except (RemoteStorageError, CallsClosedError):
            raise
        except TimeoutError as error:
            raise RetriableRemoteStorageError(f"{self.files.name}: no progress in {timeout_s} s") from error
        except FileNotFoundError as error:
            if operation in ("copy", "put"):
                raise RemoteStorageError(f"{self.files.name} does not exist: create it, or change `uri`") from error
            raise RemoteResourceNotFoundError(f"{self.files.name}: no such object: {error}") from error
        except Exception as error:
            raise self.files.error_of(error) from error

    async def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


def deadlines_of(operation: str) -> int:
    """Returns for how many deadlines an operation may make no progress: pyarrow lists a store as a whole."""
    return 20 if operation == "listing" else 1


class _Objects:
    """The operations of the store, which block. `call` may be abandoned by its caller. Paths are those of objects."""

    def __init__(self, files: BlockingFileSystem) -> None:
        self._files = files

    def connect(self, call: Call[Any]) -> None:
        self._files.connect()

    def copy(self, call: Call[Any], attempt: str, log: str, indexes: str, source: Path, data: bytes) -> None:
        try:
            size_bytes = source.stat().st_size
        except OSError as error:
            raise RemoteStorageError(f"{source}: the segment to copy cannot be read: {error.strerror}") from error
        self._delete_leftovers(attempt)
        self._create(call, log, size_bytes, attempt, lambda: _pieces_of(call, source, size_bytes))
        self._create(call, indexes, len(data), attempt, lambda: _one_piece(call, data))

    def read(self, call: Call[Any], path: str, start: int, end: int | None) -> memoryview:
        return self._files.read(path, start, end)

    def delete_attempt(self, call: Call[Any], attempt: str, log: str, indexes: str) -> None:
        self._delete_leftovers(attempt)  # first, so that no copy moves one later
        self._files.delete(indexes)
        self._files.delete(log)

    def put(self, call: Call[Any], path: str, data: bytes) -> None:
        self._replace(call, path, len(data), SMALL_OBJECT, lambda: _one_piece(call, data))

    def delete(self, call: Call[Any], path: str) -> None:
        self._files.delete(path)

    def listing(self, call: Call[Any], prefix: str) -> list[StoredObject]:
        found: list[StoredObject] = []
        for number, stored in enumerate(self._files.walk(prefix)):
            if number % _NOTED_EVERY == 0:
                note_progress()
            if stored.key.startswith(prefix) and not stored.key.startswith(f"{TEMPORARY}/"):
                found.append(stored)
        return sorted(found, key=lambda stored: stored.key)

    def _delete_leftovers(self, attempt: str) -> None:
        """Deletes the temporary files that earlier writers of an attempt left when they were killed."""
        if not self._files.shows_on_close:
            for leftover in list(self._files.walk(f"{TEMPORARY}/{attempt}.")):
                self._files.delete(leftover.key)

    def _create(self, call: Call[Any], path: str, size_bytes: int, attempt: str, pieces: _Pieces) -> None:
        """Creates the object unless this attempt has created it before."""
        found = self._files.size(path)
        if found is not None and found != size_bytes:
            raise RemoteStorageError(
                f"{self._files.name}/{path} exists with {found} bytes, not {size_bytes}: a uuid was used twice"
            )
        if found is None and self._files.shows_on_close:
            self._write(path, size_bytes, pieces)
        elif found is None:
            self._replace(call, path, size_bytes, attempt, pieces)

    def _replace(self, call: Call[Any], path: str, size_bytes: int, attempt: str, pieces: _Pieces) -> None:
        """Writes an object, which takes the place of another one at once."""
        temporary = f"{TEMPORARY}/{attempt}.{uuid.uuid4()}"
        self._write(temporary, size_bytes, pieces)
        try:
            self._files.move(temporary, path, call.check, replace=True)
        except FileNotFoundError as error:
            raise RetriableRemoteStorageError(
                f"{self._files.name}/{temporary} is gone: another writer of the object deleted it"
            ) from error
        except BaseException:
            self._undo(temporary)
            raise

    def _write(self, path: str, size_bytes: int, pieces: _Pieces) -> None:
        try:
            self._files.write(path, size_bytes, pieces())
        except BaseException:
            self._undo(path)
            raise

    def _undo(self, path: str) -> None:
        """Deletes a partial file. If that fails, `delete_log_segment_data` finds the file by its segment's uuid."""
        with contextlib.suppress(BaseException):  # a panic of a Rust library is a BaseException
            self._files.delete(path)


def refusal(
    name: str, text: str, advice: Mapping[str, str], of_credentials: str, source: str
) -> RemoteStorageError | None:
    """Returns the error of a library that is `text` and has a key of `advice`; None for any other.

    `of_credentials` is the advice of a refusal of the credentials, which come from `source`."""
    for said, change in advice.items():
        if said in text and change == of_credentials:
            return CredentialsRefusedError(f"{name}: {text}: {change}; the credentials come from {source}")
        if said in text:
            return RemoteStorageError(f"{name}: {text}: {change}")
    return None


def _checked(key: str) -> str:
    if any(part in ("", ".", "..", TEMPORARY) for part in key.split("/")):
        raise ValueError(f"not a key: {key!r}")
    return key


def _pieces_of(call: Call[Any], source: Path, size_bytes: int) -> Iterator[bytes]:
    try:
        with source.open("rb", buffering=0) as file:
            position = 0
            while position < size_bytes:
                call.check()
                piece = os.pread(file.fileno(), min(PIECE_BYTES, size_bytes - position), position)
                if not piece:
                    raise RemoteStorageError(f"the segment to copy ends at {position} instead of {size_bytes}")
                yield piece
                note_progress()
                position += len(piece)
    except OSError as error:
        raise RemoteStorageError(f"{source}: the segment to copy cannot be read: {error.strerror}") from error


def _one_piece(call: Call[Any], data: bytes) -> Iterator[bytes]:
    call.check()
    yield data
