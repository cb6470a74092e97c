"""`LocalRemoteStorageManager`: a directory as the remote tier, on a local disk or on a mounted file system.

* An object appears whole or not at all, by a temporary file, fsync, an atomic rename and fsync of the directory.
* Temporary files are in `.tmp` under the root, and their names begin with the segment's uuid. So a delete finds the
  files that a crash left without searching the partition's directory. `open` removes temporary files of small objects
  that are older than a day.
* If the file system allows it, the manager stores the log file by a hard link; otherwise the kernel copies it. The
  caller must no longer write to the file.
* File operations run in `BlockingCalls`: one for copies, one for deletions, one for all others. So operations that hang
  do not hold up the others.
* A copy lives on while it makes progress. An fsync is a single step, also that of a whole segment by a hard link.
* A call that passes its deadline fails with a retriable error and is abandoned. Its thread cannot be stopped, but it no
  longer makes an object appear.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TypeVar

from tiers.durable_folders import sync_folder
from tiers.errors import RemoteResourceNotFoundError, RemoteStorageError, RetriableRemoteStorageError
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.storage.activity import note_progress
from tiers.storage.blocking_calls import BlockingCalls, Call
from tiers.storage.object_key import check_cluster_id, indexes_key, log_key
from tiers.storage.remote_storage_manager import (
    LogSegmentData,
    StoredObject,
    StoreFeatures,
    Version,
    VersionedObject,
    check_range,
    refuse_condition,
)
from tiers.storage.settings import read_number, read_settings

T = TypeVar("T")

_DEFAULTS = {"path": None, "cluster.id": None, "threads": "8", "timeout.ms": "30000", "copy.timeout.ms": "600000"}
_TEMPORARY = ".tmp"
_OBJECT = "object"
_ABANDONED_AFTER_S = 86_400
_LIST_PAGE = 1000
_COPY_BYTES = 8 << 20
_REFUSALS = {
    errno.EACCES,
    errno.EEXIST,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}


class LocalRemoteStorageManager:
    """The storage manager `local`.

    The required settings are `path` (an existing directory) and `cluster.id`. Optional are `threads` (8), `timeout.ms`
    (30000), and `copy.timeout.ms` (600000), the time without progress after which a copy ends."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        values = read_settings("local", settings, _DEFAULTS)
        self._root = Path(values["path"])
        self._cluster_id = check_cluster_id(values["cluster.id"])
        self._timeout_s = read_number(values, "timeout.ms", 1) / 1000
        self._copy_timeout_s = read_number(values, "copy.timeout.ms", 1) / 1000
        threads = read_number(values, "threads", 1)
        self._copies, self._deletions, self._others = (
            BlockingCalls(f"local-storage-{name}", threads) for name in ("copies", "deletions", "others")
        )

    async def open(self) -> None:
        await self._run(lambda _: self._open())

    async def check(self) -> None:
        key = f".check-{uuid.uuid4()}"
        await self.put_object(key, key.encode())
        if await self.get_object(key) != key.encode():
            raise RemoteStorageError(f"{self._root}: an object reads back with other bytes than were written")
        await self.delete_object(key)

    async def copy_log_segment_data(self, metadata: RemoteLogSegmentMetadata, data: LogSegmentData) -> bytes | None:
        log = self._path(log_key(self._cluster_id, metadata))
        indexes = self._path(indexes_key(self._cluster_id, metadata))
        name, source = str(metadata.segment_id.id), data.log_segment

        def copy(call: Call[None]) -> None:
            if not source.is_file():
                raise RemoteStorageError(f"{source}: the segment to copy does not exist")
            self._remove_leftovers(name)
            self._store(log, source.stat().st_size, name, lambda to: _link_or_copy(source, to), call)
            self._store(indexes, len(data.indexes), name, lambda to: _write(to, data.indexes), call)

        await self._run(copy, self._copies, self._copy_timeout_s)
        return None

    async def fetch_log_segment(
        self, metadata: RemoteLogSegmentMetadata, start_position: int, end_position: int | None = None
    ) -> memoryview:
        check_range(start_position, end_position)
        path = self._path(log_key(self._cluster_id, metadata))
        return await self._run(lambda _: _read_range(path, start_position, end_position))

    async def fetch_indexes(self, metadata: RemoteLogSegmentMetadata) -> bytes:
        path = self._path(indexes_key(self._cluster_id, metadata))
        return await self._run(lambda _: path.read_bytes())

    async def delete_log_segment_data(self, metadata: RemoteLogSegmentMetadata) -> bool:
        paths = [self._path(key(self._cluster_id, metadata)) for key in (indexes_key, log_key)]

        def delete(_: Call[bool]) -> bool:
            for path in paths:
                self._unlink(path)
            self._remove_leftovers(str(metadata.segment_id.id))
            return True

        return await self._run(delete, self._deletions)

    async def probe(self) -> Sequence[StoreFeatures]:
        """Returns a constant: a hard link is atomic, and a file has no version."""
        return [StoreFeatures(True, False, "of several writers of one file, one succeeds; files have no versions")]

    async def put_object(self, key: str, data: bytes, if_match: Version | None = None) -> Version | None:
        refuse_condition(if_match)
        path = self._path(key)
        await self._run(lambda call: self._replace(path, _OBJECT, lambda to: _write(to, data), call))
        return None

    async def get_versioned(self, key: str) -> VersionedObject:
        try:
            return VersionedObject(await self.get_object(key), None)
        except RemoteResourceNotFoundError:
            return VersionedObject(None, None)

    async def get_object(self, key: str) -> bytes:
        path = self._path(key)
        return await self._run(lambda _: path.read_bytes())

    async def delete_object(self, key: str) -> None:
        path = self._path(key)
        await self._run(lambda _: self._unlink(path))

    async def list_objects(self, prefix: str) -> AsyncIterator[StoredObject]:
        objects = self._walk(prefix)
        while page := await self._run(lambda _: list(islice(objects, _LIST_PAGE))):
            for stored in page:
                yield stored

    async def close(self) -> None:
        for calls in (self._copies, self._deletions, self._others):
            calls.close()

    def _path(self, key: str) -> Path:
        if any(part in ("", ".", "..", _TEMPORARY) for part in key.split("/")):
            raise ValueError(f"not a key: {key!r}")
        return self._root / key

    async def _run(
        self, work: Callable[[Call[T]], T], calls: BlockingCalls | None = None, timeout_s: float | None = None
    ) -> T:
        timeout_s, calls = timeout_s or self._timeout_s, calls or self._others
        try:
            return await calls.run(work, timeout_s)
        except TimeoutError as error:
            raise RetriableRemoteStorageError(f"{self._root}: no progress in {timeout_s} s") from error
        except OSError as error:
            raise self._mapped(error) from error

    def _mapped(self, error: OSError) -> RemoteStorageError:
        if error.errno == errno.ENOENT:
            if not self._root.is_dir():
                return RemoteStorageError(
                    f"{self._root} is not a directory: mount it, or change `path`; create it only for a new tier"
                )
            if not (self._root / _TEMPORARY).is_dir() and _TEMPORARY in _target_of(error, self._root).parts:
                return RemoteStorageError(
                    f"{self._root} was replaced since it was opened: it has no folder {_TEMPORARY}. Is it mounted?"
                )
            return RemoteResourceNotFoundError(f"no such object: {error.filename}")
        if error.errno in _REFUSALS:
            return RemoteStorageError(f"{error.filename}: {error.strerror}; change `path` or its permissions")
        return RetriableRemoteStorageError(f"{_target_of(error, self._root)}: {error.strerror or repr(error)}")

    def _open(self) -> None:
        if not self._root.is_dir():
            # The root is not created, because a file system that is not mounted must not look like an empty store.
            raise FileNotFoundError(errno.ENOENT, "no such directory", str(self._root))
        temporaries = self._root / _TEMPORARY
        temporaries.mkdir(exist_ok=True)
        abandoned_before_s = time.time() - _ABANDONED_AFTER_S
        for leftover in temporaries.glob(f"{_OBJECT}.*"):
            with contextlib.suppress(FileNotFoundError):
                if leftover.stat().st_mtime < abandoned_before_s:
                    leftover.unlink(missing_ok=True)

    def _remove_leftovers(self, name: str) -> None:
        """Removes the temporary files that earlier writers of an attempt left when they were killed."""
        for leftover in (self._root / _TEMPORARY).glob(f"{name}.*"):
            self._unlink(leftover)

    def _store(self, path: Path, size_bytes: int, name: str, write: Callable[[Path], None], call: Call[None]) -> None:
        """Creates the object unless this attempt has created it before."""
        with contextlib.suppress(FileNotFoundError):
            found = path.stat().st_size
            if found != size_bytes:
                raise RemoteStorageError(f"{path} exists with {found} bytes, not {size_bytes}: a uuid was used twice")
            return
        self._replace(path, name, write, call)

    def _replace(self, path: Path, name: str, write: Callable[[Path], None], call: Call[None]) -> None:
        temporary = self._root / _TEMPORARY / f"{name}.{uuid.uuid4()}"
        try:
            write(temporary)
            self._make_directories(path.parent)
            call.check()
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)

    def _make_directories(self, directory: Path) -> None:
        missing = []
        while not directory.is_dir():
            if directory == self._root:
                raise FileNotFoundError(errno.ENOENT, "no such directory", str(self._root))
            missing.append(directory)
            directory = directory.parent
        for one in reversed(missing):
            one.mkdir(exist_ok=True)
            sync_folder(one.parent)

    def _unlink(self, path: Path) -> None:
        if not self._root.is_dir():
            raise FileNotFoundError(errno.ENOENT, "no such directory", str(self._root))
        try:
            path.unlink()
        except FileNotFoundError:
            return
        sync_folder(path.parent)

    def _walk(self, prefix: str) -> Iterator[StoredObject]:
        """Yields the objects depth first, names in order. Does not enter directories that cannot hold the prefix."""
        root = str(self._root)

        def walk(directory: str, base: str) -> Iterator[StoredObject]:
            with os.scandir(directory) as entries:
                ordered = sorted(entries, key=lambda entry: entry.name)
            for entry in ordered:
                key = base + entry.name
                if entry.is_dir(follow_symlinks=False):
                    inside = key + "/"
                    if entry.name != _TEMPORARY and (inside.startswith(prefix) or prefix.startswith(inside)):
                        yield from walk(entry.path, inside)
                elif key.startswith(prefix):
                    with contextlib.suppress(FileNotFoundError):  # deleted since the scan
                        found = entry.stat()
                        yield StoredObject(key, found.st_size, modified_ms=found.st_mtime_ns // 1_000_000)

        yield from walk(root, "")


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except FileNotFoundError:
        raise
    except OSError:  # another device, or a file system without hard links
        _copy(source, target)
    # The file may be days old, but the object is new. `orphans` judges objects by their age, so this sets it to now.
    os.utime(target)
    with target.open("rb") as file:
        os.fsync(file.fileno())


def _copy(source: Path, target: Path) -> None:
    """Writes each piece to the disk before it notes progress: the page cache would take a whole segment at once."""
    with source.open("rb") as reader, target.open("xb") as writer:
        while piece := reader.read(_COPY_BYTES):
            try:
                writer.write(piece)
                writer.flush()
                os.fsync(writer.fileno())
            except OSError as error:
                error.filename = str(target)  # the error of a write names no file
                raise
            note_progress()


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _read_range(path: Path, start_position: int, end_position: int | None) -> memoryview:
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        length = max(0, (size if end_position is None else min(end_position + 1, size)) - start_position)
        # A `bytearray` would be zeroed first, which costs half as much as the read.
        data = os.pread(file.fileno(), length, start_position)
        while len(data) < length:
            more = os.pread(file.fileno(), length - len(data), start_position + len(data))
            if not more:
                raise OSError(errno.EIO, f"the file ends at {start_position + len(data)} instead of {size}", str(path))
            data += more
        return memoryview(data)


def _target_of(error: OSError, root: Path) -> Path:
    """Returns the file of the store that an error is about. For a copy, `filename` is the source."""
    return Path(error.filename2 or error.filename or root)
