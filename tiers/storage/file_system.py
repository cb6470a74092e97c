"""`FileSystemRemoteStorageManager`: the life of a segment's objects on a `BlockingFileSystem`, which HDFS and
`pyarrow.fs` each provide in a few calls.

* An object appears whole or not at all. Where closing a file is what shows it (object stores) it is written in place;
  elsewhere it is written to `.tmp/<segment uuid>.<random>` and moved, which refuses to replace.
* Everything blocks, hence runs in `BlockingCalls` under a deadline. A copy looks up between pieces of 1 MiB whether it
  was abandoned, and takes back what it has written.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from tiers.errors import RemoteResourceNotFoundError, RemoteStorageError, RetriableRemoteStorageError
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.storage.blocking_calls import BlockingCalls, Call
from tiers.storage.object_key import check_cluster_id, indexes_key, log_key
from tiers.storage.remote_storage_manager import LogSegmentData, StoredObject
from tiers.storage.settings import read_number

T = TypeVar("T")

PIECE_BYTES = 1024 * 1024
_TEMPORARY = ".tmp"


class BlockingFileSystem(Protocol):
    """Called in threads, several at a time. Paths are relative to the store's root; parents are made as needed.

    Raises whatever its library raises; `error_of` says what that means.
    """

    name: str
    """For error messages: where this is."""
    shows_on_close: bool
    """Whether a file that is being written cannot be seen before it is closed."""

    def connect(self) -> None:
        """Called once, before all else."""

    def disconnect(self) -> None:
        """Called last, perhaps twice or without `connect`. Calls that are stuck keep their connections."""

    def size(self, path: str) -> int | None:
        """In bytes; None when there is no such file."""

    def write(self, path: str, pieces: Iterator[bytes]) -> None:
        """Replaces what was there. When `pieces` raises, what was written may be left, whole or not."""

    def move(self, source: str, target: str, *, replace: bool) -> None:
        """Atomically. Asked only of a file system that does not show on close."""

    def read(self, path: str, start: int, end: int | None) -> memoryview:
        """The bytes `[start, end]`, by default to the end; clamped to the file."""

    def delete(self, path: str) -> None:
        """What is missing is no error."""

    def walk(self, prefix: str) -> Iterator[StoredObject]:
        """At least every file whose path begins so, in any order, temporary files included."""

    def error_of(self, error: Exception) -> RemoteStorageError:
        """In this layer's words; `FileNotFoundError` has been dealt with."""


DEFAULTS: Mapping[str, str | None] = {
    "cluster.id": None,
    "threads": "16",
    "timeout.ms": "30000",
    "copy.timeout.ms": "600000",
}
"""The settings that all of them have."""


class FileSystemRemoteStorageManager:
    """What the stores of a blocking library have in common; not an entry point itself."""

    def __init__(
        self, files: BlockingFileSystem, cluster_id: str, threads: int, timeout_ms: int, copy_timeout_ms: int
    ) -> None:
        self._files = files
        self._cluster_id = check_cluster_id(cluster_id)
        self._threads = threads
        self.timeout_s: float | None = timeout_ms / 1000
        self.copy_timeout_s: float | None = copy_timeout_ms / 1000
        self._calls: BlockingCalls | None = None

    @classmethod
    def of(cls, files: BlockingFileSystem, values: Mapping[str, str]) -> Self:
        """Raises `ValueError`."""
        threads, timeout_ms = read_number(values, "threads", 1), read_number(values, "timeout.ms", 1)
        return cls(files, values["cluster.id"], threads, timeout_ms, read_number(values, "copy.timeout.ms", 1))

    @property
    def name(self) -> str:
        return self._files.name

    def without_deadlines(self) -> Self:
        """For a caller that has the same ones and cancels."""
        self.timeout_s = self.copy_timeout_s = None
        return self

    @property
    def abandoned_calls(self) -> int:
        """How many threads are stuck in the library past their deadlines."""
        return 0 if self._calls is None else self._calls.abandoned

    async def open(self) -> None:
        if self._calls is None:
            self._calls = BlockingCalls(self._files.name, self._threads)
        await self._run(lambda _: self._files.connect())

    async def check(self) -> None:
        path = f".check-{uuid.uuid4()}"
        await self.put_object(path, path.encode())
        found = await self.get_object(path)
        await self.delete_object(path)
        if found != path.encode():
            raise RemoteStorageError(f"{self._files.name}: an object does not read back as it was written")

    async def copy_log_segment_data(self, metadata: RemoteLogSegmentMetadata, data: LogSegmentData) -> bytes | None:
        log, indexes = self._paths(metadata)
        attempt = str(metadata.segment_id.id)

        def copy(call: Call[None]) -> None:
            source = data.log_segment
            try:
                size_bytes = source.stat().st_size
            except OSError as error:
                raise RemoteStorageError(f"{source}: the segment to copy cannot be read: {error.strerror}") from error
            self._create(call, log, size_bytes, attempt, lambda: _pieces_of(call, source, size_bytes))
            self._create(call, indexes, len(data.indexes), attempt, lambda: _one_piece(call, data.indexes))

        await self._run(copy, writes=True, takes_long=True)
        return None

    async def fetch_log_segment(
        self, metadata: RemoteLogSegmentMetadata, start_position: int, end_position: int
    ) -> memoryview:
        if end_position < start_position:
            return memoryview(b"")
        log, _ = self._paths(metadata)
        return await self._run(lambda _: self._files.read(log, start_position, end_position))

    async def fetch_indexes(self, metadata: RemoteLogSegmentMetadata) -> bytes:
        _, indexes = self._paths(metadata)
        return await self.get_object(indexes)

    async def delete_log_segment_data(self, metadata: RemoteLogSegmentMetadata) -> bool:
        log, indexes = self._paths(metadata)

        def delete(_: Call[bool]) -> bool:
            self._files.delete(indexes)
            self._files.delete(log)
            if not self._files.shows_on_close:
                for leftover in list(self._files.walk(f"{_TEMPORARY}/{metadata.segment_id.id}.")):
                    self._files.delete(leftover.key)
            return True

        return await self._run(delete)

    async def put_object(self, key: str, data: bytes) -> None:
        path = _checked(key)

        def put(call: Call[None]) -> None:
            self._write(call, path, "object", lambda: _one_piece(call, data), replace=True)

        await self._run(put, writes=True)

    async def get_object(self, key: str) -> bytes:
        path = _checked(key)
        return bytes(await self._run(lambda _: self._files.read(path, 0, None)))

    async def delete_object(self, key: str) -> None:
        path = _checked(key)
        await self._run(lambda _: self._files.delete(path))

    async def list_objects(self, prefix: str) -> AsyncIterator[StoredObject]:
        """The whole listing is in memory: these libraries promise no order."""

        def collect(_: Call[list[StoredObject]]) -> list[StoredObject]:
            found = [
                stored
                for stored in self._files.walk(prefix)
                if stored.key.startswith(prefix) and not stored.key.startswith(f"{_TEMPORARY}/")
            ]
            return sorted(found, key=lambda stored: stored.key)

        for stored in await self._run(collect, takes_long=True):
            yield stored

    async def close(self) -> None:
        if self._calls is not None:
            self._calls.close()
        self._files.disconnect()

    def _paths(self, metadata: RemoteLogSegmentMetadata) -> tuple[str, str]:
        return log_key(self._cluster_id, metadata), indexes_key(self._cluster_id, metadata)

    async def _run(self, work: Callable[[Call[T]], T], *, writes: bool = False, takes_long: bool = False) -> T:
        if self._calls is None:
            raise RuntimeError(f"{self._files.name} is not open")
        timeout_s = self.copy_timeout_s if takes_long else self.timeout_s
        try:
            return await self._calls.run(work, timeout_s)
        except RemoteStorageError:
            raise
        except TimeoutError as error:
            raise RetriableRemoteStorageError(f"{self._files.name}: no answer in {timeout_s} s") from error
        except FileNotFoundError as error:
            if writes:
                raise RemoteStorageError(f"{self._files.name} does not exist: create it, or change `uri`") from error
            raise RemoteResourceNotFoundError(f"{self._files.name}: no such object") from error
        except Exception as error:
            raise self._files.error_of(error) from error

    def _create(
        self, call: Call[Any], path: str, size_bytes: int, attempt: str, pieces: Callable[[], Iterator[bytes]]
    ) -> None:
        """Unless this attempt has created it before."""
        found = self._files.size(path)
        if found is None:
            try:
                self._write(call, path, attempt, pieces, replace=False)
            except FileExistsError:
                found = self._files.size(path)
        if found is not None and found != size_bytes:
            raise RemoteStorageError(
                f"{self._files.name}/{path} exists with {found} bytes, not {size_bytes}: a uuid was used twice"
            )

    def _write(
        self, call: Call[Any], path: str, attempt: str, pieces: Callable[[], Iterator[bytes]], *, replace: bool
    ) -> None:
        if self._files.shows_on_close:
            self._write_or_undo(path, pieces)
            return
        temporary = f"{_TEMPORARY}/{attempt}.{uuid.uuid4()}"
        self._write_or_undo(temporary, pieces)
        try:
            call.check()
            self._files.move(temporary, path, replace=replace)
        except BaseException:
            self._undo(temporary)
            raise

    def _write_or_undo(self, path: str, pieces: Callable[[], Iterator[bytes]]) -> None:
        try:
            self._files.write(path, pieces())
        except BaseException:
            self._undo(path)
            raise

    def _undo(self, path: str) -> None:
        """What it cannot delete now is found again by the name of its attempt."""
        with contextlib.suppress(BaseException):  # a panic is one
            self._files.delete(path)


def _checked(key: str) -> str:
    if any(part in ("", ".", "..", _TEMPORARY) for part in key.split("/")):
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
                    raise RemoteStorageError(f"the segment to copy ends at {position}, expected {size_bytes}")
                yield piece
                position += len(piece)
    except OSError as error:
        raise RemoteStorageError(f"{source}: the segment to copy cannot be read: {error.strerror}") from error


def _one_piece(call: Call[Any], data: bytes) -> Iterator[bytes]:
    call.check()
    yield data
