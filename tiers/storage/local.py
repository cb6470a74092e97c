"""`LocalRemoteStorageManager`: a directory as the remote tier, on a local disk or on a mounted file system.

`LocalFiles` is its `BlockingFileSystem`. A file counts only when its bytes and its name are durable, so each write ends
with an fsync of the file, and each move with an fsync of the directory.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from tiers.durable_folders import create_folder, sync_folder
from tiers.errors import RemoteStorageError, RetriableRemoteStorageError
from tiers.storage.file_system import (
    DEFAULTS,
    SMALL_OBJECT,
    TEMPORARY,
    FileSystemRemoteStorageManager,
    ThreadCalls,
)
from tiers.storage.remote_storage_manager import StoredObject
from tiers.storage.settings import read_settings

_ABANDONED_AFTER_S = 86_400
_PIECES_PER_SYNC = 8
_REFUSALS = {
    errno.EACCES,
    errno.EEXIST,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}


class LocalRemoteStorageManager(FileSystemRemoteStorageManager):
    """The storage manager `local`.

    The required settings are `path` (an existing directory) and `cluster.id`. Optional are `threads` (16) and
    `timeout.ms` (30 s), the time without progress after which a call ends."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        values = read_settings("local", settings, {**DEFAULTS, "path": None})
        super().__init__(ThreadCalls(LocalFiles(Path(values["path"])), values))


class LocalFiles:
    """The `BlockingFileSystem` on a directory, which must exist.

    An unmounted file system must not look like an empty store. So no method creates the root. While the root lacks the
    folder of temporary files that `connect` creates, no file counts as missing: the methods raise
    `RetriableRemoteStorageError`, since the file system may be mounted again."""

    shows_on_close = False
    moves_once = True

    def __init__(self, root: Path, setting: str = "path") -> None:
        """`setting` names the root, for error messages."""
        self._root = root
        self._setting = setting
        self._inside = f"{str(root).rstrip('/')}/"
        self._temporaries = root / TEMPORARY
        self.name = str(root)

    def connect(self) -> None:
        """Creates the folder of temporary files, and deletes those of small objects that are older than a day."""
        if not self._root.is_dir():
            raise RemoteStorageError(
                f"{self._root} is not a directory: mount it, or change `{self._setting}`; create it only for a new"
                " store"
            )
        try:
            self._temporaries.mkdir(exist_ok=True)
        except FileNotFoundError as error:  # a file system that takes no new folder, such as /proc
            said = f"{self._root}: no folder can be created in it: change `{self._setting}`"
            raise RemoteStorageError(said) from error
        abandoned_before_s = time.time() - _ABANDONED_AFTER_S
        for leftover in self._temporaries.glob(f"{SMALL_OBJECT}.*"):
            with suppress(FileNotFoundError):
                if leftover.stat().st_mtime < abandoned_before_s:
                    leftover.unlink()

    def size(self, path: str) -> int | None:
        file = self._root / path
        with suppress(FileNotFoundError), self._in_place():
            status = file.stat()
            # The process that moved the file here may have died before its fsync of the directory.
            sync_folder(file.parent)
            return status.st_size if stat.S_ISREG(status.st_mode) else None
        return None

    def write(self, path: str, size_bytes: int, pieces: Iterator[bytes]) -> None:
        """Writes each few pieces to the disk before the next one, since the page cache would take all at once."""
        file = self._root / path
        with self._in_place():
            self._make_parent(file)
            try:
                with file.open("wb") as opened:
                    for number, piece in enumerate(pieces, 1):
                        opened.write(piece)
                        opened.flush()
                        if number % _PIECES_PER_SYNC == 0:
                            os.fsync(opened.fileno())
                    os.fsync(opened.fileno())
            except BaseException as error:
                file.unlink(missing_ok=True)
                if isinstance(error, OSError) and error.filename is None:
                    error.filename = str(file)  # the error of a write names no file
                raise

    def move(self, source: str, target: str, check: Callable[[], None], *, replace: bool) -> None:
        """Moves by a hard link unless it may replace, because a hard link never replaces a file."""
        old, new = self._root / source, self._root / target
        with self._in_place():
            self._make_parent(new)
            check()
            try:
                if replace:
                    old.replace(new)
                else:
                    new.hardlink_to(old)
                    old.unlink(missing_ok=True)
            finally:
                sync_folder(new.parent)

    def read(self, path: str, start: int, end: int | None) -> memoryview:
        with self._in_place(), (self._root / path).open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            length = max(0, (size if end is None else min(end + 1, size)) - start)
            # A `bytearray` would be zeroed first, which costs half as much as the read.
            data = os.pread(file.fileno(), length, start)
            while len(data) < length:
                more = os.pread(file.fileno(), length - len(data), start + len(data))
                if not more:
                    raise OSError(errno.EIO, f"the file ends at {start + len(data)} instead of {size}", file.name)
                data += more
            return memoryview(data)

    def delete(self, path: str) -> None:
        file = self._root / path
        with suppress(FileNotFoundError), self._in_place():
            try:
                file.unlink()
            finally:  # also for a file that a process deleted which died before its fsync
                sync_folder(file.parent)

    def walk(self, prefix: str) -> Iterator[StoredObject]:
        """Yields the files. Does not enter folders that cannot hold the prefix, and skips what vanishes."""
        self._require_place()
        folders = [self._root / prefix.rpartition("/")[0]]
        while folders:
            with suppress(FileNotFoundError, NotADirectoryError), self._in_place(), os.scandir(folders.pop()) as found:
                for entry in found:
                    key = entry.path.removeprefix(self._inside)
                    if not key.startswith(prefix):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(Path(entry.path))
                        continue
                    with suppress(FileNotFoundError):
                        status = entry.stat()
                        yield StoredObject(key, status.st_size, modified_ms=status.st_mtime_ns // 1_000_000)

    def error_of(self, error: Exception) -> RemoteStorageError:
        if not isinstance(error, OSError):
            return RemoteStorageError(f"{self.name}: {error!r}")
        file = error.filename2 or error.filename or self.name  # the second name of a move is the new one
        if error.errno in _REFUSALS:
            return RemoteStorageError(f"{file}: {error.strerror}; change `{self._setting}` or its permissions")
        return RetriableRemoteStorageError(f"{file}: {error.strerror or repr(error)}")

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, NotADirectoryError):
            self._require_place()
            raise

    def _require_place(self) -> None:
        if not self._temporaries.is_dir():
            raise RetriableRemoteStorageError(
                f"{self._root} lacks the folder {TEMPORARY}, which it had when it was opened. Is it mounted?"
            )

    def _make_parent(self, file: Path) -> None:
        try:
            create_folder(file.parent, self._temporaries if self._temporaries in file.parents else self._root)
        except FileExistsError as error:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), error.filename) from error
