"""`ChunkFiles`: chunks in a folder, a file each, as the store has them: what is encrypted there is encrypted here.

    <folder>/<segment uuid, hex>-<chunk number>
    magic "TGCH" | CRC-32C uint32 of the stored bytes | segment uuid | chunk number int32 | stored bytes

A file appears whole, by a rename, but is not synced: what a crash tears does not match its checksum, and is not there.
When a file was used last is its modification time. One process has the folder.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from struct import Struct
from uuid import UUID

from protocol.records.record_batch import crc32c
from tiers.reader.chunk_cache import ChunkKey

_LOG = logging.getLogger(__name__)

_MAGIC = b"TGCH"
_HEADER = Struct(">4sI16si")
_NAME = re.compile(r"([0-9a-f]{32})-(\d{1,10})")
_TORN = ".part"
_BLOCK_BYTES = 4096


def file_bytes(chunk_bytes: int) -> int:
    """What the file of a chunk takes of the disk."""
    return -(-(_HEADER.size + chunk_bytes) // _BLOCK_BYTES) * _BLOCK_BYTES


class ChunkFiles:
    """Not for an event loop: calls block on the disk, and raise its `OSError`s."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self) -> list[tuple[ChunkKey, int]]:
        """What is there and how much of the disk it takes, the longest unused first. What a crash left is removed."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found: list[tuple[float, ChunkKey, int]] = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if named := _NAME.fullmatch(entry.name):
                    stat = entry.stat()
                    key = ChunkKey(UUID(named[1]), int(named[2]))
                    found.append((stat.st_mtime, key, file_bytes(max(stat.st_size - _HEADER.size, 0))))
                elif entry.name.endswith(_TORN):
                    Path(entry.path).unlink(missing_ok=True)
        return [(key, size) for _, key, size in sorted(found)]

    def read(self, keys: Sequence[ChunkKey]) -> list[memoryview]:
        """Up to the first that is not there, or not whole."""
        found: list[memoryview] = []
        for key in keys:
            path = self._path(key)
            try:
                with path.open("rb", buffering=0) as file:
                    data = memoryview(file.readall())
                    os.utime(file.fileno())
            except FileNotFoundError:
                break
            if len(data) < _HEADER.size or _HEADER.unpack_from(data) != _header(key, data[_HEADER.size :]):
                _LOG.warning("a chunk file is not whole", extra={"path": str(path)})
                break
            found.append(data[_HEADER.size :])
        return found

    def write(self, key: ChunkKey, stored: memoryview, check: Callable[[], None]) -> None:
        """`check` is called before the file appears, and may raise."""
        path = self._path(key)
        torn = path.with_name(path.name + _TORN)
        try:
            with open(torn, "wb", buffering=0, opener=_private) as file:  # a Path takes no opener
                written = file.write(_HEADER.pack(*_header(key, stored)))
                while written < _HEADER.size + len(stored):
                    written += file.write(stored[written - _HEADER.size :])
            check()
            torn.replace(path)
        except BaseException:
            torn.unlink(missing_ok=True)
            raise

    def remove(self, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            self._path(key).unlink(missing_ok=True)

    def _path(self, key: ChunkKey) -> Path:
        return self._folder / f"{key.segment.hex}-{key.number}"


def _header(key: ChunkKey, stored: memoryview) -> tuple[bytes, int, bytes, int]:
    return _MAGIC, crc32c(stored, 0, len(stored)), key.segment.bytes, key.number


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
