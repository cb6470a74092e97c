"""`ChunkFiles` keeps chunks in a folder, one file per chunk, with the bytes of the store. So encrypted chunks stay so.

    <folder>/<segment uuid, hex>-<chunk number>
    magic "TGCH" | CRC-32C uint32 of the stored bytes | segment uuid | chunk number int32 | stored bytes

A rename makes a complete file appear, but the file is not synced. After a crash, a torn file fails its checksum and
counts as missing. The modification time of a file is the time of its last use. Only one process may use the folder.
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

logger = logging.getLogger(__name__)

_MAGIC = b"TGCH"
_HEADER = Struct(">4sI16si")
_NAME = re.compile(r"([0-9a-f]{32})-(\d{1,10})")
_TORN = ".part"
_BLOCK_BYTES = 4096


def file_bytes(chunk_bytes: int) -> int:
    """Returns the disk space of a chunk's file, in whole blocks."""
    return -(-(_HEADER.size + chunk_bytes) // _BLOCK_BYTES) * _BLOCK_BYTES


class ChunkFiles:
    """The files. Calls block on the disk and raise its `OSError`s, so they must not run on an event loop."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self) -> list[tuple[ChunkKey, int]]:
        """Returns the chunks and the disk space of their files, the least recently used first.

        Removes the partial files that a crash left.
        """
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
        """Returns the stored bytes of the first `keys`, up to the first chunk that is missing or damaged."""
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
                logger.warning("a chunk file is damaged and is not used", extra={"path": str(path)})
                break
            found.append(data[_HEADER.size :])
        return found

    def write(self, key: ChunkKey, stored: memoryview, check: Callable[[], None]) -> None:
        """Writes a chunk. Calls `check` before the file appears; if `check` raises, there is no file."""
        path = self._path(key)
        torn = path.with_name(path.name + _TORN)
        try:
            with open(torn, "wb", buffering=0, opener=_private) as file:  # `Path.open` has no opener
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
