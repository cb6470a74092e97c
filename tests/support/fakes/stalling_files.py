"""A `BlockingFileSystem` over a folder that hangs on request, for the child process of a `ChildStorageManager`.

A read of `frozen` holds the interpreter's lock forever. A read of `stuck` only waits. A read of `dies` ends the
process. A write waits before each piece while a file `hold` exists, and a quarter of a second while a file
`slow` exists.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tiers.errors import RemoteStorageError
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.storage.file_system import FileSystemRemoteStorageManager
from tiers.storage.remote_storage_manager import LogSegmentData, StoredObject


def make(settings: Mapping[str, str]) -> FileSystemRemoteStorageManager:
    return FileSystemRemoteStorageManager(
        StallingFiles(Path(settings["path"])), "cluster-1", 4, int(settings["timeout.ms"])
    )


def make_with_custom_metadata(settings: Mapping[str, str]) -> FileSystemRemoteStorageManager:
    return _WithCustomMetadata(StallingFiles(Path(settings["path"])), "cluster-1", 4, 60_000)


class _WithCustomMetadata(FileSystemRemoteStorageManager):
    """A storage manager whose custom metadata is the uuid of the segment."""

    async def copy_log_segment_data(self, metadata: RemoteLogSegmentMetadata, data: LogSegmentData) -> bytes:
        return metadata.segment_id.id.bytes


class StallingFiles:
    name = "stalling"
    shows_on_close = True
    moves_once = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def connect(self) -> None:
        pass

    def disconnect(self) -> None:
        pass

    def size(self, path: str) -> int | None:
        file = self._folder / path
        return file.stat().st_size if file.is_file() else None

    def write(self, path: str, size_bytes: int, pieces: Iterator[bytes]) -> None:
        file = self._folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb", buffering=0) as opened:
            for piece in pieces:
                opened.write(piece)
                if (self._folder / "slow").exists():
                    time.sleep(0.25)
                while (self._folder / "hold").exists():
                    time.sleep(0.001)

    def move(self, source: str, target: str, *, replace: bool) -> None:
        (self._folder / target).parent.mkdir(parents=True, exist_ok=True)
        (self._folder / source).replace(self._folder / target)

    def read(self, path: str, start: int, end: int | None) -> memoryview:
        match path.rpartition("/")[2]:
            case "frozen":
                ctypes.PyDLL(None).sleep(3600)
            case "stuck":
                threading.Event().wait()
            case "dies":
                os._exit(3)
        return memoryview(bytearray((self._folder / path).read_bytes()))[start : None if end is None else end + 1]

    def delete(self, path: str) -> None:
        (self._folder / path).unlink(missing_ok=True)

    def walk(self, prefix: str) -> Iterator[StoredObject]:
        for file in self._folder.rglob("*"):
            if file.is_file():
                yield StoredObject(str(file.relative_to(self._folder)), file.stat().st_size)

    def error_of(self, error: Exception) -> RemoteStorageError:
        return RemoteStorageError(repr(error))
