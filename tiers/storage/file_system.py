"""`FileSystemRemoteStorageManager`: a `RemoteStorageManager` on a `BlockingFileSystem`: a folder, HDFS or `pyarrow.fs`.

* An object appears whole or not at all. If a file becomes visible only when it is closed (object stores), the manager
  writes a new object in place. Otherwise the manager writes it to `.tmp/<segment uuid>.<random>` and then moves it. So
  a delete finds the files that a crash left without searching the partition's folder.
* An object that is replaced stays until the whole new one takes its place. Object stores too would show or delete a
  part of the new one after a failed write, and Azure empties an object when its writer opens. So the manager always
  writes a replacement to a temporary file, and then moves it.
* All calls of the library block, so they run in `BlockingCalls` with a deadline. Between pieces of 1 MiB, a copy notes
  its progress, and checks whether it was abandoned. In that case it removes what it has written.
* Copies, deletions and all other calls have threads of their own, so those that hang do not hold up the others.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from tiers.errors import RemoteResourceNotFoundError, RemoteStorageError, RetriableRemoteStorageError
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.storage.activity import note_progress
from tiers.storage.blocking_calls import BlockingCalls, Call, CallsClosedError
from tiers.storage.object_key import check_cluster_id, indexes_key, log_key
from tiers.storage.remote_storage_manager import (
    LogSegmentData,
    StoredObject,
    StoreFeatures,
    check_range,
)
from tiers.storage.settings import read_duration_ms, read_number

T = TypeVar("T")

PIECE_BYTES = 1024 * 1024
DEADLINES_OF_A_LISTING = 20
"""pyarrow lists a store as a whole, and tells no progress."""
TEMPORARY = ".tmp"
"""The folder of files that are not whole yet. Their names begin with the segment's uuid, or with `SMALL_OBJECT`."""
SMALL_OBJECT = "object"
_NOTED_EVERY = 100


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

    def disconnect(self) -> None:
        """Disconnects. The manager may call it twice, or without `connect`. Hanging calls keep their connections."""

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


class _Lane(Enum):
    """The calls that have threads of their own."""

    COPIES = "copies"
    DELETIONS = "deletions"
    OTHERS = "others"


class FileSystemRemoteStorageManager:
    """The common part of the stores whose library blocks. It is no entry point itself."""

    def __init__(self, files: BlockingFileSystem, values: Mapping[str, str]) -> None:
        """`values` has the settings of `DEFAULTS`. Raises `ValueError`."""
        self._files = files
        self._cluster_id = check_cluster_id(values["cluster.id"])
        self._threads = read_number(values, "threads", 1)
        """The number of copies at a time, of deletions, and of all other calls."""
        self.timeout_s: float | None = read_duration_ms(values, "timeout.ms", 1) / 1000
        self._calls: dict[_Lane, BlockingCalls] = {}

    @property
    def name(self) -> str:
        return self._files.name

    def without_deadlines(self) -> Self:
        """Returns this manager without deadlines, for a caller that enforces the same deadlines and cancels."""
        self.timeout_s = None
        return self

    @property
    def abandoned_calls(self) -> int:
        """The number of threads that hang in abandoned calls of the library."""
        return sum(calls.abandoned for calls in self._calls.values())

    async def open(self) -> None:
        if not self._calls:
            self._calls = {lane: BlockingCalls(self._files.name, self._threads) for lane in _Lane}
        await self._run(lambda _: self._files.connect())

    async def check(self) -> None:
        path = f".check-{uuid.uuid4()}"
        await self.put_object(path, path.encode())
        found = await self.get_object(path)
        await self.delete_object(path)
        if found != path.encode():
            raise RemoteStorageError(f"{self._files.name}: an object reads back with other bytes than were written")

    async def copy_log_segment_data(self, metadata: RemoteLogSegmentMetadata, data: LogSegmentData) -> bytes | None:
        log, indexes = self._paths(metadata)
        attempt = str(metadata.segment_id.id)

        def copy(call: Call[None]) -> None:
            source = data.log_segment
            try:
                size_bytes = source.stat().st_size
            except OSError as error:
                raise RemoteStorageError(f"{source}: the segment to copy cannot be read: {error.strerror}") from error
            self._delete_leftovers(attempt)
            self._create(call, log, size_bytes, attempt, lambda: _pieces_of(call, source, size_bytes))
            self._create(call, indexes, len(data.indexes), attempt, lambda: _one_piece(call, data.indexes))

        await self._run(copy, writes=True, lane=_Lane.COPIES)
        return None

    async def fetch_log_segment(
        self, metadata: RemoteLogSegmentMetadata, start_position: int, end_position: int | None = None
    ) -> memoryview:
        check_range(start_position, end_position)
        log, _ = self._paths(metadata)
        return await self._run(lambda _: self._files.read(log, start_position, end_position))

    async def fetch_indexes(self, metadata: RemoteLogSegmentMetadata) -> bytes:
        _, indexes = self._paths(metadata)
        return await self.get_object(indexes)

    async def delete_log_segment_data(self, metadata: RemoteLogSegmentMetadata) -> bool:
        log, indexes = self._paths(metadata)

        def delete(_: Call[bool]) -> bool:
            self._delete_leftovers(str(metadata.segment_id.id))  # first, so that no copy moves one later
            self._files.delete(indexes)
            self._files.delete(log)
            return True

        return await self._run(delete, lane=_Lane.DELETIONS)

    async def probe(self) -> Sequence[StoreFeatures]:
        """Returns a constant: the libraries offer no other condition than a move that replaces nothing."""
        if self._files.moves_once:
            return [StoreFeatures(True, "when several processes create one file, one of them succeeds")]
        return [StoreFeatures(False, "the library of this store has no conditional writes")]

    async def put_object(self, key: str, data: bytes) -> None:
        path = _checked(key)

        def put(call: Call[None]) -> None:
            self._write(call, path, len(data), SMALL_OBJECT, lambda: _one_piece(call, data), replace=True)

        await self._run(put, writes=True)

    async def get_object(self, key: str) -> bytes:
        path = _checked(key)
        return bytes(await self._run(lambda _: self._files.read(path, 0, None)))

    async def delete_object(self, key: str) -> None:
        path = _checked(key)
        await self._run(lambda _: self._files.delete(path))

    async def list_objects(self, prefix: str) -> AsyncIterator[StoredObject]:
        """Yields the objects in order. It holds the whole listing in memory, because the libraries promise no order."""

        def collect(_: Call[list[StoredObject]]) -> list[StoredObject]:
            found: list[StoredObject] = []
            for number, stored in enumerate(self._files.walk(prefix)):
                if number % _NOTED_EVERY == 0:
                    note_progress()
                if stored.key.startswith(prefix) and not stored.key.startswith(f"{TEMPORARY}/"):
                    found.append(stored)
            return sorted(found, key=lambda stored: stored.key)

        for stored in await self._run(collect, deadlines=DEADLINES_OF_A_LISTING):
            yield stored

    async def close(self) -> None:
        for calls in self._calls.values():
            calls.close()
        self._files.disconnect()

    def _paths(self, metadata: RemoteLogSegmentMetadata) -> tuple[str, str]:
        return log_key(self._cluster_id, metadata), indexes_key(self._cluster_id, metadata)

    async def _run(
        self, work: Callable[[Call[T]], T], *, writes: bool = False, lane: _Lane | None = None, deadlines: int = 1
    ) -> T:
        if not self._calls:
            raise RuntimeError(f"{self._files.name} is not open")
        timeout_s = None if self.timeout_s is None else self.timeout_s * deadlines
        try:
            return await self._calls[lane or _Lane.OTHERS].run(work, timeout_s)
        except (RemoteStorageError, CallsClosedError):
            raise
        except TimeoutError as error:
            raise RetriableRemoteStorageError(f"{self._files.name}: no progress in {timeout_s} s") from error
        except FileNotFoundError as error:
            if writes:
                raise RemoteStorageError(f"{self._files.name} does not exist: create it, or change `uri`") from error
            raise RemoteResourceNotFoundError(f"{self._files.name}: no such object: {error}") from error
        except Exception as error:
            raise self._files.error_of(error) from error

    def _delete_leftovers(self, attempt: str) -> None:
        """Deletes the temporary files that earlier writers of an attempt left when they were killed."""
        if not self._files.shows_on_close:
            for leftover in list(self._files.walk(f"{TEMPORARY}/{attempt}.")):
                self._files.delete(leftover.key)

    def _create(
        self, call: Call[Any], path: str, size_bytes: int, attempt: str, pieces: Callable[[], Iterator[bytes]]
    ) -> None:
        """Creates the object unless this attempt has created it before."""
        found = self._files.size(path)
        if found is None:
            self._write(call, path, size_bytes, attempt, pieces, replace=False)
        elif found != size_bytes:
            raise RemoteStorageError(
                f"{self._files.name}/{path} exists with {found} bytes, not {size_bytes}: a uuid was used twice"
            )

    def _write(
        self,
        call: Call[Any],
        path: str,
        size_bytes: int,
        attempt: str,
        pieces: Callable[[], Iterator[bytes]],
        *,
        replace: bool,
    ) -> None:
        """Writes an object. `replace` says whether an object with other bytes may exist."""
        if self._files.shows_on_close and not replace:
            self._write_or_undo(path, size_bytes, pieces)
            return
        temporary = f"{TEMPORARY}/{attempt}.{uuid.uuid4()}"
        self._write_or_undo(temporary, size_bytes, pieces)
        try:
            self._files.move(temporary, path, call.check, replace=True)
        except FileNotFoundError as error:
            raise RetriableRemoteStorageError(
                f"{self._files.name}/{temporary} is gone: another writer of the object deleted it"
            ) from error
        except BaseException:
            self._undo(temporary)
            raise

    def _write_or_undo(self, path: str, size_bytes: int, pieces: Callable[[], Iterator[bytes]]) -> None:
        try:
            self._files.write(path, size_bytes, pieces())
        except BaseException:
            self._undo(path)
            raise

    def _undo(self, path: str) -> None:
        """Deletes a partial file. If that fails, `delete_log_segment_data` finds the file by its segment's uuid."""
        with contextlib.suppress(BaseException):  # a panic of a Rust library is a BaseException
            self._files.delete(path)


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
