"""An example of a third-party storage manager. After `pip install` of this package, these settings select it:

    [storage]
    implementation = "tape"
    folder = "/mnt/tapes"

The storage manager writes both objects of a segment into one file, the tape. Custom metadata (KIP-917) says where on
the tape the indexes begin. A real storage manager would also do its file I/O in threads, with deadlines of its own.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from tiers.errors import RemoteResourceNotFoundError, RemoteStorageError, RetriableRemoteStorageError
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.storage.remote_storage_manager import (
    LogSegmentData,
    StoredObject,
    check_range,
)
from tiers.storage.settings import read_settings


class TapeRemoteStorageManager:
    """Gets the settings as strings with dotted keys. Every storage manager also gets `cluster.id`."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        values = read_settings("tape", settings, {"folder": None, "cluster.id": None})
        self._folder = Path(values["folder"]) / values["cluster.id"]

    async def open(self) -> None:
        if not self._folder.parent.is_dir():
            raise RemoteStorageError(f"{self._folder.parent} is not a directory: change `folder`")
        self._folder.mkdir(exist_ok=True)

    async def copy_log_segment_data(self, metadata: RemoteLogSegmentMetadata, data: LogSegmentData) -> bytes | None:
        log = data.log_segment.read_bytes()
        self._write(self._tape(metadata), log + data.indexes)
        return len(log).to_bytes(8, "big")

    async def fetch_log_segment(
        self, metadata: RemoteLogSegmentMetadata, start_position: int, end_position: int | None = None
    ) -> memoryview:
        check_range(start_position, end_position)
        log, _ = self._read(metadata)
        return memoryview(bytearray(log[start_position : None if end_position is None else end_position + 1]))

    async def fetch_indexes(self, metadata: RemoteLogSegmentMetadata) -> bytes:
        _, indexes = self._read(metadata)
        return indexes

    async def delete_log_segment_data(self, metadata: RemoteLogSegmentMetadata) -> bool:
        """Deletes the tape. Does not need custom metadata, because an unfinished copy has none."""
        self._tape(metadata).unlink(missing_ok=True)
        return True

    async def put_object(self, key: str, data: bytes) -> None:
        """Replaces the object."""
        self._write(self._folder / key.replace("/", "%2F"), data)

    async def get_object(self, key: str) -> bytes:
        try:
            return (self._folder / key.replace("/", "%2F")).read_bytes()
        except FileNotFoundError as error:
            raise RemoteResourceNotFoundError(f"no such object: {key}") from error

    async def delete_object(self, key: str) -> None:
        (self._folder / key.replace("/", "%2F")).unlink(missing_ok=True)

    async def list_objects(self, prefix: str) -> AsyncIterator[StoredObject]:
        for path in sorted(self._folder.iterdir()):
            key = path.name.replace("%2F", "/")
            if key.startswith(prefix):
                yield StoredObject(key, path.stat().st_size)

    async def close(self) -> None:
        pass

    def _tape(self, metadata: RemoteLogSegmentMetadata) -> Path:
        return self._folder / f"{metadata.segment_id.id}.tape"

    def _read(self, metadata: RemoteLogSegmentMetadata) -> tuple[bytes, bytes]:
        if metadata.custom_metadata is None:
            raise RemoteResourceNotFoundError(f"the copy of segment {metadata.segment_id.id} was not finished")
        length = int.from_bytes(metadata.custom_metadata, "big")
        try:
            tape = self._tape(metadata).read_bytes()
        except FileNotFoundError as error:
            raise RemoteResourceNotFoundError(f"no such tape: {metadata.segment_id.id}") from error
        return tape[:length], tape[length:]

    def _write(self, path: Path, data: bytes) -> None:
        try:
            temporary = path.with_suffix(".partial")
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError as error:
            raise RetriableRemoteStorageError(f"{path}: {error.strerror}") from error
